"""`downpour train` and run folders: what it continues from, and what it leaves unchanged."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from deploy.run import ray_and_spark
from deploy.run import train as training
from deploy.run.folder import RunFolder
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import SnapshotRef
from ps import AdminClient
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.snapshots.manifest import save_snapshot
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import TRAIN, refuses, swap
from tests.support.shard_with_wal import written
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver


@pytest.fixture
def earlier(job: Path) -> Path:
    """The folder of a run of two workers on two shards, with a snapshot of its start."""
    settings = TrainSettings(
        solver=job / "solver.prototxt", data=job / "data", out=job / "run", shards=2
    )
    model = CaffeModel(read_solver(settings.solver).train)
    specs = shard_specs(model.table, shards=2, workers=2)
    with (
        RunFolder.create(settings.out, settings.plain()) as folder,
        local_shards(specs, model.initial(1)) as cluster,
        AdminClient(cluster) as console,
    ):
        save_snapshot(
            folder.snapshots / "7",
            console.export(),
            layout=cluster.layout,
            shard_map=cluster.map,
            rules=("sgd",),
            workers=2,
        )
        return folder.path


def test_resume_goes_on_with_the_settings_of_then(
    downpour: Run, earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An option given now replaces only that setting of the earlier run; a new bound is
    accepted. With a number it is a new run, in a folder of its own, with snapshots of its
    own."""
    told: list[tuple[TrainSettings, SnapshotRef | None]] = []

    def run(settings: TrainSettings, *, origin: SnapshotRef | None) -> None:
        told.append((settings, origin))

    monkeypatch.setattr(training, "run", run)
    status, out, _ = downpour("train", "--resume", "run", "--max-iter", 9, "--staleness", "inf")
    then = TrainSettings.load(earlier / "settings.json")
    shelf = str(earlier / "snapshots")
    assert told.pop() == (
        then.replace(max_iter=9, staleness=None),
        SnapshotRef(shelf, None, earlier),
    )
    assert (status, out) == (130, f"stopped; continue with: downpour train --resume {earlier}\n")
    for origin in ("run@7", "run/snapshots/7", f"file://{earlier}@7"):
        downpour("train", "--resume", origin, "--out", "new")
        new = then.replace(out=earlier.parent / "new")
        assert told.pop() == (new, SnapshotRef(shelf, "7", earlier))
    options = ("--solver", then.solver, "--data", then.data, "--out", "new", "--shards", 2)
    downpour("train", "--resume", "s3://bucket/run@40", *options)
    new = then.replace(out=earlier.parent / "new")
    assert told.pop() == (new, SnapshotRef("s3://bucket/run", "40"))


MISFITS = [
    ("--workers 3", r"resume \S*run/snapshots/7: it was made with workers 2, got 3"),
    (
        "--out other",
        r"train: expected --out or --resume, got both; start a new run with --resume RUN@NUMBER",
    ),
    ("--snapshots s", r"train: expected --snapshots or --resume, got both"),
    ("--weights w", r"train: expected --weights or --resume, got both"),
    ("--seed 1 --lease-s 0", r"--lease-s: expected more than 0 s"),
]


@pytest.mark.parametrize(("option", "line"), MISFITS, ids=[option for option, _ in MISFITS])
def test_resume_of_what_does_not_fit(
    option: str, line: str, downpour: Run, job: Path, earlier: Path
) -> None:
    """A snapshot is only continued as the job that made it; a refusal leaves the run unchanged."""
    refuses(downpour, job, f"train --resume run {option}", line)


def test_resume_with_another_rule(downpour: Run, job: Path, earlier: Path) -> None:
    """A relevant change of the solver file is noticed."""
    swap(job / "solver.prototxt", "base_lr: 0.1", "base_lr: 0.1 momentum: 0.9")
    line = r"resume \S*run/snapshots/7: it was made with rule sgd, got momentum"
    refuses(downpour, job, "train --resume run", line)


