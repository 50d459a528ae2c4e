"""Support for the session's tests: sessions without a driver, and the shards' answers."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ps.session.compression import Compression
from ps.session.events import Event, Ready, Send
from ps.session.session import Session
from shards.messages import (
    Ack,
    FromWorker,
    Joined,
    Kind,
    PulledPart,
    Refusal,
    Remedy,
    Reply,
    Weights,
    Welcome,
)
from shards.tables import DenseTable, Layout, TensorSpec, cut_evenly
from shards.wire_format import Buffer

Array = NDArray[np.float32]

TABLE = DenseTable("net", (TensorSpec("w", (512,)),))
LAYOUT = Layout((TABLE,))


def a_session(
    shards: int = 2, patience_s: float = 30.0, compression: Compression | None = None
) -> Session:
    return Session(
        job="job",
        worker="w",
        incarnation=2,
        layout=LAYOUT,
        shard_map=cut_evenly(LAYOUT, shards),
        patience_s=patience_s,
        compression=compression,
    )


def welcome(shard: int, request: int, seq: int = 0, boot: int = 1) -> Welcome:
    """A Welcome of a shard with `seq` pushes of ten steps each, and as many of another worker."""
    return Welcome(request, shard, boot, 1, 2 * seq, seq, 10 * seq, 10.0)


def joined(shard: int, request: int, clock: int = 0, boot: int = 1) -> Joined:
    return Joined(request, shard, boot, clock)


def ack(shard: int, request: int, seq: int, *, boot: int = 1) -> Ack:
    return Ack(request, shard, boot, seq, 9, 4 + shard, False)


def weights(
    shard: int, request: int, version: int = 7, waited_s: float = 0.0, floats: int = 256
) -> Weights:
    """Weights of a shard of this number of floats."""
    part = PulledPart("net", Kind.F4, floats * shard, floats * (shard + 1))
    return Weights(request, shard, 1, 1, version, [part], waited_s)


def refused(shard: int, request: int, remedy: Remedy, expected: int = 0) -> Refusal:
    return Refusal(request, shard, 1, remedy, "because", expected)


def deliver(
    session: Session, reply: Reply, now: float = 0.0, frames: Sequence[Buffer] = ()
) -> tuple[list[tuple[int, FromWorker]], list[Event]]:
    """Hand the session one answer; returns what it then sends, without frames, and its events."""
    sends, events = session.receive(reply.shard, reply, frames, now)
    return brief(sends), events


def brief(sends: Sequence[Send]) -> list[tuple[int, FromWorker]]:
    return [(send.shard, send.message) for send in sends]


def ready_session(
    shards: int = 2, patience_s: float = 30.0, compression: Compression | None = None
) -> Session:
    """A session that has joined fresh shards at clock 0; it has made two requests to each shard."""
    session = a_session(shards, patience_s, compression)
    session.hello(0.0)
    for shard in range(shards):
        deliver(session, welcome(shard, shard + 1))
    for shard in range(shards):
        deliver(session, joined(shard, shards + shard + 1))
    assert session.ready == Ready(0, 0, 0, 10.0)
    return session


def send_push(
    session: Session, now: float = 0.0, clock: int = 1, gradient: Array | None = None
) -> list[Send]:
    _, sends = session.push(
        TABLE.empty() if gradient is None else gradient,
        (0,) * session.map.shards,
        clock=clock,
        step=clock,
        steps=1,
        samples=64,
        loss=0.5,
        now=now,
    )
    return sends
