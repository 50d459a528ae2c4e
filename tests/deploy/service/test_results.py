"""What jobs leave behind: artefacts, snapshots, comparisons, experiments, adopted runs."""

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner, Result

from deploy.cli.app import app
from deploy.run.settings import TrainSettings
from deploy.run.updates_parquet import UpdatesWriter
from deploy.runner.adoption import adopt
from deploy.runner.readings import SeriesPoint, read_series
from deploy.service.comparison import differences
from deploy.service.retention import ServiceLimits, collect, plan
from deploy.service.supervisor import may_change_live
from ps.snapshots.manifest import save_snapshot
from ps.storage import open_store
from shards.errors import BadInput
from tests.support.eventually import eventually
from tests.support.run_records import records
from tests.support.service_in_process import Running, Start, listening
from tests.support.snapshot_stores import JOB, states_of

DAY_S = 86400.0


@pytest.fixture
def idle(start: Start) -> Any:
    """A service that starts no job."""
    with start(driven=False) as running:
        yield running


def run_of(running: Running, job: str) -> Path:
    return Path(running.get(job)["settings"]["out"])


def save(run: Path, *numbers: int) -> None:
    for number in numbers:
        store = open_store(run / "snapshots").below(str(number))
        save_snapshot(store, states_of(number), **JOB)


def test_artefacts_have_digests_and_can_be_downloaded(idle: Running, tmp_path: Path) -> None:
    """Only the results of a run are artefacts: no settings, no link, nothing outside of it."""
    job = idle.submit("train")
    run = run_of(idle, job)
    run.mkdir()
    (run / "weights.safetensors").write_bytes(b"weights" * 100)
    (run / "settings.json").write_text("{}")
    (run / "summary.json").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").write_text("secret")
    with UpdatesWriter(run / "updates.parquet", job="j", seed=0) as writer:
        writer.write([records(5)])
    url = f"/api/v1/jobs/{job}/artefacts"
    found = {each["name"]: each for each in idle.http.get(url).json()["artefacts"]}
    assert set(found) == {"weights.safetensors", "updates.parquet/part-000000.parquet"}
    for name, each in found.items():
        content = idle.http.get(f"{url}/{name}").content
        assert (len(content), hashlib.sha256(content).hexdigest()) == (
            each["bytes"],
            each["sha256"],
        )
    part = idle.http.get(f"{url}/weights.safetensors", headers={"Range": "bytes=7-13"})
    assert (part.status_code, part.content) == (206, b"weights")
    for name in ("summary.json", "settings.json", "..%2F..%2Fjob.json", "../job.json"):
        assert idle.http.get(f"{url}/{name}").status_code == 404


def test_snapshots_are_verified_exported_and_pinned(idle: Running) -> None:
    """A damaged one is named with its file; what is exported holds the weights."""
    job = idle.submit("train")
    run = run_of(idle, job)
    save(run, 5, 9)
    url = f"/api/v1/jobs/{job}/snapshots"
    assert idle.http.get(f"{url}/5:verify").json()["good"] is True
    (damaged,) = (run / "snapshots" / "9").glob("*0*.safetensors")
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    found = idle.http.get(f"{url}/9:verify").json()
    assert not found["good"]
    assert damaged.name in found["complaints"][0]
    assert idle.http.get(f"{url}/77:verify").json()["field"] == "snapshot"
    assert idle.http.get(f"{url}/..:verify").status_code in {404, 422}
    assert idle.http.post(f"{url}/5:pin").json() == {"pinned": ["5"]}
    assert [each["pinned"] for each in idle.http.get(url).json()["snapshots"]] == [True, False]
    assert idle.http.post(f"{url}/5:unpin").json() == {"pinned": []}


