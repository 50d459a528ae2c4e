"""Snapshots during training: when one is taken, and that a failure changes nothing."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ps
from ps import Cluster
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.snapshot_scheduler import SnapshotScheduler
from ps.snapshots.catalog import Retention, SnapshotCatalog
from shards.job_ids import short_id
from shards.rules import Momentum
from tests.support.eventually import eventually
from tests.support.snapshot_stores import MAP, TABLE, full_disk


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Two shards with a slot, and one worker."""
    with local_shards(shard_specs(TABLE, shards=MAP.shards, rule=Momentum(0.9))) as cluster:
        yield cluster


def names(folder: Path) -> list[str]:
    return [entry.name for entry in SnapshotCatalog(folder).entries()]


def snapshotter(cluster: Cluster, folder: Path, **options: Any) -> SnapshotScheduler:
    return SnapshotScheduler(
        cluster, SnapshotCatalog(folder), rules=("momentum",), workers=1, **options
    )


def push(cluster: Cluster, count: int) -> None:
    with Client(cluster, worker="w", incarnation=time.time_ns()) as client:
        for _ in range(count):
            client.pull()
            client.push(np.ones(TABLE.size, np.float32))


def test_every_so_many_iterations(cluster: Cluster, tmp_path: Path) -> None:
    """One is due when its number has been reached, and not again before the next; it is named after
    the steps that it holds, and holds the same pushes of all shards while no worker pushes.
    """
    with snapshotter(cluster, tmp_path, every=4) as taker:
        for pushes, seen in ((3, []), (2, ["5"]), (2, ["5"]), (1, ["5", "8"])):
            push(cluster, pushes)
            status = ps.AdminClient(cluster)
            with status:
                taker.snapshot_if_due(status.status()[0].steps)
            taker._finish()
            assert names(tmp_path) == seen
    found = SnapshotCatalog(tmp_path).newest_good()
    assert found.manifest.aligned
    assert [state.saved.version for state in found.states] == [8, 8]


def test_a_resumed_job_has_the_one_that_it_goes_on_from(cluster: Cluster, tmp_path: Path) -> None:
    """The first look does not write it again; the next is due at the usual iteration."""
    with snapshotter(cluster, tmp_path, every=4, begins_at=10) as taker:
        for iteration, seen in ((10, []), (11, []), (12, ["0"])):
            taker.snapshot_if_due(iteration)
            taker._finish()
            assert names(tmp_path) == seen


def test_every_so_many_seconds(cluster: Cluster, tmp_path: Path) -> None:
    """By the clock only, whether workers push or not."""
    with snapshotter(cluster, tmp_path, every_s=0.01) as taker:

        def looked() -> list[str]:
            taker.snapshot_if_due(0)
            return names(tmp_path)

        eventually(looked, because="a snapshot is written")
    assert names(tmp_path) == ["0"]


def test_when_somebody_asks(cluster: Cluster, tmp_path: Path) -> None:
    """A request during a snapshot is served next; the answer reports its path."""
    told: list[str] = []
    with snapshotter(cluster, tmp_path, report=told.append) as taker:
        taker.snapshot_if_due(0)
        assert names(tmp_path) == []
        taker.request()
        taker.snapshot_if_due(0)
        taker.request()
        taker.snapshot_if_due(0)

        def looked() -> list[str]:
            taker.snapshot_if_due(0)
            return told

        eventually(looked, because="the requested snapshot is reported")
    assert set(told) == {f"snapshot {tmp_path / '0'}"}
    assert 1 <= len(told) <= 2
    assert taker.latest == str(tmp_path / "0")


def test_a_failure_is_told_and_changes_nothing(cluster: Cluster, tmp_path: Path) -> None:
    """On a full disk the last good one stays, the shards keep serving, the next one succeeds."""
    told: list[str] = []
    with snapshotter(cluster, tmp_path, every=1, report=told.append) as taker:
        push(cluster, 1)
        taker.snapshot_if_due(1)
        taker._finish()
        with full_disk():
            push(cluster, 1)
            taker.snapshot_if_due(2)
            taker._finish()
        assert told == [
            (
                f"snapshot {tmp_path / '2'}: File too large; earlier snapshots are intact;"
                f" the last good one is {tmp_path / '1'}, and training continues"
            )
        ]
        assert names(tmp_path) == ["1"]
        push(cluster, 1)
        taker.snapshot_if_due(3)
        taker._finish()
        with full_disk(), ps.AdminClient(cluster) as console:
            push(cluster, 1)
            taker.save(console.export())
        assert told[1].endswith(f"; the last good one is {tmp_path / '3'}")
    assert names(tmp_path) == ["1", "3"]


def test_old_snapshots_that_cannot_be_removed(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is reported, because they fill the disk; without a receiver the reports are warnings."""
    shelf = SnapshotCatalog(tmp_path, Retention(1))
    with SnapshotScheduler(cluster, shelf, rules=("momentum",), workers=1, every=1) as taker:
        for iteration in (1, 2):
            push(cluster, 1)
            taker.snapshot_if_due(iteration)
            taker._finish()
            if iteration == 1:
                (tmp_path / "1" / "shard-0.safetensors").unlink()
                (tmp_path / "1" / "shard-0.safetensors").mkdir()
    why = "old ones could not be removed: Is a directory"
    assert [record.getMessage() for record in caplog.records] == [f"snapshots {tmp_path}: {why}"]
    assert [vars(record)["job"] for record in caplog.records] == [short_id(cluster.job)]


def test_the_last_is_written_behind_the_one_under_way(cluster: Cluster, tmp_path: Path) -> None:
    """At the end the newest snapshot holds the job's final states."""
    with snapshotter(cluster, tmp_path, every=1) as taker, ps.AdminClient(cluster) as console:
        push(cluster, 1)
        taker.snapshot_if_due(1)
        push(cluster, 2)
        taker.save(console.export())
    assert names(tmp_path)[-1] == "3"
    assert SnapshotCatalog(tmp_path).newest_good().states[0].saved.version == 3


def test_aligned_while_workers_push(cluster: Cluster, tmp_path: Path) -> None:
    """Quiesced shards hold exactly the same pushes, and the worker loses none."""
    done = threading.Event()

    def train() -> None:
        with Client(cluster, worker="w", retry_s=0.1) as client:
            while not done.is_set():
                client.pull()
                client.push(np.ones(TABLE.size, np.float32))
            pushed.append(client.seq)

    pushed: list[int] = []
    thread = threading.Thread(target=train)
    thread.start()
    try:
        with snapshotter(cluster, tmp_path, aligned=True) as taker:
            for _ in range(20):
                taker.request()
                taker.snapshot_if_due(0)
                taker._finish()
    finally:
        done.set()
        thread.join()
    entries = SnapshotCatalog(tmp_path).entries()
    assert [entry.manifest is not None and entry.manifest.aligned for entry in entries] == (
        [True] * len(entries)
    )
    with ps.AdminClient(cluster) as console:
        assert [status.version for status in console.status()] == pushed * MAP.shards
