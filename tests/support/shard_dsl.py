"""A shard for tests, with short functions that make messages and send them to it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import HOST, Backend
from shards import shard_state
from shards.ledger import Ledger
from shards.messages import (
    PROTOCOL,
    AskedPart,
    FromShard,
    FromWorker,
    Hello,
    Install,
    Join,
    Kind,
    Leave,
    Part,
    Pull,
    PulledPart,
    Push,
    Refusal,
    Renew,
    Request,
    Weights,
)
from shards.schedules import Fixed
from shards.schema_digest import SCHEMA
from shards.shard import Shard
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name
from shards.spec import ShardSpec, TableSpec
from shards.tables import DenseTable, KeyRange, Layout, TensorSpec, cut_evenly
from shards.transition_io import Outgoing

TABLE = DenseTable(
    "net", (TensorSpec("a", (200,)), TensorSpec("b", (50,)), TensorSpec("c", (256,)))
)
SIZE = TABLE.size
PART = Part("net", Kind.F4, 0, SIZE)
REAL = np.concatenate([np.arange(200), np.arange(256, 306), np.arange(320, 576)])

Said = list[tuple[str, FromShard]]


def spec(**options: Any) -> ShardSpec:
    """A spec of one shard that owns the whole table: SGD at rate 1, bound 1, two workers.

    Options of a TableSpec are those of its table; `tables` replaces it.
    """
    own: dict[str, Any] = {"table": TABLE, "schedule": Fixed(base_rate=1.0)}
    own |= {name: options.pop(name) for name in TableSpec.__struct_fields__ if name in options}
    tables = options.pop("tables", (TableSpec(**own),))
    plain: dict[str, Any] = {
        "job": "job",
        "shard": 0,
        "tables": tables,
        "map": cut_evenly(Layout.of(one.table for one in tables), 1),
        "bound": 1,
        "workers": 2,
        "build": "build",
    }
    return ShardSpec(**plain | options)


class Talk:
    """A shard in its first life. `frames` are the frames of the last answer that had any."""

    place: ClassVar[Backend] = HOST
    """The backend that holds the arrays of these shards."""

    def __init__(self, *, installed: bool = True, boot: int = 1, **options: Any) -> None:
        self.shard = Shard(spec(**options), boot, backend=self.place)
        self.frames: tuple[NDArray[np.float32] | bytes, ...] = ()
        self.now = 0.0
        if installed:
            self.say(Install(1, "job"), fresh(spec=self.shard.spec))

    def say(self, message: Request, frames: Sequence[bytes] = ()) -> Said:
        """Send a message; return the answers with their addresses (a worker's is its name)."""
        sender = message.worker if isinstance(message, FromWorker) else "operator"
        return self.heard(self.shard.handle(sender.encode(), message, frames, self.now))

    def tick(self, now: float) -> Said:
        self.now = now
        return self.heard(self.shard.tick(now))

    def heard(self, answers: Sequence[Outgoing]) -> Said:
        for answer in answers:
            self.frames = answer.frames or self.frames
        return [(answer.to.decode(), answer.message) for answer in answers]

    def enter(self, *workers: str, incarnation: int = 0) -> None:
        for worker in workers:
            self.say(hello(worker, incarnation))
            self.say(join(worker, incarnation=incarnation))

    def weights(self) -> NDArray[np.float32]:
        """The single frame that was served last."""
        (frame,) = self.frames
        assert isinstance(frame, np.ndarray)
        return frame


def blank(version: int = 0, spec: ShardSpec | None = None) -> ShardState:
    """A state of zeros without pushes, for a shard of the whole table or of `spec`."""
    layout, keys = Layout((TABLE,)), KeyRange(0, SIZE)
    if spec is not None:
        layout, keys = spec.layout, spec.keys
    arrays = {
        array_name(one.table, WEIGHTS): np.zeros(len(one.keys), np.float32)
        for one in layout.sections(keys)
    }
    arrays |= shard_state.empty_tables(layout)
    return ShardState(SavedProgress(version, 0, 0, Ledger()), arrays)


def fresh(version: int = 0, spec: ShardSpec | None = None) -> list[bytes]:
    """The frames of an Install of zeros."""
    return as_bytes(shard_state.encode(blank(version, spec)))


def hello(worker: str, incarnation: int = 0, **changes: Any) -> Hello:
    plain = Hello(10, "job", worker, incarnation, PROTOCOL, SCHEMA)
    return msgspec.structs.replace(plain, **changes)


def join(worker: str, clock: int = 0, incarnation: int = 0) -> Join:
    return Join(11, "job", worker, incarnation, 1, clock)


def pull(worker: str, clock: int, request: int = 12, **changes: Any) -> Pull:
    """A pull of the table; changes of an AskedPart are those of its only part."""
    ask = {name: changes.pop(name) for name in AskedPart.__struct_fields__ if name in changes}
    plain = Pull(request, "job", worker, 0, 1, 1, clock, [AskedPart(**{"table": "net"} | ask)])
    return msgspec.structs.replace(plain, **changes)


def push(worker: str, seq: int, **changes: Any) -> Push:
    """Push `seq` of one step, read at version 0, unless `changes` say otherwise.

    Changes of a Part are those of its only part.
    """
    own = {name: changes.pop(name) for name in Part.__struct_fields__ if name in changes}
    plain = Push(
        *(100 + seq, "job", worker, 0, 1, 1, seq, seq, seq, 1, 64, 0),
        [msgspec.structs.replace(PART, **own)],
        loss=0.5,
        rtt_s=0.0,
        wait_s=0.0,
    )
    return msgspec.structs.replace(plain, **changes)


def gradient(value: float) -> list[bytes]:
    """The one frame of a gradient that is `value` in every tensor, and zero in the padding."""
    flat = np.zeros(SIZE, np.float32)
    flat[REAL] = value
    return [flat.tobytes()]


def leave(worker: str) -> Leave:
    return Leave(13, "job", worker, 0, 1)


def renew(worker: str) -> Renew:
    return Renew(0, "job", worker, 0, 1)


def as_bytes(frames: Sequence[NDArray[np.float32] | bytes]) -> list[bytes]:
    """Frames as they arrive at the other end."""
    return [frame if isinstance(frame, bytes) else frame.tobytes() for frame in frames]


def served(
    worker: str, version: int, *, waited_s: float = 0.0, request: int = 12
) -> tuple[str, Weights]:
    """The answer to a pull."""
    part = PulledPart("net", Kind.F4, 0, SIZE)
    return worker, Weights(request, 0, 1, 1, version, [part], waited_s)


def refusal(said: Said) -> Refusal:
    """The single answer, which must be a Refusal."""
    ((_, reply),) = said
    assert isinstance(reply, Refusal), reply
    return reply
