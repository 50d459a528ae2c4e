"""A worker's own state: saved with snapshots, restored, and reported where it is lost."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from ps import AdminClient, Cluster
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.snapshot_scheduler import SnapshotScheduler
from ps.snapshots import residual_writer, worker_saves
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from ps.snapshots.worker_saves import FOLDER, WorkerSaves, find_saves, most_bytes
from ps.snapshots.worker_state import OwnState
from ps.storage import open_store
from shards.errors import BadInput
from shards.schedules import Fixed
from tests.support.eventually import eventually
from tests.support.pure_cluster import TABLE, bowl, start
from worker.strategies import (
    EAMSGD,
    EASGD,
    MLA,
    AsyncDiLoCo,
    AsyncHeLoCo,
    DiLoCo,
    Downpour,
    SparkNet,
    Strategy,
)
from worker.strategies.base import Floats
from worker.training.model import Batch
from worker.training.training_loop import Plan, WorkerReport, train_worker
from worker.training.worker_state import restore_state

KEEPERS: list[Strategy] = [
    EASGD(tau=4),
    EAMSGD(tau=4),
    SparkNet(tau=4),
    DiLoCo(h=4, inner_lr=0.01),
    AsyncDiLoCo(h=4, inner_lr=0.01),
    MLA(h=4, inner_lr=0.01),
    AsyncHeLoCo(h=4, inner_lr=0.01),
]
EACH = pytest.mark.parametrize("strategy", KEEPERS, ids=lambda one: one.name)


@pytest.fixture(autouse=True)
def _workers_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """And save nothing by themselves, but at their end: that depends on how long a write takes."""
    monkeypatch.setattr(residual_writer, "_WORKER_POLL_S", 0.02)
    monkeypatch.setattr(WorkerSaves, "begin", lambda _self, *, waits: waits)


@pytest.fixture
def saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exchange is saved, however long it takes."""
    monkeypatch.setattr(WorkerSaves, "begin", lambda _self, **_: True)


class Bowl:
    """A quadratic loss whose minimum differs from step to step."""

    table = TABLE

    def initial(self, seed: int) -> Floats:
        return start()

    def gradient(
        self, weights: Floats, batch: Batch, out: Floats, *, step: int, seed: int
    ) -> float:
        assert int(batch["step"][0]) == step, "the batches start where the worker continues"
        out[:] = bowl(0, step, weights)
        return 1.0


class Killed(Exception):
    """The end of a worker that leaves nothing in order."""


def batches(first: int) -> Iterator[Batch]:
    step = first
    while True:
        yield {"step": np.array([step])}
        step += 1


def killed_at(last: int, first: int = 0) -> Iterator[Batch]:
    """The batches up to step `last`, and a crash in its place."""
    for step in range(first, last):
        yield {"step": np.array([step])}
    raise Killed


@contextmanager
def shards_of(
    strategy: Strategy, found: LoadedSnapshot | None = None
) -> Iterator[tuple[Cluster, AdminClient]]:
    """Two shards for one worker: with the first weights, or those of a snapshot."""
    half = strategy.for_workers(1).server(1)
    specs = shard_specs(
        TABLE,
        shards=2,
        bound=strategy.usual_bound,
        rule=half.rule,
        schedule=Fixed(base_rate=half.rate or 0.05),
        merge=half,
    )
    with local_shards(specs) as cluster, AdminClient(cluster) as admin:
        if found is None:
            admin.install(start())
        else:
            for shard, state in enumerate(found.states):
                admin.restore(shard, state)
        yield cluster, admin


def scheduler(cluster: Cluster, place: Path) -> SnapshotScheduler:
    catalog = SnapshotCatalog(place)
    return SnapshotScheduler(cluster, catalog, rules=("sgd",), workers=1, worker_states=True)


def live(
    cluster: Cluster,
    strategy: Strategy,
    steps: int,
    *,
    incarnation: int = 0,
    rows: Iterator[Batch] | None = None,
    keep: Path | None = None,
    resumed: str | None = None,
) -> WorkerReport:
    """One life of the worker, as a task leads it: it continues with what it finds."""
    plan = Plan(
        steps=steps, seed=1, strategy=strategy.for_workers(1), schedule=Fixed(base_rate=0.05)
    )
    with Client(cluster, worker="w", incarnation=incarnation, keep=keep) as client:
        own = restore_state(client, plan.strategy, resumed=resumed, snapshots=keep)
        rows = batches(client.step + own.steps) if rows is None else rows
        return train_worker(client, Bowl(), rows, plan, restart_state=own)


def undisturbed(strategy: Strategy, steps: int) -> bytes:
    with shards_of(strategy) as (cluster, admin):
        live(cluster, strategy, steps)
        return admin.read().tobytes()


