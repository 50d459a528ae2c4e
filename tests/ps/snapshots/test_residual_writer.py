"""Workers' residuals in snapshots: written when a snapshot wants them, and at a worker's end."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import msgspec
import numpy as np
import pytest

from ps import AdminClient, Cluster, Compression
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.snapshot_scheduler import SnapshotScheduler
from ps.snapshots import checked_json, residual_writer, residuals
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from ps.snapshots.manifest import damage
from ps.snapshots.residual_writer import FOLDER, gather_residuals, saved_residual, sweep_residuals
from ps.snapshots.shard_file import StateFile
from ps.snapshots.worker_state import SavedWorkerState
from shards.errors import BadInput, Fenced
from shards.rules import Momentum
from shards.schedules import Fixed
from tests.support.eventually import eventually
from tests.support.snapshot_stores import MAP, TABLE

STEPS = 24


@contextmanager
def served(found: LoadedSnapshot | None = None) -> Iterator[tuple[Cluster, AdminClient]]:
    """Two shards of a rule with slots and bound 0: fresh ones, or those of a snapshot."""
    specs = shard_specs(
        TABLE, shards=MAP.shards, bound=0, rule=Momentum(0.9), schedule=Fixed(base_rate=0.1)
    )
    with local_shards(specs) as cluster, AdminClient(cluster) as console:
        for shard, state in enumerate(found.states if found is not None else ()):
            console.restore(shard, state)
        yield cluster, console


@pytest.fixture(autouse=True)
def _workers_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residual_writer, "_WORKER_POLL_S", 0.02)


def client_of(
    cluster: Cluster, push: str, incarnation: int = 0, worker: str = "w", **options: Any
) -> Client:
    return Client(
        cluster,
        worker=worker,
        incarnation=incarnation,
        compression=Compression.parse(push),
        patience_s=120.0,  # the shards compile at the first push, for it was not announced
        **options,
    )


def step(client: Client) -> None:
    """One step with a gradient that depends on the weights and on the step's own noise."""
    weights = client.pull().weights
    gradient = client.new_gradient()
    gradient[:] = 0
    noise = np.random.default_rng(client.step).standard_normal(700).astype(np.float32)
    TABLE.views(gradient)["w"][:] = noise + TABLE.views(weights.copy())["w"]
    client.push(gradient)


def snapshotter(cluster: Cluster, place: Path, told: list[str] | None = None) -> SnapshotScheduler:
    told = [] if told is None else told
    return SnapshotScheduler(
        cluster,
        SnapshotCatalog(place),
        rules=("momentum",),
        workers=1,
        worker_states=True,
        report=told.append,
    )


def train_with_snapshot(client: Client, taker: SnapshotScheduler) -> None:
    """Train until a requested snapshot is there; it is requested while pushes are in flight."""
    for _ in range(4):
        step(client)
    taker.request()
    taker.snapshot_if_due(0)

    def trained() -> str | None:
        step(client)
        taker.snapshot_if_due(0)
        return taker.latest

    eventually(trained, because="the requested snapshot is written")


def finish(client: Client, steps: int) -> None:
    while client.step < steps:
        step(client)
    client.close()


def undisturbed(push: str, steps: int) -> bytes:
    with served() as (cluster, console):
        finish(client_of(cluster, push), steps)
        return console.read().tobytes()


@pytest.mark.parametrize("push", ["int8", "topk:0.05,momentum=0.9", "1bit,zstd"])
def test_a_snapshot_gets_the_residual_of_a_running_worker(push: str, tmp_path: Path) -> None:
    """The worker writes it while it trains, of the snapshot's push or a later one; a restart from
    the snapshot restores it, counts from the snapshot's push, and trains on."""
    if "zstd" in push:
        pytest.importorskip("zstandard")
    told: list[str] = []
    with served() as (cluster, _):
        client = client_of(cluster, push, keep=tmp_path)
        with snapshotter(cluster, tmp_path, told) as taker:
            train_with_snapshot(client, taker)
        client.abort()
    found = SnapshotCatalog(tmp_path).newest_good()
    (kept,) = found.manifest.residuals
    pushes = [state.saved.ledger.entries["w"].seq for state in found.states]
    last = max(pushes)  # no life completes a push of an earlier one, so the next begins after it
    assert kept.worker == "w"
    assert kept.seq >= min(pushes)
    assert [name for name in told if "without" in name] == []
    read = []
    for restores in (True, False):
        with served(found) as (cluster, console):
            client = client_of(cluster, push, 1)
            if restores:
                residuals.restore(client.session, *_held(found))
            assert client.seq == client.step == last
            finish(client, last + STEPS)
            read.append(console.read().tobytes())
    assert read[0] != read[1], "the residual counts"


