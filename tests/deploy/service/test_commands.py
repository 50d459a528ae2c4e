"""The commands that speak to a service, in this process, with stub runners."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from deploy.cli.app import app
from deploy.run.progress_model import LinkReading, ShardReading
from deploy.run.settings import TrainSettings
from deploy.service import client
from deploy.service.access_store import ProjectLimits
from deploy.service.client import ServiceClient
from shards.errors import BadInput, GiveUp
from tests.support.doc_pages import commands, fences, read
from tests.support.eventually import eventually
from tests.support.job_readings import write_figures
from tests.support.service_in_process import Running, listening

Call = Callable[..., Result]


@pytest.fixture
def call(service: Running) -> Iterator[Call]:
    """Run a command against the service."""
    with listening(service) as url:

        def run(*words: object) -> Result:
            found = CliRunner(env={"DOWNPOUR_SERVER": url}).invoke(app, [str(w) for w in words])
            if isinstance(found.exception, Exception):
                raise found.exception
            return found

        yield run


def submitted(call: Call, solver: Path, stub: str, *more: object) -> str:
    words = ("submit", solver, "--data", solver.parent / "data", "--label", f"stub={stub}")
    found: dict[str, Any] = json.loads(call(*words, *more, "--json").stdout)
    return str(found["id"])


@pytest.mark.parametrize(
    ("stub", "state", "status"), [("succeed", "SUCCEEDED", 0), ("bad", "FAILED", 1)]
)
def test_wait_says_how_a_job_ended(
    call: Call, solver: Path, stub: str, state: str, status: int
) -> None:
    """The exit status follows the outcome, and `--json` prints the job."""
    job = submitted(call, solver, stub)
    found = call("wait", job, "--json")
    assert (found.exit_code, json.loads(found.stdout)["state"]) == (status, state)


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("downpour can", "cancel"),
        ("downpour cancel --no", "--now"),
        ("downpour service rei", "reindex"),
    ],
)
def test_a_shell_completes(words: str, completed: str) -> None:
    """The script asks the command itself, which names what fits."""
    command = [sys.executable, "-c", "from deploy.cli.app import main; main()"]
    done = subprocess.run([*command, "completion", "bash"], capture_output=True, check=True)
    assert b"_DOWNPOUR_COMPLETE=complete_bash" in done.stdout
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    environ = os.environ | asked | {"_DOWNPOUR_COMPLETE": "complete_bash"}
    done = subprocess.run(command, capture_output=True, check=True, env=environ)
    assert done.stdout.decode().split() == [completed]


def test_describe_shows_why_a_job_waits(call: Call, service: Running, solver: Path) -> None:
    """A queued job has a line with its position and what holds it back."""
    service.service.access.set_limits("default", ProjectLimits(running=0))
    job = submitted(call, solver, "train")
    line = "1 of 1 in the queue: the project's limit on running jobs is reached\n"
    assert line in call("describe", job).stdout
    call("cancel", job)
    assert "in the queue" not in call("describe", job).stdout


def test_a_job_by_commands(call: Call, service: Running, solver: Path) -> None:
    """Submit, pause, resume, list, describe, events, logs, clone, cancel: each does its work."""
    job = submitted(call, solver, "train", "--workers", 3, "--name", "mine", "--priority", 2)
    service.await_state(job, "RUNNING")
    call("pause", job)
    service.await_state(job, "PAUSED")
    call("resume", job)
    service.await_attempt(job, 2)
    service.await_state(job, "RUNNING")
    assert re.match(rf"{job}  RUNNING +mine", call("list", "--state", "RUNNING").stdout)
    assert call("list", "--state", "running").stdout.startswith(f"{job}  RUNNING")
    assert json.loads(call("list", "-q", "other", "--json").stdout)["jobs"] == []
    assert (call("list", "-q", "other").stdout, call("list", "-q", "other").stderr) == (
        "",
        "no jobs\n",
    )
    text = call("describe", job).stdout
    assert "attempt 1: stopped" in text
    assert "  workers: 3" in text
    clone = json.loads(call("clone", job, "--set", "staleness=9", "--json").stdout)["id"]
    assert service.get(clone)["settings"]["staleness"] == 9
    call("cancel", clone)
    call("cancel", job, "--now")
    assert call("wait", job).exit_code == 130
    assert "attempt 2: train" in call("logs", "-f", job).stdout
    lines = call("events", "-f", job, "--json").stdout.splitlines()
    assert json.loads(lines[-1])["data"]["state"] == "CANCELLED"
    shown = call("events", job).stdout
    assert "CANCELLED" in shown
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\dZ  submitted", shown)
    assert not re.search(r"[{}]|True|False", shown)


def test_top_shows_the_links_of_jobs(call: Call, service: Running, solver: Path) -> None:
    """Each pair of hosts is a line below its job, with the round trip and the bytes."""
    job = submitted(call, solver, "train")
    service.await_state(job, "RUNNING")
    links = (LinkReading("here", "there", 12.5, 3e6), LinkReading("here", "here", None, None))
    shard = ShardReading(0, 5, None, None, None, 0)
    write_figures(service.service.store.folder(job), links=links, shards=(shard,))
    eventually(lambda: bool(service.get(job)["head"]), because="the service reads the figures")
    lines = call("top").stdout.splitlines()
    assert "    here -> there  RTT 12.5 ms  3 MB/s pushed" in lines
    assert "    here -> here  RTT - ms  0 MB/s pushed" in lines
    call("cancel", job, "--now")


def test_top_shows_old_jobs_that_train(
    call: Call, service: Running, solver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many later ones have ended, or wait in a list of several pages."""
    monkeypatch.setattr(client, "_PAGE", 2)
    job = submitted(call, solver, "train")
    service.await_state(job, "RUNNING")
    ended = submitted(call, solver, "succeed")
    call("wait", ended)
    waiting = [submitted(call, solver, "train", "--workers", 8) for _ in range(4)]
    shown = [line.split()[0] for line in call("top").stdout.splitlines()[2:]]
    assert shown == [*reversed(waiting), job]