def test_the_commands_for_snapshots_take_a_job(idle: Running) -> None:
    """`downpour snapshots` lists, verifies and pins those of a job by JOB or JOB@NUMBER."""
    job = idle.submit("train")
    save(run_of(idle, job), 5, 9)

    with listening(idle) as url:

        def call(*words: str) -> Result:
            return CliRunner(env={"DOWNPOUR_SERVER": url}).invoke(app, ["snapshots", *words])

        assert call("pin", f"{job}@5").stdout == "pinned: 5\n"
        listed = [line.split() for line in call("ls", job).stdout.splitlines()]
        assert [(words[0], words[-1]) for words in listed] == [("5", "pinned"), ("9", "MB")]
        assert call("pin", f"{job}@5", "--off").stdout == "pinned: none\n"
        assert call("verify", job).stdout == "5  good\n9  good\n"
        (damaged,) = (run_of(idle, job) / "snapshots" / "9").glob("*0*.safetensors")
        damaged.write_bytes(damaged.read_bytes()[:-1])
        verdict = call("verify", f"{job}@9")
        assert verdict.exit_code == 1
        assert damaged.name in verdict.stdout
        assert "expected a snapshot such as" in str(call("pin", job).exception)
        assert "of one job" in str(call("diff", f"{job}@5", f"{'0' * 17}@5").exception)


def test_a_comparison_shows_what_differs(idle: Running) -> None:
    """Curves of all jobs, and of the settings only those that are not the same."""
    jobs = [idle.submit("train", name=f"job {number}") for number in range(2)]
    idle.ask(jobs[1], "set", settings={"staleness": 9})
    point = SeriesPoint(
        time=1.0, seconds=1.0, steps=10, samples=80, loss=0.5, samples_per_s=None,
        staleness_p50=1.0, staleness_p99=2.0, staleness_max=3, clock_gap=1, waiting=0,
    )  # fmt: skip
    path = idle.service.store.folder(jobs[0]) / "readings" / "series.jsonl"
    path.write_bytes(msgspec.json.encode(point) + b"\n")
    found = idle.http.get(f"/api/v1/compare?jobs={','.join(jobs)}").json()
    assert found["curves"] == [{"x": [10], "y": [0.5]}, {"x": [], "y": []}]
    assert found["settings"] == {"staleness": [4, 9]}
    text = idle.http.get(f"/compare?jobs={jobs[0]}&jobs={jobs[1]}").text
    assert "staleness" in text
    assert "lease_s" not in text
    for query in ("jobs=", "jobs=unknown", f"jobs={jobs[0]}&name=secret"):
        assert idle.http.get(f"/api/v1/compare?{query}").status_code in {404, 422}
    assert differences([{"a": 1, "out": "x"}, {"a": 1, "out": "y"}]) == {}


def test_settings_change_for_the_next_attempt(idle: Running) -> None:
    """`set` changes options that a resumed run may change, and refuses the others."""
    job = idle.submit("train")
    assert idle.ask(job, "set", settings={"max_iter": 7}).status_code == 202
    assert idle.get(job)["settings"]["max_iter"] == 7
    store = idle.service.store
    store.write_settings(store.get(job))
    assert TrainSettings.load(store.folder(job) / "settings.json").max_iter == 7
    for settings in ({"solver": "/etc/passwd"}, {"staleness": "many"}, {"workers": 3}, {}):
        assert idle.ask(job, "set", settings=settings).status_code == 422
    events = idle.http.get(f"/api/v1/jobs/{job}/events").json()["events"]
    assert [each["kind"] for each in events] == ["submitted", "set", "answer"]
    assert events[1]["data"]["changes"] == {"max_iter": 7}
    idle.ask(job, "cancel")
    assert idle.ask(job, "set", settings={"max_iter": 8}).status_code == 409
    assert idle.ask(job, "reshard", shards=2).status_code == 409


def test_a_job_that_trains_takes_changed_settings(service: Running) -> None:
    """The attempt ends with a snapshot, and the next one follows at once, with its slots kept."""
    job = service.submit("train")
    service.await_state(job, "RUNNING")
    service.ask(job, "set", settings={"staleness": 7, "snapshot_keep": 2})
    service.await_attempt(job, 2)
    folder = service.service.store.folder(job)
    assert json.loads((folder / "settings.json").read_text())["staleness"] == 7
    states = [each["data"].get("state") for each in service.service.store.events([job])]
    assert "RECOVERING" in states
    assert "QUEUED" not in states[1:]