@EACH
def test_a_resumed_worker_continues_to_the_bit(strategy: Strategy, tmp_path: Path) -> None:
    """From the last snapshot of a run: momenta, moments, EASGD's own weights, all are there."""
    with shards_of(strategy) as (cluster, admin), scheduler(cluster, tmp_path) as taker:
        live(cluster, strategy, 8, keep=tmp_path)
        taker.save(admin.export())
    found = SnapshotCatalog(tmp_path).newest_good()
    with shards_of(strategy, found) as (cluster, admin):
        report = live(cluster, strategy, 20, incarnation=1, resumed=found.store.address)
        assert (report.steps, report.lost) == (12, "")
        assert admin.read().tobytes() == undisturbed(strategy, 20)


@EACH
def test_a_window_under_way_is_continued(strategy: Strategy, tmp_path: Path) -> None:
    """A snapshot in the middle of a window has its steps: they are not taken a second time."""
    with shards_of(strategy) as (cluster, _), scheduler(cluster, tmp_path) as taker:
        half = strategy.for_workers(1)
        client = Client(cluster, worker="w", keep=tmp_path)

        def until_saved() -> Iterator[Batch]:
            for step in range(6):
                yield {"step": np.array([step])}
            client.flush()
            taker.request()
            taker.snapshot_if_due(0)

            def saved() -> str | None:
                client.write_requested_state()
                taker.snapshot_if_due(0)
                return taker.latest

            eventually(saved, because="a snapshot of a window's middle")
            raise Killed

        plan = Plan(steps=20, seed=1, strategy=half, schedule=Fixed(base_rate=0.05))
        with pytest.raises(Killed):
            train_worker(client, Bowl(), until_saved(), plan)
        client.abort()
    found = SnapshotCatalog(tmp_path).newest_good()
    with shards_of(strategy, found) as (cluster, admin):
        # `Bowl` checks that the batches continue at step 6, though the shards know of 4.
        report = live(cluster, strategy, 20, incarnation=1, resumed=found.store.address)
        assert (report.steps, report.samples, report.lost) == (16, 16, "")
        assert admin.read().tobytes() == undisturbed(strategy, 20)


def test_a_retried_worker_takes_what_the_newest_snapshot_has(tmp_path: Path) -> None:
    """It is of an earlier push than the shards: the moments are kept, the window is taken again,
    and the report says how old they are."""
    strategy = DiLoCo(h=4, inner_lr=0.01)
    with shards_of(strategy) as (cluster, admin), scheduler(cluster, tmp_path) as taker:
        live(cluster, strategy, 8, keep=tmp_path)
        taker.save(admin.export())
        with pytest.raises(Killed):
            live(cluster, strategy, 24, incarnation=1, rows=killed_at(18, 8), keep=tmp_path)
        report = live(cluster, strategy, 24, incarnation=2, keep=tmp_path)
    assert report.lost == "w continued with its own mean, square_mean of 2 pushes ago"
    assert report.steps == 8


@EACH
@pytest.mark.usefixtures("saves")
def test_a_killed_worker_continues_with_its_last_save(strategy: Strategy, tmp_path: Path) -> None:
    """It was saved after the last push, so the next life continues from there to the bit."""
    with shards_of(strategy) as (cluster, admin):
        with pytest.raises(Killed):
            live(cluster, strategy, 20, rows=killed_at(10), keep=tmp_path)
        assert [save.note.seq for save in find_saves(open_store(tmp_path), cluster.job)] == [1, 2]
        report = live(cluster, strategy, 20, incarnation=1, keep=tmp_path)
        assert (report.steps, report.lost) == (12, "")
        assert admin.read().tobytes() == undisturbed(strategy, 20)


@pytest.mark.usefixtures("saves")
def test_damaged_and_foreign_saves_are_not_taken(tmp_path: Path) -> None:
    """Of a damaged one the older is read, of both the line names the file; another job's, and
    another worker's whose name begins the same, are left alone."""
    strategy = DiLoCo(h=4, inner_lr=0.01)
    folder = tmp_path / FOLDER

    def damage(seq: int) -> None:
        path = folder / f"w.0.{seq}.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)

    with shards_of(strategy) as (cluster, _):
        live(cluster, strategy, 8, keep=tmp_path)
        (folder / "w.x.0.1.json").write_text("{}")
    with shards_of(strategy) as (cluster, _):
        live(cluster, strategy, 12, keep=tmp_path)
        names = {path.name for path in folder.iterdir()} - {"w.x.0.1.json"}
        assert names == {f"w.0.{n}.{kind}" for n in (2, 3) for kind in ("json", "safetensors")}
        with Client(cluster, worker="w", incarnation=1) as client:
            damage(3)
            state = restore_state(client, strategy, snapshots=tmp_path)
            assert state.lost == "w continued with its own mean, square_mean of 1 push ago"
            damage(2)
            state = restore_state(client, strategy, snapshots=tmp_path)
    assert state.local is None
    assert state.lost == "w continued without its own mean, square_mean"
    why = f"snapshot {folder}/w.0.3.safetensors: chunk 0 of 1"
    assert state.lost_with_optimizer.startswith(
        f"w continued without the state of its optimizer: {why}"
    )


