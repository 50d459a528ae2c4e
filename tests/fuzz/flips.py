"""Files of every kind that a job writes and reads again, with one bit flipped: noticed or harmless.

Noticed is an error of ours, in one line that names the file. Harmless is that the very same is
read, as where the bit is of the layout of a text. A worker's note beside the snapshots is passed
over in silence where it is damaged; the snapshot then says that the worker's state is missing.

Not tried is what this project writes for others and never reads, or what has no room for a checksum
(docs/explanation/durability.md, "Flipped bits"): pictures, summary.json, features.parquet,
.caffemodel.
"""

import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
from msgspec.structs import replace

import ps
from deploy.run.folder import write_whole
from deploy.run.settings import TrainSettings
from deploy.run.updates_parquet import SCHEMA, UpdatesWriter, parts_of, read_updates
from deploy.simulation.disk import DeferredTask
from ps.cluster import Access
from ps.durability import Durability
from ps.replication.coordinator import ShardGroup
from ps.replication.coordinator_store import CoordinatorStore
from ps.security.authorization import Admission, Enrolment, Enrolments, Invitation
from ps.security.enrolment import EnrolmentStore
from ps.security.keys import load_or_create_keys
from ps.session.compression import Compression
from ps.snapshots import checked_json
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.manifest import load_snapshot
from ps.snapshots.residual_writer import FOLDER, ResidualWriter, gather_residuals, saved_residual
from ps.snapshots.worker_state import WorkerState, load_state, save_state
from ps.wal.autosave import Autosaves
from ps.wal.recovery import MARK, read_state
from ps.wal.writer import LoggedShard, WriteAheadLog
from shards.errors import DownpourError
from shards.ledger import Ledger, LedgerEntry
from shards.messages import Install
from shards.replication_messages import Configuration
from shards.rules import Momentum
from shards.shard import Shard
from shards.shard_state import SavedProgress, ShardState
from shards.tables import DenseTable, Layout, TensorSpec, cut_evenly
from shards.transition_io import Arrival
from shards.update_records import RECORD
from tests.support import shard_dsl
from worker.caffe.weight_files import read_blobs, write_blobs
from worker.training.figures import Rows

TABLE = DenseTable("net", (TensorSpec("a", (300,), lr_mult=2.0), TensorSpec("b", (20, 10))))
LAYOUT = Layout((TABLE,))
MAP = cut_evenly(LAYOUT, 2)


class Kind(NamedTuple):
    """Files of one kind, and what is read from them, as a value to compare.

    `silent`: what is damaged is passed over, and `read` gives None.
    """

    name: str
    files: list[Path]
    read: Callable[[], object]
    silent: bool = False


class Tally(NamedTuple):
    """How many flips of a kind of file were tried, and how many of them were noticed."""

    tried: int
    noticed: int


def kinds(folder: Path) -> list[Kind]:
    """One of each kind of file, written into `folder` by the code that a job writes it with."""
    return [
        *_snapshots(folder / "snapshots"),
        *_logs(folder / "logs"),
        *_small(folder),
        _updates(folder / "updates.parquet"),
    ]