def test_a_job_that_trains_follows_the_bound_and_the_rate_at_once(service: Running) -> None:
    """The runner is asked, the attempt stays, and the next one would have the changed settings."""
    job, store = service.submit("train"), service.service.store
    service.await_state(job, "RUNNING")
    changes = {"staleness": 7, "rate_factor": 0.5}
    order_id = service.ask(job, "set", settings=changes).json()["order_id"]
    eventually(
        lambda: any(each["data"].get("order_id") == order_id for each in answers(service, job)),
        because="the runner answers",
    )
    row = store.get(job)
    assert (row.attempt, row.state) == (1, "RUNNING")
    assert {name: row.settings[name] for name in changes} == changes
    service.ask(job, "cancel")


def answers(service: Running, job: str) -> list[dict[str, Any]]:
    events = service.service.store.events([job])
    return [each for each in events if each["kind"] == "answer"]


@pytest.mark.parametrize(
    ("settings", "changes", "live"),
    [
        ({}, {"staleness": 1}, True),
        ({}, {"rate_factor": 0.5, "staleness": None}, True),
        ({}, {"staleness": 1, "max_iter": 9}, False),
        ({"strategy": "easgd"}, {"staleness": 1}, True),
        ({"strategy": "easgd"}, {"rate_factor": 0.5}, False),
        ({"strategy": "downpour", "n_fetch": 2}, {"rate_factor": 0.5}, False),
    ],
)
def test_what_changes_without_another_attempt(
    tmp_path: Path, settings: dict[str, Any], changes: dict[str, Any], live: bool
) -> None:
    """The bound always, the rate where the shards alone apply it, nothing else."""
    plain = TrainSettings(solver=tmp_path / "s", out=tmp_path / "o", **settings).plain()
    assert may_change_live(plain, changes) is live


def test_a_run_of_train_is_adopted(idle: Running, tmp_path: Path) -> None:
    """It is listed where it is, with the curve of its updates, and can be resumed or not."""
    run = tmp_path / "input" / "run"
    run.mkdir()
    settings = TrainSettings(solver=idle.solver, out=run)
    (run / "settings.json").write_bytes(msgspec.json.encode(settings.plain()))
    with UpdatesWriter(run / "updates.parquet", job="j", seed=0, part_s=0.0) as writer:
        for first in (0, 3000):
            writer.write([records(first + 3000, loss=0.5)[first:]])
    save(run, 5)
    adopted = idle.service.admission.adopt(run, None, "default")
    assert (adopted.state, adopted.snapshot, adopted.name) == ("PAUSED", "5", "run")
    points = read_series(idle.service.store.folder(adopted.id) / "readings" / "series.jsonl")
    assert len(points) == 2000
    assert (points[-1].steps, points[-1].samples, points[-1].loss) == (6000, 6000 * 64, 0.5)
    assert adopt(idle.service.store.folder(adopted.id)) == 2000
    with pytest.raises(BadInput, match="expected a run without a job"):
        idle.service.admission.adopt(run, None, "default")
    for wrong in (tmp_path, tmp_path / "nowhere"):
        assert idle.http.post("/api/v1/jobs:adopt", json={"run": str(wrong)}).status_code == 422


def test_curves_of_a_job_that_recovered_never_step_back(idle: Running) -> None:
    """Series, CSV and comparison have the newest point, and none that the recovery made void."""
    job = idle.submit("train")
    series = idle.service.store.folder(job) / "readings" / "series.jsonl"
    point = SeriesPoint(
        time=0.0, seconds=0.0, steps=0, samples=0, loss=1.0, samples_per_s=1.0, accuracy=0.5,
        staleness_p50=0.0, staleness_p99=0.0, staleness_max=0, clock_gap=0, waiting=0,
    )  # fmt: skip
    steps = [*range(1, 1001), *range(700, 1100)]
    lines = [
        msgspec.json.encode(
            msgspec.structs.replace(
                point, time=100.0 + n, seconds=float(n), steps=step, samples=64 * step
            )
        )
        for n, step in enumerate(steps)
    ]
    series.write_bytes(b"\n".join(lines) + b"\n")
    for x, last in (("steps", 1099), ("samples", 64 * 1099), ("seconds", len(steps) - 1)):
        for points in (7, 600, 2000):
            where = f"names=loss&x={x}&points={points}"
            found = idle.http.get(f"/api/v1/jobs/{job}/series?{where}").json()["x"]
            assert found == sorted(found)
            assert (found[-1], len(found)) == (last, min(points, 1100))
            rows = idle.http.get(f"/api/v1/jobs/{job}/series?{where}&format=csv").text.splitlines()
            assert [float(row.partition(",")[0]) for row in rows[1:]] == found
            (curve,) = idle.http.get(
                f"/api/v1/compare?jobs={job}&name=loss&x={x}&points={points}"
            ).json()["curves"]
            assert curve["x"] == found