def test_resume_of_a_damaged_snapshot(downpour: Run, job: Path, earlier: Path) -> None:
    """A truncated file is named."""
    path = earlier / "snapshots/7/shard-1.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    line = (
        r"snapshot \S*run/snapshots/7/shard-1\.safetensors: expected \d+ bytes, got \d+;"
        r" no other snapshot in \S*run/snapshots is whole"
    )
    refuses(downpour, job, "train --resume run", line)


def test_resume_of_nothing(downpour: Run, job: Path) -> None:
    """A folder without a run, and a run without a snapshot, are refused."""
    line = r"data: expected a run folder or a place with snapshots, got none there"
    refuses(downpour, job, "train --resume data", line)
    settings = TrainSettings(solver=job / "solver.prototxt", data=job / "data", out=job / "run")
    RunFolder.create(settings.out, settings.plain()).close()
    refuses(downpour, job, "train --resume run", r"no snapshot in \S*run/snapshots")


def test_resume_in_a_folder_in_use(downpour: Run, job: Path, earlier: Path) -> None:
    """Two runs never share a folder."""
    then = TrainSettings.load(earlier / "settings.json")
    with RunFolder.resume(earlier, then.plain()):
        line = r"run folder \S*run: expected one without a running writer, got one"
        refuses(downpour, job, "train --resume run", line)
        shutil.rmtree(earlier / "snapshots")  # as before the first one
        refuses(downpour, job, "train --resume run", line)


def test_an_out_that_holds_a_run(downpour: Run, job: Path, earlier: Path) -> None:
    """Results are never overwritten."""
    line = r"run folder \S*run: expected a new folder, got one that holds a run; .*--resume \S*run"
    refuses(downpour, job, TRAIN, line)


def test_an_out_that_is_gone_on_from(downpour: Run, job: Path, earlier: Path) -> None:
    """A run cannot return to an earlier snapshot of its own, because later results would be
    lost."""
    line = (
        r"run folder \S*run: expected a new folder, got one that holds a run; choose another --out"
    )
    refuses(downpour, job, "train --resume run@7 --out run", line)


def test_logs_that_would_be_passed_over(downpour: Run, job: Path, earlier: Path) -> None:
    """A resumed run keeps its logs in place, because they may hold more than its snapshots."""
    written(earlier / "logs/job/shard-0", 1)
    line = (
        r"--logs \S*elsewhere: expected the folder where the run has left its logs, \S*run/logs; or"
        r" move what that holds to \S*elsewhere"
    )
    refuses(downpour, job, "train --resume run --durability logged --logs elsewhere", line)


def test_an_out_that_is_not_ours(downpour: Run, job: Path) -> None:
    """Files that belong to no run are not overwritten either."""
    line = r"run folder \S*data: expected a new folder, got one with t"
    refuses(downpour, job, TRAIN.replace("--out run", "--out data"), line)
    line = r"run folder \S*net\.prototxt: expected a new folder, got a file; choose another --out"
    refuses(downpour, job, TRAIN.replace("--out run", "--out net.prototxt"), line)


def test_ctrl_c_before_the_first_step(
    downpour: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be resumed, no folder stays, and the same command works again."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_and_spark, "start", interrupted)
    for _ in range(2):
        assert downpour(*TRAIN.split()) == (130, "", "stopped\n")
        assert not (job / "run").exists()


@pytest.mark.parametrize(
    ("snapshot", "last"),
    [(None, "stopped"), ("somewhere", "stopped; continue with: downpour train --resume {out}")],
)
def test_ctrl_c_while_it_trains(
    snapshot: str | None, last: str, downpour: Run, job: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command to continue is only printed if there is something to continue from."""
    outcome = SimpleNamespace(interrupted=True, snapshot=snapshot)
    session = SimpleNamespace(createDataFrame=lambda rows: rows)
    monkeypatch.setattr(ray_and_spark, "start", lambda *_: session)
    monkeypatch.setattr(training, "run_job", lambda *_, **__: outcome)
    monkeypatch.setattr(training, "finish", lambda *_: None)
    status, out, err = downpour(*TRAIN.split())
    assert status == 130
    assert (out + err).splitlines()[-1] == last.format(out=job / "run")