def test_workers_stop_for_the_last_snapshot(tmp_path: Path) -> None:
    """Each writes its state and pushes no more, also one that waits at the gate for the others.

    So the shards and the states are of the same pushes.
    """

    def train(client: Client) -> None:
        with suppress(Fenced):
            while True:
                step(client)

    reports: list[str] = []
    with served() as (cluster, console), snapshotter(cluster, tmp_path, reports) as taker:
        names = ("a", "b")
        clients = [client_of(cluster, "int8", worker=name, keep=tmp_path) for name in names]
        threads = [Thread(target=train, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()

        def pushes() -> list[int]:
            return [worker.seq for worker in console.status()[0].workers]

        eventually(lambda: min(pushes()) > 2, because="both workers push")
        trains = {
            state.worker: (state.incarnation, state.seq) for state in console.status()[0].workers
        }
        taker.stop_workers(trains, 120.0)
        console.quiesce(120.0)
        taker.save(console.export())
        successors = [client_of(cluster, "int8", 1, name) for name in names]
        for thread in threads:
            thread.join()
        for client in (*clients, *successors):
            client.abort()
    snapshot = SnapshotCatalog(tmp_path).newest_good()
    saved = {state.worker: state.seq for state in snapshot.manifest.residuals}
    for shard in snapshot.states:
        assert saved == {name: entry.seq for name, entry in shard.saved.ledger.entries.items()}
    assert [line for line in reports if "without" in line] == []


def test_the_last_snapshot_holds_the_last_residual(tmp_path: Path) -> None:
    """A worker that leaves regularly writes its residual once more, and no file is left over.

    One that resumes and pushes nothing writes the residual that was restored. A run that is resumed
    twice has the same weights as an uninterrupted one, to the bit.
    """
    with served() as (cluster, console), snapshotter(cluster, tmp_path) as taker:
        finish(client_of(cluster, "int8", keep=tmp_path), 5)
        taker.save(console.export())
    assert [path.name for path in tmp_path.iterdir()] == ["5"]
    found = SnapshotCatalog(tmp_path).newest_good()
    (kept,) = found.manifest.residuals
    assert kept.seq == 5
    with served(found) as (cluster, console), snapshotter(cluster, tmp_path / "again") as taker:
        client = client_of(cluster, "int8", 1, keep=tmp_path / "again")
        residuals.restore(client.session, *_held(found))
        client.close()
        taker.save(console.export())
    again = SnapshotCatalog(tmp_path / "again").newest_good()
    for name, array in _held(found)[1].items():
        assert _held(again)[1][name].tobytes() == array.tobytes()
    with served(again) as (cluster, console):
        client = client_of(cluster, "int8", 2)
        residuals.restore(client.session, *_held(again))
        finish(client, 9)
        assert console.read().tobytes() == undisturbed("int8", 9)


def test_a_residual_that_does_not_come_is_told_of(tmp_path: Path) -> None:
    """The snapshot is complete without it; a worker killed before it knew of the snapshot wrote
    none.
    """
    told: list[str] = []
    with served() as (cluster, console), snapshotter(cluster, tmp_path, told) as taker:
        client = client_of(cluster, "int8", keep=tmp_path)
        step(client)
        client.flush()
        client.abort()
        taker.save(console.export())
    assert told == [f"snapshot {tmp_path / '1'}: without the states of workers w"]
    found = SnapshotCatalog(tmp_path).newest_good()
    assert found.manifest.residuals == ()
    assert saved_residual(found.place, "w") is None


def test_a_damaged_or_foreign_residual_is_refused(tmp_path: Path) -> None:
    """Each error names file or field; the worker can continue without the residual."""
    with served() as (cluster, console), snapshotter(cluster, tmp_path) as taker:
        finish(client_of(cluster, "int8", keep=tmp_path), 3)
        taker.save(console.export())
    found = SnapshotCatalog(tmp_path).newest_good()
    state, arrays = _held(found)
    with served(found) as (cluster, _):
        with client_of(cluster, "4bit", 1) as client, pytest.raises(BadInput, match="push: expec"):
            residuals.restore(client.session, state, arrays)
        with client_of(cluster, "int8", 2) as client:
            step(client)
            with pytest.raises(BadInput, match=r"expected one after push 4.* got one after push 3"):
                residuals.restore(client.session, state, arrays)
    file = Path(found.place) / found.manifest.residuals[0].part.file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert any(file.name in line for line in damage(found.place))
    with pytest.raises(BadInput, match=f"{file.name}: chunk 0"):
        saved_residual(found.place, "w")


def test_what_cannot_be_written_holds_up_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that cannot reach the place continues training, and its writer logs why, once."""
    (tmp_path / FOLDER).write_text("in the way")
    with served() as (cluster, _):
        client = client_of(cluster, "int8", keep=tmp_path)
        finish(client, 3)
        assert client.residual_writer is not None
        assert client.residual_writer.failure.startswith(f"residual in {tmp_path / FOLDER}: ")
    (record,) = caplog.records
    assert record.getMessage() == f"{client.residual_writer.failure}; training continues"
    assert vars(record)["worker"] == "w"
    sweep_residuals(SnapshotCatalog(tmp_path).store)
    assert (tmp_path / FOLDER).read_text() == "in the way"


SECRET = b"only the driver may read this"
OWN = "w.0.1.safetensors"


@pytest.mark.parametrize(
    ("note", "file", "size"),
    [
        ("w.0.1.json", "../../secret", len(SECRET)),
        ("w.0.1.json", "{secret}", len(SECRET)),
        ("w.0.1.json", "other.safetensors", len(SECRET)),
        ("..json", "..safetensors", len(SECRET)),
        ("w.0.1.json", OWN, len(SECRET) - 1),
    ],
    ids=["upwards", "absolute", "another's", "another name", "larger than stated"],
)
def test_a_note_speaks_of_no_file_but_its_own(
    tmp_path: Path, note: str, file: str, size: int
) -> None:
    """A worker's note never makes the driver take another file into a snapshot.

    A file of another length than its note says is incomplete.
    """
    place, secret = tmp_path / "snapshots", tmp_path / "secret"
    (place / FOLDER).mkdir(parents=True)
    secret.write_bytes(SECRET)
    for name in (OWN, "other.safetensors", "..safetensors"):
        (place / FOLDER / name).write_bytes(SECRET)
    part = StateFile(file.format(secret=secret), size, 1, ("0" * 16,), 4096)
    kept = SavedWorkerState(worker="w", incarnation=0, seq=1, part=part)
    (place / FOLDER / note).write_bytes(checked_json.encode(kept))
    assert gather_residuals(SnapshotCatalog(place).store, {"w": (0, 1)}, 0.0) == ([], ["w"])
    good = msgspec.structs.replace(kept, part=StateFile(OWN, len(SECRET), 1, ("0" * 16,), 4096))
    (place / FOLDER / "w.0.1.json").write_bytes(checked_json.encode(good))
    found = [(f"{FOLDER}/{OWN}", good)]
    assert gather_residuals(SnapshotCatalog(place).store, {"w": (0, 1)}, 0.0) == (found, [])


@pytest.mark.parametrize("hard_links", [True, False])
@pytest.mark.parametrize("what", ["link", "pipe"])
def test_what_is_no_file_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, hard_links: bool
) -> None:
    """A link in a file's place is not followed, and a pipe does not block."""
    store = SnapshotCatalog(tmp_path).store
    (tmp_path / FOLDER).mkdir()
    (tmp_path / "secret").write_bytes(SECRET)
    own = tmp_path / FOLDER / OWN
    own.symlink_to(tmp_path / "secret") if what == "link" else os.mkfifo(own)
    if not hard_links:
        monkeypatch.setattr(Path, "hardlink_to", _without_hard_links)
    with pytest.raises(OSError, match=f"expected {OWN} to be a file|symbolic links"):
        store.below("1").take("worker-0.safetensors", f"{FOLDER}/{OWN}")
    assert store.below("1").names() == []
    own.unlink()
    own.write_bytes(SECRET)
    store.below("1").take("worker-0.safetensors", f"{FOLDER}/{OWN}")
    assert (tmp_path / "1" / "worker-0.safetensors").read_bytes() == SECRET


def test_a_pipe_among_the_notes_holds_up_nobody(tmp_path: Path) -> None:
    """It is passed over."""
    (tmp_path / FOLDER).mkdir()
    os.mkfifo(tmp_path / FOLDER / "w.0.1.json")
    assert gather_residuals(SnapshotCatalog(tmp_path).store, {"w": (0, 1)}, 0.0) == ([], ["w"])


def test_a_garbled_note_holds_up_nobody(tmp_path: Path) -> None:
    """A note that is not UTF-8 is ignored."""
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "w.0.1.json").write_bytes(b'{"worker": "\xff"}')
    assert gather_residuals(SnapshotCatalog(tmp_path).store, {"w": (0, 1)}, 0.0) == ([], ["w"])


def _without_hard_links(*_: object) -> None:
    raise PermissionError(1, "Operation not permitted")


def _held(found: LoadedSnapshot) -> Any:
    held = saved_residual(found.place, "w")
    assert held is not None
    return held
