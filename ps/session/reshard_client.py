"""Carries a worker's pushes over to the new shards when its job is resharded (resharding.py).

The new shards know the last push of this worker that all the old shards had applied. Every later
push is sent again, cut by the new map; none of the old shards has applied it. A compressed push is
sent as the floats that its payloads decode to: encoding it again would add the residual a second
time.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.session.events import Frames, Send
from ps.session.flow_control import PushTimes
from ps.session.session import Session
from shards import payloads, row_codecs
from shards.messages import Push
from shards.row_frames import RowGradient
from shards.tables import KeyRange

Floats = NDArray[np.float32]


class CarriedPush(msgspec.Struct, frozen=True):
    """A push to repeat: its message, and the gradients as the shards would have decoded them."""

    message: Push
    gradients: dict[str, Floats | RowGradient]
    read_versions: tuple[int, ...]


Asked = tuple[int, list[Send]]
"""A request's number, and what to send for it."""


def resume_at(former: Session, session: Session, now: float) -> tuple[list[Send], list[Asked]]:
    """Continue `former` at `session`, which is ready; returns what to send, and the pushes to
    repeat.

    The driver requests again whatever else it was waiting for.
    """
    assert session.ready is not None, "the driver waits for Ready first"
    pushes = collect_pushes(former, session.ready.seq)
    joins = session.follow(former, now)
    return joins, [_repeat_push(push, former.ahead, session, now) for push in pushes]


def versions(read: Sequence[int], shards: int) -> Sequence[int]:
    """One version per shard; the oldest version for all, if the number of shards has changed.

    A reshard moves the states of one cut, so their versions hardly differ.
    """
    return read if len(read) == shards else [min(read)] * shards


def _repeat_push(push: CarriedPush, ahead: int, session: Session, now: float) -> Asked:
    message = push.message
    return session.push(
        push.gradients,
        versions(push.read_versions, session.map.shards),
        clock=message.clock - ahead,
        step=message.step,
        steps=message.steps,
        samples=message.samples,
        loss=message.loss,
        times=PushTimes(
            message.rtt_s, message.wait_s, message.compute_s, message.data_s, message.network_s
        ),
        now=now,
        plain=True,
        tokens=message.tokens,
        window=message.window,
    )


def collect_pushes(former: Session, after: int) -> list[CarriedPush]:
    """The pushes of `former` beyond number `after`, in order; none was applied at any shard."""
    parts_by_seq: dict[int, dict[int, tuple[Push, Frames]]] = {}
    for shard, message, frames in former.outstanding():
        if isinstance(message, Push) and message.seq > after:
            parts_by_seq.setdefault(message.seq, {})[shard] = message, frames
    for parts in parts_by_seq.values():
        assert len(parts) == former.map.shards, "no shard has applied a push beyond the cut"
    # In order, because a shard refuses a push that leaves out the one before it.
    return [_whole(former, parts_by_seq[seq]) for seq in sorted(parts_by_seq)]


def _whole(former: Session, parts: Mapping[int, tuple[Push, Frames]]) -> CarriedPush:
    sizes = {table.name: table.size for table in former.layout.tables}
    dims = {table.name: table.dim for table in former.layout.sparse}
    gradients: dict[str, Floats] = {}
    rows: dict[str, list[Frames]] = {}
    for message, frames in parts.values():
        remaining = iter(frames)
        for part in message.parts:
            frame = next(remaining)
            if part.table not in sizes:
                encoded, dim = next(remaining).data, dims[part.table]
                decoded = row_codecs.decode("push", part.kind, encoded, len(frame), dim)
                rows.setdefault(part.table, []).append((frame, decoded))
                continue
            keys = KeyRange(part.start, part.stop)
            payload = payloads.validate("push", part.kind, part.zstd, keys, frame.data)
            whole = gradients.setdefault(part.table, np.zeros(sizes[part.table], np.float32))
            payloads.decode(part.kind, payload, whole[part.start : part.stop])
    row_gradients: dict[str, RowGradient] = {}
    for table, pairs in rows.items():
        ids, values = map(np.concatenate, zip(*pairs, strict=True))
        # The parts of several shards follow one another by bucket, and a push has its ids in order.
        order = np.argsort(ids)
        row_gradients[table] = RowGradient(ids[order], values[order])
    versions = tuple(parts[shard][0].read_version for shard in range(former.map.shards))
    return CarriedPush(parts[0][0], {**gradients, **row_gradients}, versions)