def test_a_folder_without_a_run_cannot_be_set(call: Call, tmp_path: Path) -> None:
    """No service is asked: the argument is a folder of this machine."""
    with pytest.raises(BadInput, match="expected a run folder or a place with snapshots"):
        call("set", tmp_path, "staleness=3")


def test_options_of_a_file(call: Call, service: Running, solver: Path, tmp_path: Path) -> None:
    """`--settings` gives options of an earlier run; those on the command line win."""
    file = tmp_path / "settings.json"
    earlier = TrainSettings(solver=solver, out=tmp_path / "run", workers=3, shards=2)
    file.write_text(json.dumps(earlier.plain()))
    found = call("submit", "--settings", file, "--workers", 1, "--label", "stub=succeed", "--json")
    job = json.loads(found.stdout)["id"]
    settings = service.get(job)["settings"]
    assert (settings["workers"], settings["shards"]) == (1, 2)
    assert settings["out"] != str(earlier.out)
    call("wait", job)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (("submit",), "expected a solver"),
        (("submit", "a", "--solver", "b"), "got both"),
        (("submit", "nowhere.prototxt"), "it is missing"),
        (("describe", "0" * 17), "not found"),
        (("clone", "0" * 17, "--set", "staleness"), "NAME=VALUE"),
        (("list", "--server", "ftp://x"), "expected a URL"),
        (("list", "--server", "http://["), "expected a URL such as"),
        (("list", "--server", "http://a:65536"), "expected a URL such as"),
        (("list", "--server", "http://u:secret@a"), "got http://...@a"),
        (("set", "runs/nope", "staleness=8"), "set: expected the id of a job, .* no run folder"),
    ],
)
def test_wrong_commands(call: Call, words: tuple[str, ...], refusal: str) -> None:
    """What is wrong is said in one line, as of any other command."""
    with pytest.raises(BadInput, match=refusal):
        call(*words)


@pytest.mark.parametrize("token", ["sécret", "se\ncret"])
def test_a_token_that_no_header_can_hold(token: str) -> None:
    """It is refused before anything is sent, and not quoted."""
    with pytest.raises(BadInput, match="token: expected letters and digits") as caught:
        ServiceClient("http://127.0.0.1:9", token=token)
    assert "cret" not in str(caught.value)


def test_a_service_that_is_down() -> None:
    """A command says where it looked; one that follows a job asks again for a while."""
    pauses: list[float] = []
    with ServiceClient("http://127.0.0.1:9", sleep=pauses.append) as client:
        with pytest.raises(BadInput, match="is `downpour serve` running there"):
            client.get("/jobs")
        assert pauses == []
        with pytest.raises(BadInput):
            client.wait("any")
    assert sum(pauses) == 60.0


def test_a_wait_may_end(call: Call, service: Running, solver: Path) -> None:
    """`--timeout-s` gives up with the state, and leaves the job alone."""
    job = submitted(call, solver, "train")
    with pytest.raises(GiveUp, match=f"job {job} is"):
        call("wait", job, "--timeout-s", 0)
    service.await_state(job, "RUNNING")


def test_the_tutorial(call: Call, service: Running, solver: Path) -> None:
    """The commands of the tutorial's blocks run, one after another."""
    page = read("docs/tutorials/service.md")
    blocks = [fence.text for fence in fences(page) if fence.language == "bash"]
    lines = [words for text in blocks for words in commands(text)]
    assert [words[1] for words in lines] == ["submit", "list"]
    paths = {"deploy/demo/lenet_long_solver.prototxt": solver, "deploy/demo/mnist": solver.parent}
    for words in lines:
        call(*(paths.get(word, word) for word in words[1:]))
    (job,) = service.http.get("/api/v1/jobs").json()["jobs"]
    assert job["name"] == "first"
    consoles = "\n".join(fence.text for fence in fences(page) if fence.language == "console")
    prompts = "\n".join(line for line in consoles.splitlines() if line.startswith("$"))
    service.await_state(job["id"], "SUCCEEDED")
    for words in commands(prompts.replace("ID", job["id"])):
        if words[1] in {"logs", "events", "wait", "clone"}:
            more = () if words[1] != "clone" else ("--json",)
            words = [word for word in words[1:] if word not in {"--snapshot", "newest"}]
            assert call(*words, *more).exit_code == 0
