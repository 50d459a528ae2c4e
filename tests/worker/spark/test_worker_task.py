"""A worker in a task: Arrow batches in, one report out, and no files left behind."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray
from threadpoolctl import threadpool_info

from ps import AdminClient, Cluster, Compression
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.snapshot_scheduler import SnapshotScheduler
from ps.snapshots.catalog import SnapshotCatalog
from shards.errors import BadInput, GiveUp
from shards.schedules import Fixed
from tests.support.ones_job import TABLE, Ones, counted
from worker.data import image_decoding
from worker.spark.worker_task import REPORT, TaskSpec, decode_reports, run_task
from worker.strategies import Downpour
from worker.training.model import Batch
from worker.training.training_loop import Plan, WorkerReport

Floats = NDArray[np.float32]
RATE = Fixed(base_rate=1.0)


class Watched(Ones):
    """A model that records its batches and its BLAS threads, and may fail at a step."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.first_labels: list[int] = []
        self.threads: set[int] = set()
        self._fails_at = fails_at

    def gradient(
        self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int
    ) -> float:
        if step == self._fails_at:
            raise RuntimeError("watched")
        self.first_labels.append(int(batch["label"][0]))
        self.threads |= {pool["num_threads"] for pool in threadpool_info()}
        return super().gradient(weights, batch, out, step=step, seed=seed)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The folder for temporary files, which must be empty again at the end."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    assert list(tmp_path.iterdir()) == []


@contextmanager
def job(steps: int = 6, **more: Any) -> Iterator[tuple[TaskSpec, AdminClient]]:
    """The task spec of a job of `steps` steps, on batches of 2 rows in order."""
    specs = shard_specs(TABLE, shards=2, bound=2, workers=2, schedule=RATE)
    plan = Plan(steps=steps, seed=1, strategy=Downpour(), schedule=RATE, **more)
    with local_shards(specs) as cluster, AdminClient(cluster) as console:
        yield task_spec(cluster, plan), console


def task_spec(cluster: Cluster, plan: Plan, first_incarnation: int = 0) -> TaskSpec:
    return TaskSpec(
        cluster=cluster,
        plan=plan,
        batch_size=2,
        shuffle=False,
        first_incarnation=first_incarnation,
    )


def rows(*sizes: int) -> Iterator[pa.RecordBatch]:
    """Record batches of these sizes; a row's label is its place in the stream."""
    start = 0
    for size in sizes:
        labels = pa.array(range(start, start + size), pa.int64())
        pixels = pa.array([bytes(4)] * size, pa.binary())
        yield pa.record_batch({"label": labels, "data": pixels})
        start += size


def reports(batches: Iterator[pa.RecordBatch]) -> list[WorkerReport]:
    """The reports, decoded like the driver does, from rows as Spark collects them."""
    found = list(batches)
    assert all(batch.schema == REPORT for batch in found)
    return decode_reports([tuple(row.values()) for batch in found for row in batch.to_pylist()])


def test_a_partition_is_trained_on() -> None:
    """The worker is named by its partition, goes round in its rows, reports once, and leaves."""
    model = Watched()
    with job() as (spec, console):
        (report,) = reports(run_task(rows(3, 0, 2), spec, lambda: model, 7, 0))
        assert counted(console.read()) == {-6.0}
        (worker,) = console.status()[0].workers
        assert (worker.worker, worker.standing) == ("w7", "left")
    assert (report.worker, report.incarnation, report.steps, report.samples) == ("w7", 0, 6, 12)
    assert model.first_labels == [0, 2, 4, 1, 3, 0]


@pytest.mark.parametrize("sizes", [(), (0,), (0, 0)])
def test_an_empty_partition_never_registers(sizes: tuple[int, ...]) -> None:
    """A worker without rows never registers, so it holds no other worker back."""
    with job() as (spec, console):
        assert list(run_task(rows(*sizes), spec, Watched, 0, 0)) == []
        assert [status.workers for status in console.status()] == [(), ()]


def test_empty_batches_come_before_rows() -> None:
    """Only a partition without any row is empty."""
    with job() as (spec, console):
        (report,) = reports(run_task(rows(0, 0, 4), spec, Watched, 0, 0))
        assert counted(console.read()) == {-6.0}
    assert report.steps == 6


def test_the_limit_of_images_that_are_left_out() -> None:
    """The spec says how many images a task may leave out because they cannot be decoded."""
    image = image_decoding.encode(np.zeros((1, 2, 2), np.uint8))
    batch = pa.record_batch(
        {"label": [0, 1, 2], "data": [image, b"no image", image], "encoded": [True] * 3}
    )
    with job() as (spec, _):
        strict = replace(spec, skip_images=0)
        with pytest.raises(BadInput, match="w0's rows: expected at most 0 images that cannot be"):
            list(run_task(iter([batch]), strict, Watched, 0, 0))
        (report,) = reports(run_task(iter([batch]), spec, Watched, 1, 0))
        assert report.steps == 6


