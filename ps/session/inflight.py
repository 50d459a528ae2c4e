"""The requests in flight: one message to each shard, complete when every shard has answered."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ps.session.events import Departed, Event, Frames, Pulled, Pushed
from ps.session.membership import Membership
from ps.session.payload_encoder import PayloadEncoder
from ps.session.retransmit import RetransmitTable
from shards.errors import BadMessage
from shards.messages import Ack, FromWorker, Kind, Left, Pull, Push, Reply, Weights
from shards.wire_format import Buffer

Answer = TypeVar("Answer", bound=Reply)


class InflightRequest(msgspec.Struct):
    """One request: its kind, its time and driver's clock, a pull's tables, and the answers so far.

    `spoilt` are the parts that shards refused; late copies of those messages may still refer to
    their memory.
    """

    kind: type[FromWorker]
    since: float
    clock: int
    tables: tuple[str, ...]
    answers: dict[int, tuple[Reply, Sequence[Buffer]]]
    spoilt: tuple[Frames, ...] = ()


class InflightRequests:
    """The incomplete requests of one session."""

    def __init__(
        self,
        outstanding: RetransmitTable,
        registration: Membership,
        cargo: PayloadEncoder,
        shards: int,
    ) -> None:
        self._outstanding = outstanding
        self._registration = registration
        self._cargo = cargo
        self._shards = range(shards)
        self._asked: dict[int, InflightRequest] = {}

    def begin(
        self, kind: type[FromWorker], now: float, clock: int, tables: tuple[str, ...] = ()
    ) -> int:
        """Open a request and return its number."""
        assert self._registration.ready is not None, "the driver waits for Ready first"
        request = self._outstanding.count()
        self._asked[request] = InflightRequest(kind, now, clock, tables, {})
        return request

    def record_answer(
        self, shard: int, request: int, reply: Reply, frames: Sequence[Buffer], now: float
    ) -> list[Event]:
        """`shard` has answered `request`; returns the event if it was the last shard to answer.

        Raises BadMessage for an answer of the wrong type.
        """
        asked = self._asked.get(request)
        if asked is None:
            return []
        asked.answers[shard] = (reply, frames)
        if len(asked.answers) < len(self._shards):
            return []
        del self._asked[request]
        replies, payloads = zip(*map(asked.answers.__getitem__, self._shards), strict=True)
        if asked.kind is Pull:
            own = self._registration
            own.reached = max(own.reached, asked.clock + own.ahead + 1)
            weights, kinds = _all(Weights, replies), self._cargo.arrives
            return [_pulled(request, weights, payloads, asked.tables, kinds)]
        if asked.kind is Push:
            took_s = now - asked.since
            self._outstanding.record_push_time(took_s)
            return [_pushed(request, _all(Ack, replies), took_s)]
        _all(Left, replies)
        return [Departed()]

    def mark_damaged(self, request: int, part: Frames) -> bool:
        """A shard refused its part of `request`; returns whether this is the first part to be
        refused.
        """
        asked = self._asked[request]
        asked.spoilt += (part,)
        return len(asked.spoilt) == 1

    def repeat_pulls(self) -> list[tuple[int, int, tuple[str, ...]]]:
        """Discard the answers of every pull; returns the number, clock and tables of each."""
        pulls = [(number, asked) for number, asked in self._asked.items() if asked.kind is Pull]
        for _, asked in pulls:
            asked.answers.clear()
        return [(number, asked.clock, asked.tables) for number, asked in pulls]

    @property
    def unacknowledged(self) -> int:
        """The number of pushes that not every shard has acknowledged."""
        pushes = 0
        for asked in self._asked.values():
            pushes += asked.kind is Push
        return pushes


def _pulled(
    request: int,
    weights: Sequence[Weights],
    frames: Sequence[Sequence[Buffer]],
    tables: tuple[str, ...],
    kinds: Mapping[str, Kind],
) -> Pulled:
    return Pulled(
        request,
        tuple([reply.version for reply in weights]),
        tuple([tuple(of_shard) for of_shard in frames]),
        max([reply.waited_s for reply in weights]),
        tables,
        kinds,
    )


def _pushed(request: int, acks: Sequence[Ack], took_s: float) -> Pushed:
    return Pushed(
        request,
        acks[0].seq,
        max([ack.staleness for ack in acks]),
        sum([ack.duplicate for ack in acks]),
        took_s,
        tuple([ack.version for ack in acks]),
        min([ack.scale for ack in acks]),
        sum([ack.dropped for ack in acks]),
    )


def _all(kind: type[Answer], replies: Sequence[Reply]) -> Sequence[Answer]:
    """The replies, checked to be of this kind; raises BadMessage."""
    for reply in replies:
        if not isinstance(reply, kind):
            names = sorted({type(reply).__name__ for reply in replies})
            raise BadMessage(f"expected {kind.__name__} from each shard, got {', '.join(names)}")
    found: Any = replies
    return found  # type: ignore[no-any-return]  # checked above