def test_nothing_that_is_needed_is_deleted(idle: Running) -> None:
    """Neither of a job under way, nor what another job began with, pinned, newest or best."""
    store, home = idle.service.store, idle.service.options.home
    live, ended = idle.submit("train"), idle.submit("train")
    for job in (live, ended):
        run = run_of(idle, job)
        save(run, *range(1, 9))
        (run / "settings.json").write_bytes(msgspec.json.encode(idle.get(job)["settings"]))
        (run / "updates.parquet").mkdir()
        (run / "updates.parquet" / "part-000000.parquet").write_bytes(b"rows")
        (store.folder(job) / "logs" / "driver-1.log").write_text("lines")
        (run / "evaluations.csv").write_text(
            "iteration,samples,seconds,accuracy\n3,1,1.0,0.9\n6,2,2.0,0.8\n"
        )
    clone = idle.ask(ended, "clone", snapshot="2").json()
    idle.submit(resume=f"file://{run_of(idle, ended)}/snapshots/1")
    idle.http.post(f"/api/v1/jobs/{ended}/snapshots/4:pin")
    idle.ask(ended, "cancel")
    answer = idle.http.delete(f"/api/v1/jobs/{ended}")
    assert (answer.status_code, clone["id"] in answer.text) == (409, True)
    now = store.get(ended).updated
    assert plan(store, home, ServiceLimits(snapshots=8), now) == []
    young = {Path(each.path).name for each in plan(store, home, ServiceLimits(), now + DAY_S)}
    assert young == {"5"}
    late = plan(store, home, ServiceLimits(), now + 100 * DAY_S)
    assert {each.job for each in late} == {ended}
    assert {Path(each.path).name for each in late} == {
        "5", "part-000000.parquet", "driver-1.log",
    }  # fmt: skip
    assert idle.http.post("/api/v1/service:gc").json()["freed"] == 0
    assert all(Path(each.path).exists() for each in late)
    assert collect(late) == sum(each.bytes for each in late)
    assert not any(Path(each.path).exists() for each in late)
    assert len(list((run_of(idle, live) / "snapshots").iterdir())) == 8


@pytest.mark.parametrize("word", ["nothing=1", "logs-days", "logs-days=x", "snapshots=-1"])
def test_limits_are_checked(word: str) -> None:
    """A limit has a known name and a number of at least 0."""
    assert ServiceLimits.of_words(["logs-days=7.5", "snapshots=1"]).logs_days == 7.5
    with pytest.raises(BadInput, match="--limit"):
        ServiceLimits.of_words([word])


def test_experiments_are_listed(idle: Running, home: Path) -> None:
    """The folders of sweeps and shapes, by what is in them; an unknown one has no report."""
    sweep = home / "experiments" / "sweep"
    (sweep / "trials").mkdir(parents=True)
    (sweep / "sweep.toml").write_text("")
    (sweep / "trials" / "a.parquet").write_bytes(b"")
    (home / "experiments" / "other").mkdir()
    (sweep / "report.html").write_text("<style>p{}</style><p>verdict</p>")
    (found,) = idle.http.get("/api/v1/experiments").json()["experiments"]
    assert (found["name"], found["sweep"], found["done"]) == ("sweep", True, 1)
    assert "sweep" in idle.http.get("/experiments").text
    answer = idle.http.get("/api/v1/experiments/sweep/report")
    assert "verdict" in answer.text
    assert "sandbox" in answer.headers["content-security-policy"]
    assert idle.http.get("/api/v1/experiments/other/report").status_code == 404
