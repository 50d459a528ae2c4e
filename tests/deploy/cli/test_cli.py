"""The command line as far as it goes without starting anything: help, and the options it refuses.

Whatever is wrong with the input is reported in one line with exit status 2, before Ray or Spark is
started, and leaves every file as it was.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from deploy.cli import app as cli
from deploy.cli.command_layout import GROUPS
from deploy.run.settings import TrainSettings
from ps.launch import launch_plan
from ps.logs import logger
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import TRAIN, refuses
from tests.support.ports import free_port
from worker.job.option_fields import list_options


def every_command(group: Any, words: str = "") -> Iterator[str]:
    yield words
    for name, command in getattr(group, "commands", {}).items():
        yield from every_command(command, f"{words} {name}".strip())


@pytest.mark.parametrize("command", every_command(cli.command_line()))
def test_help_fits_a_terminal(command: str, downpour: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command has a help text within eighty columns, of which none is cut off.

    A flag shows no type, as it takes no value.
    """
    monkeypatch.setenv("COLUMNS", "80")
    status, out, err = downpour(*command.split(), "--help")
    assert (status, err) == (0, "")
    assert f"Usage: downpour {command}".rstrip() in out
    assert max(map(len, out.splitlines())) <= 80
    assert "…" not in out
    assert "<bool>" not in out


def test_every_command_is_in_one_group() -> None:
    """The command list has groups, in the order of their use."""
    names = [name for members in GROUPS.values() for name in members]
    assert len(names) == len(set(names))
    assert set(names) == set(cli.command_line().commands)


