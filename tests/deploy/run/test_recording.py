"""A program of the user's own is recorded as `downpour train` is, and its costs can be drawn."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import deploy
import ps
import worker
from deploy.run.evaluations_csv import read_evaluations
from deploy.run.folder import EVALUATIONS, UPDATES
from deploy.run.plots import plot_costs, read_losses
from deploy.run.updates_parquet import UpdatesWriter, read_updates
from shards.errors import BadInput
from tests.support.run_records import records, status
from worker.callbacks.base import watching
from worker.training.evaluation import Evaluation

PNG = b"\x89PNG\r\n\x1a\n"


def train(job: ps.Job, name: str, steps: int) -> None:
    with job.worker(name) as me:
        for _ in range(steps):
            with me.step(samples=8) as step:
                step.push({"w": np.ones(6, np.float32)})
                step.loss = 2.0
        me.flush()


def test_a_job_is_recorded(tmp_path: Path) -> None:
    """Each update is one row a shard, also after the job has moved to other shards; a test has the
    samples that were trained on by then.
    """
    out = tmp_path / "runs" / "mine"
    with (
        ps.local({"w": np.zeros(6, np.float32)}, shards=2) as job,
        deploy.record(job, out) as run,
    ):
        train(job, "w0", 5)
        run.test({"loss": 1.5})
        job.reshard(1)
        train(job, "w1", 3)
        run.test({"loss": 1.0})
    rows = [row for batch in read_updates(out / UPDATES, shard=0) for row in batch.to_pylist()]
    assert [(row["worker"], row["samples"]) for row in rows] == [("w0", 8)] * 5 + [("w1", 8)] * 3
    tests = read_evaluations(out / EVALUATIONS)
    assert [(test.samples, test.figures) for test in tests] == [
        (40, {"loss": 1.5}),
        (64, {"loss": 1.0}),
    ]
    losses = read_losses(out / UPDATES)
    assert losses.pushed[-1] == sum(
        sum(batch.column("bytes").to_pylist()) for batch in read_updates(out / UPDATES)
    )
    with ps.local({"w": np.zeros(6, np.float32)}) as job:
        with pytest.raises(BadInput, match=r"record: .*mine: expected a new folder, got one with"):
            deploy.record(job, out).__enter__()
        with (
            deploy.record(job, tmp_path / "other") as run,
            pytest.raises(BadInput, match="figures"),
        ):
            run.test({"loss": "low"})  # type: ignore[dict-item]


def test_a_run_on_spark_is_recorded_by_a_callback(tmp_path: Path) -> None:
    """What the run reports is in the folder: the records of the updates, and the tests."""
    recorder, run = deploy.Recorder(tmp_path / "run"), worker.WatchedRun(1, {}, tests=True)
    cluster: Any = type("Job", (), {"job": "job-0123456789abcdef"})()

    def parameters(weights: Any) -> worker.Parameters:
        return worker.Parameters(weights, lambda arena: arena, lambda *_: None)

    with watching([recorder], run, parameters) as watch:
        watch.started(cluster, None)
        watch.progressed([status()], [records(4, loss=2.0)])
        watch.evaluated(Evaluation(4, 256, 4.0, {"loss": 1.0}), np.zeros(1, np.float32))
        watch.finish(np.zeros(1, np.float32), [])
    assert read_losses(tmp_path / "run" / UPDATES).samples.tolist() == [64, 128, 192, 256]
    assert read_evaluations(tmp_path / "run" / EVALUATIONS)[0].figures == {"loss": 1.0}


@pytest.mark.filterwarnings("error")
def test_costs_are_drawn(tmp_path: Path) -> None:
    """One run is points, several are curves, with and without tests; bytes are those of all
    shards.
    """
    runs = {}
    for name, count in (("plain", 300), ("tested", 200), ("empty", 0)):
        runs[name] = tmp_path / name
        runs[name].mkdir()
        rows = records(count, loss=np.linspace(3, 1, count), samples=64, bytes=1000)
        with UpdatesWriter(runs[name] / UPDATES, job="j", seed=0) as writer:
            writer.write([rows, records(count, bytes=3000)])
    recorder = deploy.Recorder(runs["tested"])
    for number in (50, 150):
        recorder.add(Evaluation(number, number * 64, float(number), {"loss": 2.0}))
    assert read_losses(runs["plain"] / UPDATES).pushed[-1] == 300 * 4000
    pictures = []
    for chosen in (["tested"], ["plain", "tested"], ["empty"]):
        plot_costs({name: runs[name] for name in chosen}, tmp_path / "out.png")
        pictures.append((tmp_path / "out.png").read_bytes())
        assert pictures[-1].startswith(PNG)
    assert len(set(pictures)) == 3
    with pytest.raises(BadInput, match=r"nowhere/updates.parquet: expected a folder of updates"):
        plot_costs({"nowhere": tmp_path / "nowhere"}, tmp_path / "out.png")
