"""What `run_job` reports to a run's folder and display."""

from pathlib import Path

import numpy as np
import pytest

import ps
from deploy.run.evaluations_csv import read_evaluations
from deploy.run.folder import RunFolder
from deploy.run.observer import RunObserver
from deploy.run.progress import Progress
from deploy.run.settings import TrainSettings
from ps import Cluster, errors
from ps.job_spec import make_cluster, shard_specs
from tests.support.run_records import records
from worker.training.evaluation import Evaluation

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (600,)),))


def cluster(shards: int) -> Cluster:
    specs = shard_specs(TABLE, shards=shards)
    return make_cluster(specs, [f"tcp://127.0.0.1:{5001 + shard}" for shard in range(shards)])


@pytest.mark.parametrize("resharded", [False, True])
def test_the_folder_says_when_the_shards_are_gone(tmp_path: Path, resharded: bool) -> None:
    """While the run trains `cluster.json` leads to its shards, later it says that it has ended.

    So it does for the shards that the job was moved to.
    """
    settings = TrainSettings(solver=tmp_path, data=tmp_path, out=tmp_path / "run")
    first, second = cluster(1), cluster(2)
    with (
        RunFolder.create(settings.out, settings.plain()) as folder,
        Progress(steps=1, workers=1, bound=None) as progress,
        RunObserver(folder, progress, settings) as observer,
    ):
        observer.started(first, None)
        if resharded:
            observer.resharded(second)
        present = second if resharded else first
        assert Cluster.load(folder.cluster) == present
        observer.close()
        with pytest.raises(errors.JobEnded, match=r"cluster\.json: job job has ended"):
            ps.connect(folder.cluster)


def test_a_resumed_run_dates_its_tests_by_the_whole_training(tmp_path: Path) -> None:
    """Seconds of a test and of the summary count those before the resumption, once."""
    settings = TrainSettings(solver=tmp_path, data=tmp_path, out=tmp_path / "run")
    shards = cluster(1)
    for number, restored in enumerate((None, [20])):
        folder = RunFolder.create if restored is None else RunFolder.resume
        with (
            folder(settings.out, settings.plain()) as run,
            Progress(steps=1, workers=1, bound=None) as progress,
            RunObserver(run, progress, settings, begins_at=number or None) as observer,
        ):
            observer.started(shards, restored)
            assert observer.updates is not None
            assert observer.updates.earlier_s == (0.0 if restored is None else 19.0)
            observer.updates.write([records(30)])  # one update a second, at 0 to 29 s
            observer.evaluated(Evaluation(number, 64, 2.5, {"loss": 1.0}), np.zeros(1, np.float32))
    tests = read_evaluations(settings.out / "evaluations.csv")
    assert [test.seconds for test in tests] == [2.5, 21.5]


def test_the_test_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The display is given how many rows of the final test are done."""
    settings = TrainSettings(solver=tmp_path, data=tmp_path, out=tmp_path / "run")
    times = iter(range(0, 100, 4))
    with (
        RunFolder.create(settings.out, settings.plain()) as folder,
        Progress(steps=1, workers=1, bound=None, clock=lambda: float(next(times))) as progress,
        RunObserver(folder, progress, settings) as observer,
    ):
        for rows in (10, 20, 30):
            observer.tested(rows, 30)
    assert "tested 30 of 30 rows" in capsys.readouterr().out