@pytest.mark.usefixtures("saves")
def test_a_state_that_is_too_large_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bound follows from the job's tables, so that a foreign file cannot fill the memory."""
    strategy = DiLoCo(h=4, inner_lr=0.01)
    with shards_of(strategy) as (cluster, _):
        live(cluster, strategy, 4, keep=tmp_path)
        (save,) = find_saves(open_store(tmp_path), cluster.job)
    assert save.note.part.bytes < most_bytes(TABLE.size)
    monkeypatch.setattr(worker_saves, "_MORE_BYTES", 0)
    with pytest.raises(BadInput, match="expected at most 640 bytes for tables of 10 floats, got"):
        save.read(10)


@pytest.mark.usefixtures("saves")
def test_a_joiner_begins_with_the_moments_of_another_worker(tmp_path: Path) -> None:
    """Only with moments: EASGD's own weights are where that worker is, and stay with it."""
    for strategy in (DiLoCo(h=4, inner_lr=0.01), EASGD(tau=4, alpha=0.5)):
        with shards_of(strategy) as (cluster, _):
            live(cluster, strategy, 8, keep=tmp_path)
            with Client(cluster, worker="w1") as client:
                state = restore_state(client, strategy, snapshots=tmp_path)
            if not strategy.keeps_moments:
                assert state.local is None
                continue
            (save,) = (s for s in find_saves(open_store(tmp_path), cluster.job) if s.note.seq == 2)
            arrays = save.read(TABLE.size)[1]
            assert state.local is not None
            assert state.local.count == 8
            for name in strategy.keeps:
                assert state.local.slots[name].tobytes() == arrays[f"/{name}"].tobytes()


def test_a_window_that_the_end_cut_short_is_pushed_once(tmp_path: Path) -> None:
    """A later life with more steps begins a new window at the shards' weights: one worker of
    SparkNet is plain SGD with momentum, however its steps are divided."""
    strategy = SparkNet(tau=4)
    with shards_of(strategy) as (cluster, admin):
        live(cluster, strategy, 6, keep=tmp_path)
        live(cluster, strategy, 12, incarnation=1, keep=tmp_path)
        got = admin.read()
    with shards_of(strategy) as (cluster, admin):
        live(cluster, strategy, 12)
        np.testing.assert_allclose(got, admin.read(), atol=1e-5)


@EACH
def test_what_is_saved_nowhere_is_reported(strategy: Strategy) -> None:
    """A worker that is killed without a snapshot names what its next life has lost."""
    with shards_of(strategy) as (cluster, _):
        with pytest.raises(Killed):
            live(cluster, strategy, 12, rows=killed_at(6))
        report = live(cluster, strategy, 12, incarnation=1)
    assert report.lost == f"w continued without its own {', '.join(strategy.keeps)}"
    assert report.steps == 8


def test_the_state_of_another_strategy_is_not_taken(tmp_path: Path) -> None:
    """A job that is resumed with another strategy says that this one's state is missing."""
    with shards_of(KEEPERS[0]) as (cluster, admin), scheduler(cluster, tmp_path) as taker:
        live(cluster, KEEPERS[0], 8, keep=tmp_path)
        taker.save(admin.export())
    found = SnapshotCatalog(tmp_path).newest_good()
    with shards_of(SparkNet(tau=4)) as (cluster, admin):
        for shard, state in enumerate(found.states):
            admin.restore(shard, state)
        own = {"incarnation": 1, "resumed": found.store.address}
        report = live(cluster, SparkNet(tau=4), 12, **own)  # type: ignore[arg-type]
    assert report.lost == "w continued without its own history: it was saved for another strategy"


def test_a_worker_that_keeps_nothing_writes_nothing_of_its_own(tmp_path: Path) -> None:
    """Its file has no arrays, and a later life reports no loss."""
    with shards_of(Downpour()) as (cluster, admin), scheduler(cluster, tmp_path) as taker:
        live(cluster, Downpour(), 3, keep=tmp_path)
        taker.save(admin.export())
        report = live(cluster, Downpour(), 6, incarnation=1, keep=tmp_path)
    found = residual_writer.saved_residual(tmp_path / "3", "w")
    assert found is not None
    state, arrays = found
    assert (state.own_state(arrays), arrays) == (OwnState(), {})
    assert report.lost == ""
