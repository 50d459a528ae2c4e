"""`downpour train --resume` of a run that has taken all its steps."""

from pathlib import Path

import numpy as np
import pytest
from msgspec.json import decode, encode
from msgspec.structs import replace

from deploy.run import ray_and_spark
from deploy.run.folder import RunFolder
from deploy.run.prepare import prepare
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import origin_of
from deploy.run.summary import Summary
from ps import AdminClient
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.snapshots.manifest import save_snapshot
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import files, refuses
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import write_weights
from worker.caffe.weights import read_weights

STEPS, WORKERS = 10, 2
SUMMARY = Summary(
    test_accuracy=0.5,
    test_loss=1.0,
    seconds=7.0,
    samples=160,
    updates=STEPS * WORKERS,
    workers=WORKERS,
    shards=2,
    staleness_bound=4,
    max_clock_gap=1,
    staleness_mean=1.0,
    staleness_max=2,
    duplicates=0,
    worker_restarts=0,
    samples_per_second=20.0,
    compute_share=0.5,
    data_share=0.1,
    wait_share=0.1,
    network_share=0.1,
    serialise_share=0.1,
)


@pytest.fixture
def ended(job: Path) -> Path:
    """The folder of a run of two workers that has taken its ten steps and written all results."""
    settings = TrainSettings(
        solver=job / "solver.prototxt",
        data=job / "data",
        out=job / "run",
        shards=2,
        workers=WORKERS,
        max_iter=STEPS,
    )
    model = CaffeModel(read_solver(settings.solver).train)
    specs = shard_specs(model.table, shards=2, workers=WORKERS)
    with (
        RunFolder.create(settings.out, settings.plain()) as folder,
        local_shards(specs, model.initial(1)) as cluster,
        AdminClient(cluster) as console,
    ):
        taken = STEPS * WORKERS
        states = [
            replace(state, saved=replace(state.saved, steps=taken, version=taken))
            for state in console.export()
        ]
        save_snapshot(
            folder.snapshots / str(STEPS),
            states,
            layout=cluster.layout,
            shard_map=cluster.map,
            rules=("sgd",),
            workers=WORKERS,
        )
        folder.write_summary(SUMMARY)
        write_weights(folder.weights, model.net, model.initial(1))
        folder.caffemodel.touch()
    return settings.out


def test_a_finished_run_is_left_alone(downpour: Run, ended: Path) -> None:
    """One line reports it, nothing is started, and the figures of the training stay."""
    before = files(ended)
    status, out, err = downpour("train", "--resume", "run")
    assert (status, err) == (0, "")
    assert out == (
        f"{ended} is finished: each worker has taken its 10 steps; to train further, give"
        " a larger --max-iter\n"
    )
    assert files(ended) == before


def test_fewer_steps_than_were_taken(downpour: Run, job: Path, ended: Path) -> None:
    """A smaller --max-iter is impossible, because the weights contain the steps."""
    line = "--max-iter: expected at least 10, which the run has already taken, got 7"
    refuses(downpour, job, "train --resume run --max-iter 7", line)


@pytest.mark.parametrize(("max_iter", "steps", "over"), [(7, STEPS, True), (12, 12, False)])
def test_a_job_of_the_service_may_be_past_its_end(
    ended: Path, max_iter: int, steps: int, over: bool
) -> None:
    """A max_iter that was changed after the run had passed it ends the run, and is no error."""
    plain = TrainSettings.load(ended / "settings.json").plain()
    settings = TrainSettings.of_plain(plain | {"max_iter": max_iter})
    prepared = prepare(settings, origin_of(str(ended)), may_be_past_end=True)
    assert (prepared.inputs.job.plan.steps, prepared.is_over) == (steps, over)


def test_more_steps_are_trained(
    downpour: Run, ended: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a larger --max-iter the run starts; one that does not get far keeps its settings."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ray_and_spark, "start", interrupted)
    settings = (ended / "settings.json").read_bytes()
    status, out, err = downpour("train", "--resume", "run", "--max-iter", 20)
    assert (status, out, err.splitlines()[-1]) == (130, "", "stopped")
    assert (ended / "settings.json").read_bytes() == settings


def test_a_new_run_has_steps_to_take(downpour: Run, job: Path, ended: Path) -> None:
    """A new run from the last step of another is refused unless it trains further."""
    line = r"--resume \S*run/snapshots/10: expected a snapshot with steps left to take, got one"
    refuses(downpour, job, "train --resume run@10 --out new", line)


def test_what_a_full_disk_kept_out_is_written(downpour: Run, ended: Path) -> None:
    """Missing weights and tests are written from the last snapshot; the training's figures stay."""
    (ended / "weights.safetensors").unlink()
    status, out, err = downpour("train", "--resume", "run")
    assert (status, err) == (0, "")
    started, result = out.splitlines()
    assert started == "0:00  starting the test"
    assert result.startswith("test accuracy ")
    summary = decode((ended / "summary.json").read_bytes(), type=Summary)
    fresh = {"test_accuracy": summary.test_accuracy, "test_loss": summary.test_loss}
    assert summary == replace(SUMMARY, **fresh)
    model = CaffeModel(read_solver(ended.parent / "solver.prototxt").train)
    start = model.initial(2)
    written, _ = read_weights(ended / "weights.safetensors", model.net, start)
    np.testing.assert_array_equal(written, model.initial(1))


def test_a_test_that_ctrl_c_ended_is_made_up_for(downpour: Run, ended: Path) -> None:
    """A summary without its test is completed."""
    untested = replace(SUMMARY, test_accuracy=None, test_loss=None)
    (ended / "summary.json").write_bytes(encode(untested))
    status, _, err = downpour("train", "--resume", "run")
    assert (status, err) == (0, "")
    summary = decode((ended / "summary.json").read_bytes(), type=Summary)
    assert summary.test_accuracy is not None
    assert replace(summary, test_accuracy=None, test_loss=None) == untested