def run(flips: int, seed: int) -> dict[str, Tally]:
    """Flip bits, one at a time, as many of each kind of file; returns what came of each kind.

    Raises AssertionError with the seed at the first that is neither noticed nor harmless.
    """
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="downpour-flips-") as name:
        found = kinds(Path(name))
        each = -(-flips // len(found))
        return {kind.name: _try(kind, each, dice, seed) for kind in found}


def _try(kind: Kind, flips: int, dice: random.Random, seed: int) -> Tally:
    right, noticed = kind.read(), 0
    assert right == kind.read(), f"{kind.name}: expected the same each time"
    contents = [path.read_bytes() for path in kind.files]
    weights = [len(content) for content in contents]
    for _ in range(flips):
        (which,) = dice.choices(range(len(contents)), weights)
        path, spoiled = kind.files[which], bytearray(contents[which])
        bit = dice.randrange(8 * len(spoiled))
        spoiled[bit // 8] ^= 1 << bit % 8
        path.write_bytes(spoiled)
        where = f"seed {seed}: {kind.name}: bit {bit} of {path.name}"
        try:
            got = kind.read()
        except DownpourError as error:
            text = str(error)
            assert path.name in text, f"{where}: the error does not name the file: {text}"
            assert "\n" not in text, f"{where}: {text}"
            noticed += 1
        except Exception as error:
            raise AssertionError(where) from error
        else:
            passed_over = kind.silent and got is None
            assert passed_over or got == right, f"{where}: not noticed"
            noticed += passed_over
        path.write_bytes(contents[which])
    assert kind.read() == right, f"seed {seed}: {kind.name}: looking has changed something"
    return Tally(flips, noticed)


# --- snapshots ------------------------------------------------------------------------------------


def _snapshots(place: Path) -> list[Kind]:
    state, arrays = _worker_state(), {"residual": _floats(500, 3)}
    keeper = ResidualWriter(place, "job", "w0", 0)
    keeper.write(state, arrays)
    keeper.close()
    shelf = SnapshotCatalog(place)
    wanted = {"w0": (0, 1)}
    found, _ = gather_residuals(shelf.store, wanted, 0.0)
    folder = Path(
        shelf.save(
            12,
            _states(),
            layout=LAYOUT,
            shard_map=MAP,
            rules=("momentum",),
            workers=2,
            residuals=found,
        )
    )

    def read_shards() -> object:
        manifest, states = load_snapshot(folder)
        return manifest, [_plain(one) for one in states]

    def read_residual() -> object:
        kept = saved_residual(folder, "w0")
        assert kept is not None
        return kept[0], {name: array.tobytes() for name, array in kept[1].items()}

    def read_note() -> object:
        return gather_residuals(shelf.store, wanted, 0.0)[0] or None

    own = folder.parent / "w0.safetensors"
    save_state(own, state, arrays)

    def read_own() -> object:
        read, held = load_state(own)
        return read, {name: array.tobytes() for name, array in held.items()}

    return [
        Kind("snapshot manifest", [folder / "manifest.json"], read_shards),
        Kind("snapshot shards", sorted(folder.glob("shard-*")), read_shards),
        Kind("snapshot residual", sorted(folder.glob("worker-*")), read_residual),
        Kind("residual's note", sorted((place / FOLDER).glob("*.json")), read_note, silent=True),
        Kind("worker state", [own], read_own),
    ]


def _states() -> list[ShardState]:
    entries = {f"w{n}": LedgerEntry(0, seq=n + 1, clock=n, step=n) for n in range(2)}
    return [
        ShardState(
            SavedProgress(5, 10, 80, Ledger(dict(entries), floor=1)),
            {
                "net/weights": _floats(len(keys), shard),
                "net/history": _floats(len(keys), 10 + shard),
            },
        )
        for shard, keys in enumerate(MAP.ranges)
    ]


def _plain(state: ShardState) -> object:
    return state.saved, {name: array.tobytes() for name, array in state.arrays.items()}


def _worker_state() -> WorkerState:
    push = Compression.parse("int8").push
    assert push is not None
    return WorkerState(
        worker="w0",
        floats={TABLE.name: TABLE.size},
        push={TABLE.name: push},
        seq=1,
        step=1,
        clock=1,
    )


def _floats(size: int, seed: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


# --- logs and saves -------------------------------------------------------------------------------


def _logs(folder: Path) -> list[Kind]:
    own, saves = folder / "shard-0", folder / "saves"
    for boot in (1, 2):
        _live(own, boot)
    shard = _shard(1)
    shard.handle_together([_installed()], 0.0)
    kept = Autosaves(saves, 1.0, DeferredTask)
    kept.remove_older()
    kept.save_if_due(shard, 0.0)
    kept.close()

    def read_log() -> object:
        spec, state = read_state(own)
        return spec, _plain(state)

    def read_save() -> object:
        shard, kept = _shard(9), Autosaves(saves, 1.0)
        try:
            kept.recover(shard, 0.0)
        finally:
            kept.close()
        return _plain(shard.copy())

    # What an older base and older logs hold is there twice: without them, each bit counts.
    bases = sorted(own.glob("base-*"))
    newest = bases[-1].name.removeprefix("base-")
    for path in (*bases[:-1], *own.glob("log-*")):
        if path.name < f"log-{newest}":
            path.unlink()
    logs = sorted(own.glob("log-*"))
    assert len(logs) > 2
    return [
        Kind("log", logs, read_log),
        Kind("log's base", bases[-1:], read_log),
        Kind("log's mark", [own / MARK], read_log),
        Kind("save", [saves / "save"], read_save),
    ]


def _shard(boot: int) -> Shard:
    return Shard(shard_dsl.spec(rule=Momentum(0.9), bound=None), boot)


def _installed() -> Arrival:
    return Arrival(b"o", Install(1, "job"), shard_dsl.fresh())


def _live(folder: Path, boot: int) -> None:
    """One life of a shard with a log, and with pushes for a base and a few more files."""
    log, shard = WriteAheadLog(folder, Durability.PROCESS, 1 << 15, DeferredTask), _shard(boot)
    log.recover(shard, 0.0)
    acts = LoggedShard(shard, log)
    if shard.parameters.empty:
        acts.handle_together([_installed()], 0.0)
    joins = replace(shard_dsl.join("w", incarnation=boot), boot=boot)
    for message in (shard_dsl.hello("w", boot), joins):
        acts.handle_together([Arrival(b"w", message)], 1.0)
    for seq in range(shard.ledger.entries["w"].seq + 1, shard.ledger.entries["w"].seq + 16):
        push = replace(shard_dsl.push("w", seq), boot=boot, incarnation=boot)
        acts.handle_together([Arrival(b"w", push, [_floats(shard_dsl.SIZE, seq).tobytes()])], 2.0)
    assert shard.version == 15 * boot
    log.close()


# --- small files ----------------------------------------------------------------------------------


def _small(folder: Path) -> list[Kind]:
    cluster, settings = folder / "cluster.json", folder / "settings.json"
    ps.Cluster(
        job="mnist-0123456789abcdef",
        layout=LAYOUT,
        map=MAP,
        endpoints=("tcp://10.0.0.5:7400", "tcp://10.0.0.6:7401"),
        bound=4,
        access=Access("1" * 64, "2" * 64),
    ).save(cluster)
    told = TrainSettings(solver=Path("/solver"), data=Path("/data"), out=Path("/out"), workers=4)
    write_whole(settings, checked_json.encode(told.plain()), private=True)
    record = folder / "coordinator.json"
    written = CoordinatorStore(record, "job")
    written.keys()
    written.save({n: ShardGroup(Configuration(n, 2, 11, 12), in_sync=True) for n in range(2)})
    admission = Admission("3" * 64, Invitation("4" * 64, 10))
    EnrolmentStore(folder).read(admission)
    book = EnrolmentStore(folder)
    book.read(admission)
    book.write(Enrolments(9, (Enrolment("w0", 1, "5" * 64),)))
    load_or_create_keys(folder)
    weights, arena = folder / "weights.safetensors", _floats(TABLE.size, 4)
    write_blobs(weights, TABLE.views(arena))

    def read_record() -> object:
        again = CoordinatorStore(record, "job")
        return again.load(), again.keys()

    return [
        Kind("cluster file", [cluster], lambda: ps.Cluster.load(cluster)),
        Kind("settings", [settings], lambda: TrainSettings.load(settings)),
        Kind("coordinator's record", [record], read_record),
        Kind("joined workers", [folder / "joined"], lambda: EnrolmentStore(folder).read(admission)),
        # Curve25519 leaves some bits of a secret half out of account.
        Kind("shard's key", [folder / "key"], lambda: load_or_create_keys(folder).public),
        Kind(
            "weights",
            [weights],
            lambda: {name: blob.tobytes() for name, blob in read_blobs(weights).items()},
        ),
    ]


def _updates(path: Path) -> Kind:
    with UpdatesWriter(path, job="job", seed=1, part_s=0.0) as writer:
        for start in (0, 40):
            writer.write([_rows(start, 40), _rows(start, 30)])

    def read() -> object:
        return pa.Table.from_batches(read_updates(path), SCHEMA)

    return Kind("updates", parts_of(path), read)


def _rows(start: int, count: int) -> Rows:
    rows = np.zeros(count, RECORD)
    dice = np.random.default_rng(start)
    rows["worker"] = dice.choice([b"w0", b"w1"], count)
    for name in ("seq", "read_version", "apply_version", "staleness", "clock"):
        rows[name] = np.arange(start, start + count)
    for name in (
        "wall_age_s",
        "wait_s",
        "compute_s",
        "data_s",
        "network_s",
        "rtt_s",
        "gradient_norm",
        "loss",
        "time",
    ):
        rows[name] = dice.random(count)
    return rows