def test_help_names_every_setting_and_its_default(
    downpour: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting is an option, and its help shows its own default if it has one."""
    monkeypatch.setenv("COLUMNS", "400")
    _, out, _ = downpour("train", "--help")
    lines = {
        found[1]: line for line in out.splitlines() if (found := re.match(r"│ +--([\w-]+)", line))
    }
    settings = {
        name.replace("_", "-"): each.default for name, each in list_options(TrainSettings).items()
    }
    assert lines.keys() == settings.keys() | {"resume", "unset", "help"}
    for name in ("shards", "workers", "strategy", "shards-in", "bind"):
        assert f"[default: {settings[name]}]" in lines[name]
    assert "[default: usual: of most strategies 4, in rounds 0]" in lines["staleness"]
    assert "[default: 10]" in lines["lease-s"]
    assert "[default: 0.5]" in lines["silence-s"]
    assert "[default: 1]" in lines["n-push"]
    assert "[default: yes]" in lines["shuffle"]


def test_version_names_the_build(downpour: Run) -> None:
    """The build id is what both sides of a connection compare."""
    from ps import __version__, build_id

    for argument in ("version", "--version"):
        status, out, _ = downpour(argument)
        assert status == 0
        assert out == f"downpour {__version__} build {build_id()}\n"


@pytest.mark.parametrize(
    ("options", "logged"),
    [
        ((), []),
        (("-v",), ["info"]),
        (("-vv",), ["debug", "info"]),
        (("-v", "-v"), ["debug", "info"]),
    ],
)
def test_verbosity(
    options: tuple[str, ...], logged: list[str], downpour: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command logs warnings; -v adds what happens, and -vv details; --log-json is the format."""

    def build() -> str:
        log = logger("part", shard=1)
        log.debug("detail")
        log.info("event")
        return "b"

    monkeypatch.setattr(cli, "build_id", build)
    status, out, err = downpour(*options, "--log-json", "version")
    assert (status, out.split()[-1]) == (0, "b")
    assert [json.loads(line)["level"] for line in err.splitlines()] == logged


def test_a_token_of_spark_connect_is_not_shown(downpour: Run, job: Path) -> None:
    """The error names the server's URL without its token."""
    url = f"sc://127.0.0.1:{free_port()}"
    line = f"Spark at {url}/: expected a server that accepts connections"
    refuses(downpour, job, f"{TRAIN} --spark {url}/;token=SECRET", line)


def test_names_that_the_system_refuses(downpour: Run, job: Path) -> None:
    """Names that are too long or not UTF-8 are reported in one line, like other file errors."""
    name = "x" * 300
    status, out, err = downpour(*TRAIN.replace("--data data", f"--data {name}").split())
    assert (status, out) == (2, "")
    assert err.startswith(
        "downpour: error: --data: expected a path with names of at most 255 bytes, got 'xxx"
    )
    status, out, err = downpour(*TRAIN.split()[:-1], "run\udcff")
    assert (status, out) == (2, "")
    assert re.fullmatch(
        r"downpour: error: '\S*run\\udcff': expected a name in UTF-8, got .*\n", err
    )


OPTIONS = [
    ("--data nowhere", r"data \S*nowhere: expected a folder or a file, got nothing there"),
    ("--test-data nowhere", r"data \S*nowhere: expected a folder or a file, got nothing"),
    ("--solver nowhere", r"nowhere: cannot be read: No such file"),
    ("--solver data", r"data: cannot be read: Is a directory"),
    ("--weights nowhere.h5", r"nowhere.h5: cannot be read: No such file"),
    (
        "--weights net.prototxt",
        r"net\.prototxt: expected \.caffemodel, \.h5 or \.safetensors, got '\.prototxt'",
    ),
    ("--weights x.safetensors", r"x\.safetensors: expected a \.safetensors file: No such file"),
    ("--workers -1", r"--workers: expected at least 1, got -1"),
    ("--shards 0", r"--shards: expected at least 1, got 0"),
    (
        "--shards 1025",
        r"table weights: expected 1 to \d+ shards, got 1025",
    ),
    ("--max-iter -5", r"--max-iter: expected at least 1, got -5"),
    ("--n-push -1", r"--n-push: expected at least 1, got -1"),
    (
        "--n-push 3 --strategy downpour:n_push=2",
        r"--n-push: expected 2, as --strategy has it, or none, got 3",
    ),
    ("--n-push 9 --staleness 4", r"--staleness: pushing every 9 steps needs at least 8, got 4"),
    ("--staleness -1", r"--staleness: expected a whole number of steps or inf, got '-1'"),
    ("--strategy down", r"--strategy: expected one of adag, .*, got 'down'"),
    ("--strategy bsp --n-fetch 2", r"--n-fetch 2: strategy bsp has no such option"),
    ("--device cuda", r"--device: expected auto, cpu, gpu or gpu:N, got 'cuda'"),
    ("--device gpu:1", r"--device gpu:1: expected a GPU that answers, and CuPy .*, got none"),
    ("--lease-s nan", r"--lease-s: expected more than 0 s, up to 604800, got nan"),
    (
        "--bind 0.0.0.0 --spark sc://192.0.2.1:1",
        r"Spark at sc://192\.0\.2\.1:1: expected ;use_ssl=true .* in the URL .* --plaintext",
    ),
    (
        "--bind 0.0.0.0 --ray 192.0.2.1:1",
        r"Ray: expected RAY_AUTH_MODE=token where shards are open to .*, got none: .* --plaintext",
    ),
    ("--port 70000", r"--port: expected 0 to 65535, got 70000"),
    ("--spark 127.0.0.1:7077", r"--spark: expected spark://HOST:PORT, .* got '127\.0\.0\.1:7077'"),
    (
        "--spark spark://127.0.0.1:1",
        r"Spark at spark://127\.0\.0\.1:1: expected a server .*, got: Connection refused",
    ),
]


@pytest.mark.parametrize(("option", "line"), OPTIONS, ids=[option for option, _ in OPTIONS])
@pytest.mark.usefixtures("no_gpu")
def test_wrong_options(option: str, line: str, downpour: Run, job: Path) -> None:
    """Missing or wrong files, and meaningless numbers and names, are refused."""
    refuses(downpour, job, f"{TRAIN} {option}", line)


@pytest.mark.parametrize("missing", ["solver", "out"])
def test_missing_options(missing: str, downpour: Run, job: Path) -> None:
    """A new run needs these two options."""
    arguments = re.sub(rf"--{missing} \S+", "", TRAIN)
    refuses(downpour, job, arguments, rf"train: expected --{missing}, or --resume with an earlier")


def test_data_that_neither_an_option_nor_the_net_names(downpour: Run, job: Path) -> None:
    """The error names the net, whose data layer could name a source."""
    line = r"--data: expected data, as no data layer of \S*net\.prototxt names a source to train on"
    refuses(downpour, job, re.sub(r"--data \S+", "", TRAIN), line)


def test_weights_of_another_net(downpour: Run, job: Path) -> None:
    """A tensor with the right name and a wrong shape is named."""
    other = job / "other.safetensors"
    tensors = {"ip2/0": np.zeros((3, 5), np.float32), "ip2/1": np.zeros(3, np.float32)}
    save_file(tensors, other)
    line = r"other\.safetensors: layer ip2: blob 0: expected shape \(3, 16\), got \(3, 5\)"
    refuses(downpour, job, f"{TRAIN} --weights {other}", line)


def test_weights_of_a_stranger(downpour: Run, job: Path) -> None:
    """A weights file without any layer of the net is refused as a mistake."""
    save_file({"fc8/0": np.zeros((3, 5), np.float32)}, job / "other.safetensors")
    line = r"other\.safetensors: expected weights of layer conv, got a file without"
    refuses(downpour, job, f"{TRAIN} --weights other.safetensors", line)


def test_no_gpu_for_the_shards(downpour: Run, job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing GPU for the shards on this machine is reported before anything starts."""
    monkeypatch.setattr(launch_plan, "gpu", lambda: None)
    line = "--shard-device gpu: expected a GPU that answers, got none here"
    for home in ("ray", "processes"):
        refuses(downpour, job, f"{TRAIN} --shards-in {home} --shard-device gpu", line)


@pytest.mark.parametrize("arguments", ["", "snapshots"])
def test_a_command_group_alone_prints_its_help(arguments: str, downpour: Run) -> None:
    """Without a command, the help is printed and the status is 0."""
    status, out, err = downpour(*arguments.split())
    assert (status, err) == (0, "")
    assert f"Usage: downpour {arguments}".rstrip() in out


@pytest.mark.parametrize(
    "words",
    [
        "set nothere staleness=3", "resume nothere", "describe a/b", "compare a b", "wait nothere",
        "service reshard nothere 2", "export nothere 3 -o weights.h5",
    ],
)  # fmt: skip
def test_what_is_no_job_is_not_asked_for(words: str, downpour: Run) -> None:
    """No service is blamed for a folder that is not there, or for a mistyped id."""
    status, _, err = downpour(*words.split())
    assert status == 2
    assert re.search(r"expected the id of a job, .* got '.*'; there is no run folder", err)


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        ("resume", "downpour train --resume"),
        ("snapshot", "downpour snapshots take"),
        ("describe", "downpour service adopt"),
    ],
)
def test_a_run_folder_leads_to_the_commands_for_runs(
    words: str, instead: str, downpour: Run, tmp_path: Path
) -> None:
    """A command for jobs of the service names the one for the folder of a run."""
    (tmp_path / "settings.json").write_text("{}")
    status, _, err = downpour(*words.split(), tmp_path)
    assert status == 2
    assert f"for a run: {instead} {tmp_path}" in err
