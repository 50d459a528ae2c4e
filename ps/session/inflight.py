"""The requests in flight: one message to each shard, complete when every shard has answered."""

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import msgspec

from ps.session.events import Departed, Event, Frames, Pulled, Pushed
from ps.session.membership import Membership
from ps.session.payload_encoder import PayloadEncoder
from ps.session.retransmit import RetransmitTable
from ps.session.row_requests import GatheredRows, SplitIds, put_together
from shards.errors import BadMessage
from shards.messages import Ack, FromWorker, Leave, Left, Pull, Push, Reply, Weights
from shards.wire_format import Buffer

_ANSWERS: dict[type[FromWorker], type[Reply]] = {Pull: Weights, Push: Ack, Leave: Left}

# No comprehensions: until Python 3.12 each is a call, and these are needed at every answer.
_DROPPED, _DUPLICATE, _SCALE = attrgetter("dropped"), attrgetter("duplicate"), attrgetter("scale")
_LATE_S = attrgetter("late_s")
_STALENESS, _VERSION, _WAITED_S = map(attrgetter, ("staleness", "version", "waited_s"))


class InflightRequest(msgspec.Struct):
    """One request: its kind, start time, the driver's clock, a pull's tables, the answers so far.

    `damaged` are the parts that shards refused. They are kept because copies of these messages that
    are still on their way may refer to their memory.
    """

    kind: type[FromWorker]
    since: float
    clock: int
    tables: tuple[str, ...]
    rows: tuple[SplitIds, ...]
    answers: dict[int, tuple[Reply, Sequence[Buffer]]]
    damaged: tuple[Frames, ...] = ()


class InflightRequests:
    """The incomplete requests of one session; `pushes` are those that not every shard has
    acknowledged.
    """

    def __init__(
        self,
        outstanding: RetransmitTable,
        registration: Membership,
        encoder: PayloadEncoder,
        shards: int,
    ) -> None:
        self._outstanding = outstanding
        self._registration = registration
        self._encoder = encoder
        self._shards = range(shards)
        self.pushes: dict[int, InflightRequest] = {}
        self._others: dict[int, InflightRequest] = {}

    def begin(
        self,
        kind: type[FromWorker],
        now: float,
        clock: int,
        tables: tuple[str, ...] = (),
        rows: tuple[SplitIds, ...] = (),
    ) -> int:
        """Open a request and return its number."""
        assert self._registration.ready is not None, "the driver waits for Ready first"
        request = self._outstanding.count()
        of_kind = self.pushes if kind is Push else self._others
        of_kind[request] = InflightRequest(kind, now, clock, tables, rows, {})
        return request

    def record_answer(
        self, shard: int, request: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> list[Event]:
        """`shard` has answered `request`; returns the event if it was the last shard to answer.

        Raises BadMessage for an answer of the wrong type.
        """
        asked = self.pushes.get(request) or self._others.get(request)
        if asked is None:  # a repeated answer: the request is complete
            return []
        expected = _ANSWERS[asked.kind]
        # By type: an answer of another kind under the same number is a fault of the shard.
        if type(reply) is not expected:
            got = type(reply).__name__
            raise BadMessage(f"expected {expected.__name__} from each shard, got {got}")
        replies: Any
        if len(self._shards) == 1:  # by far the most frequent case
            replies, payloads = (reply,), (frames,)
        else:
            asked.answers[shard] = (reply, frames)
            if len(asked.answers) < len(self._shards):
                return []
            columns: Any = zip(*map(asked.answers.__getitem__, self._shards), strict=True)
            replies, payloads = columns
        if asked.kind is Push:
            del self.pushes[request]
            took_s = now - asked.since
            # It at most doubles, or one outage would make every later message wait as long.
            table = self._outstanding
            table.expect(min(took_s, max(table.retry_s, 2 * table.rtt_s)))
            return [_make_pushed(request, replies, took_s)]
        del self._others[request]
        if asked.kind is Leave:
            return [Departed()]
        membership = self._registration
        membership.reached = max(membership.reached, asked.clock + membership.ahead + 1)
        versions, waited_s = tuple(map(_VERSION, replies)), max(map(_WAITED_S, replies))
        frames_of: tuple[tuple[Buffer, ...], ...] = tuple(map(tuple, payloads))
        rows: dict[str, GatheredRows] = {}
        if asked.rows:
            frames_of, rows = put_together(asked.rows, frames_of)
        arrives = self._encoder.arrives
        return [Pulled(request, versions, frames_of, waited_s, asked.tables, arrives, rows)]

    def mark_damaged(self, request: int, part: Frames) -> bool:
        """A shard refused its part of `request`; returns whether this is the first part to be
        refused.
        """
        asked = self.pushes[request]
        asked.damaged += (part,)
        return len(asked.damaged) == 1

    def repeat_pulls(self) -> list[tuple[int, int, tuple[str, ...], tuple[SplitIds, ...]]]:
        """Discard the answers of every pull; returns the number, clock, tables and rows of each."""
        pulls = [(number, asked) for number, asked in self._others.items() if asked.kind is Pull]
        for _, asked in pulls:
            asked.answers.clear()
        return [(number, asked.clock, asked.tables, asked.rows) for number, asked in pulls]


def _make_pushed(request: int, acks: Sequence[Ack], took_s: float) -> Pushed:
    if len(acks) == 1:
        (ack,) = acks
        counts = ack.seq, ack.staleness, int(ack.duplicate), took_s
        return Pushed(request, *counts, (ack.version,), ack.scale, int(ack.dropped), ack.late_s)
    return Pushed(
        request,
        acks[0].seq,
        max(map(_STALENESS, acks)),
        sum(map(_DUPLICATE, acks)),
        took_s,
        tuple(map(_VERSION, acks)),
        min(map(_SCALE, acks)),
        sum(map(_DROPPED, acks)),
        max(map(_LATE_S, acks)),
    )
