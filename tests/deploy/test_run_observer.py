"""What `run_job` reports to a run's folder and display."""

from pathlib import Path

import pytest

import ps
from deploy.progress import Progress
from deploy.run_folder import RunFolder
from deploy.run_observer import RunObserver
from deploy.settings import TrainSettings
from ps import Cluster, errors
from ps.job_spec import make_cluster, shard_specs

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
