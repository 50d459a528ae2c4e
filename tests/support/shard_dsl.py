"""A shard for tests, with short functions that make messages and send them to it."""

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import HOST, Backend
from shards import wire_format
from shards.envelopes import Outgoing
from shards.ledger import Ledger
from shards.messages import (
    PROTOCOL,
    FromShard,
    FromWorker,
    Hello,
    Install,
    Join,
    Kind,
    Leave,
    Pull,
    Push,
    Refusal,
    Renew,
    Request,
    Weights,
)
from shards.parameters import SavedProgress
from shards.rules import SGD, Decay
from shards.schedules import Fixed
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.tables import DenseTable, TensorSpec, cut_evenly

TABLE = DenseTable(
    "net", (TensorSpec("a", (200,)), TensorSpec("b", (50,)), TensorSpec("c", (256,)))
)
SIZE = TABLE.size
KEYS = [0, SIZE]
REAL = np.concatenate([np.arange(200), np.arange(256, 306), np.arange(320, 576)])

Said = list[tuple[str, FromShard]]


def spec(**options: Any) -> ShardSpec:
    """A spec of one shard that owns the whole table: SGD at rate 1, bound 1, two workers."""
    plain: dict[str, Any] = {
        "job": "job",
        "shard": 0,
        "table": TABLE,
        "map": cut_evenly(TABLE, 1),
        "rule": SGD(),
        "schedule": Fixed(base_rate=1.0),
        "decay": Decay(),
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
        self.shard = Shard(spec(**options), boot, place=self.place)
        self.frames: tuple[NDArray[np.float32] | bytes, ...] = ()
        self.now = 0.0
        if installed:
            self.say(Install(1, "job", "net", []), fresh())

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


def fresh(version: int = 0) -> tuple[bytes, bytes]:
    """The frames of an Install of zeros."""
    return wire_format.encode_state(SavedProgress(version, 0, 0, Ledger())), bytes(4 * SIZE)


def hello(worker: str, incarnation: int = 0, **changes: Any) -> Hello:
    plain = Hello(10, "job", worker, incarnation, PROTOCOL, "build")
    return msgspec.structs.replace(plain, **changes)


def join(worker: str, clock: int = 0, incarnation: int = 0) -> Join:
    return Join(11, "job", worker, incarnation, 1, clock)


def pull(worker: str, clock: int, request: int = 12, **changes: Any) -> Pull:
    return msgspec.structs.replace(Pull(request, "job", worker, 0, 1, 1, "net", clock), **changes)


def push(worker: str, seq: int, **changes: Any) -> Push:
    """Push `seq` of one step, read at version 0, unless `changes` say otherwise."""
    plain = Push(
        *(100 + seq, "job", worker, 0, 1, 1, "net", seq, seq, seq, 1, 64, 0, Kind.F4, KEYS),
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
    return worker, Weights(request, 0, 1, 1, "net", version, Kind.F4, KEYS, waited_s)


def refusal(said: Said) -> Refusal:
    """The single answer, which must be a Refusal."""
    ((_, reply),) = said
    assert isinstance(reply, Refusal), reply
    return reply