def test_one_blas_thread() -> None:
    """A task limits BLAS to one thread."""
    model = Watched()
    with job() as (spec, _):
        list(run_task(rows(4), spec, lambda: model, 0, 0))
    assert model.threads == {1}


@pytest.mark.parametrize("iter_size", [1, 2])
def test_another_attempt_continues(iter_size: int) -> None:
    """A retried task takes over the name, and continues with the very batch that came next.

    The error that ended the first attempt names the line of the model that raised it.
    """
    first, second = Watched(fails_at=3 * iter_size), Watched()
    with job(iter_size=iter_size) as (spec, console):
        with pytest.raises(
            GiveUp, match=r"^RuntimeError: watched \(test_worker_task\.py:\d+ in gradient\)(\n|$)"
        ) as caught:
            list(run_task(rows(24), spec, lambda: first, 0, 0))
        assert isinstance(caught.value.__cause__, RuntimeError)
        (report,) = reports(run_task(rows(24), spec, lambda: second, 0, 1))
        assert counted(console.read()) == {-6.0}
        assert [w.takeovers for status in console.status() for w in status.workers] == [1, 1]
    assert (report.incarnation, report.steps, report.samples) == (1, 3, 6 * iter_size)
    starts = first.first_labels + second.first_labels
    assert starts == list(range(0, 12 * iter_size, 2))


def test_a_resumed_job_is_above_its_past() -> None:
    """The incarnations of a resumed job start at the number in its spec."""
    with job() as (spec, console):
        spec = task_spec(spec.cluster, spec.plan, first_incarnation=5)
        (report,) = reports(run_task(rows(4), spec, Watched, 0, 2))
        assert console.status()[0].workers[0].incarnation == 7
    assert report.incarnation == 7


def test_a_bad_row_names_the_worker() -> None:
    """The error for a row that does not fit names the worker and the row."""
    good, bad = rows(2), pa.record_batch({"label": [0.5], "data": [bytes(4)]})
    with (
        job() as (spec, _),
        pytest.raises(BadInput, match=r"worker w4's rows, column label: row 2: expected a whole"),
    ):
        list(run_task(iter([*good, bad]), spec, Watched, 4, 0))


def test_a_task_compresses_as_its_job_says() -> None:
    """The very weights in half the bytes: ones are halves too."""
    with job() as (spec, console):
        halves = Compression.parse("fp16", "bf16")
        reports(run_task(rows(12), replace(spec, compression=halves), Watched, 0, 0))
        statuses = console.status()  # before the console reads, which is answered in plain floats
        assert counted(console.read()) == {-6.0}
        assert sum(status.bytes_in for status in statuses) == 6 * 2 * TABLE.size
        for status, keys in zip(statuses, spec.cluster.map.ranges, strict=True):
            # A busy machine may ask for the same weights again: every answer is half as large.
            assert status.pulls >= 6
            assert status.bytes_out == status.pulls * 2 * len(keys)


def test_a_resumed_task_takes_up_its_residual(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A worker's residual is restored from the snapshot, bit for bit; if it cannot be read, the
    worker continues without it, and its report says why."""
    place, few = tmp_path_factory.mktemp("snapshots"), Compression.parse("topk:0.1")
    with job(steps=3) as (spec, console):
        taker = SnapshotScheduler(
            spec.cluster, SnapshotCatalog(place), rules=("sgd",), workers=2, worker_states=True
        )
        with taker:
            first = replace(spec, compression=few, keep=str(place))
            reports(run_task(rows(5), first, Watched, 0, 0))
            taker.save(console.export())
    read = []
    for resumed, residuals in ((False, None), (True, place / "1"), (True, place / "none")):
        with job(steps=6) as (spec, console):
            spec = replace(spec, compression=few, first_incarnation=1)
            if resumed:
                for shard, state in enumerate(SnapshotCatalog(place).newest_good().states):
                    console.restore(shard, state)
                spec = replace(spec, resumed=str(residuals))
            (report,) = reports(run_task(rows(5), spec, Watched, 0, 0))
            assert report.steps == (3 if resumed else 6)
            read.append((console.read().tobytes(), report.lost))
    expected = f"w0 continued without its residual: snapshot {place / 'none'}/manifest.json: "
    assert read[1] == (read[0][0], "")
    assert read[2][0] != read[0][0]
    assert read[2][1].startswith(expected)
