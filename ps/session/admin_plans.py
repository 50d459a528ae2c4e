"""The operations of an operator on a job's shards, as plans that do no I/O.

A plan is a generator. It yields questions or pauses, is sent the answers, and returns the result.
The driver repeats each question until it is answered, and throws into the plan any error that
prevents an answer: the plan then tidies up and raises it. So an admin client over sockets
(admin_client.py) and the simulator make the same decisions.

To reshard a job (resharding.py):

1. The shards quiesce at one cut (shards/quiesce.py).
2. Their state is repartitioned by the new map (shards/repartition.py) and given to the new shards.
3. Each old shard is asked to stay at that cut, and reports how far it has come. Had the quiesce
   expired meanwhile, the old shards might hold pushes that the new ones lack, so the reshard is
   abandoned.
4. Each old shard hands its workers over, shard 0 first.

Until step 4 nothing has changed, and after any failure the old shards resume. Shard 0 then decides:
of two operators it obeys one. As soon as it hands over its workers, the job belongs to the new
shards, because without shard 0 no push is fully acknowledged any more. The death of another shard
then does no harm: workers ask all shards, and one answer is enough.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from msgspec import structs
from numpy.typing import NDArray

from ps.session.events import Unreachable
from shards import shard_state, wire_format
from shards.errors import DownpourError, GiveUp
from shards.messages import (
    Cut,
    Export,
    FromOperator,
    HandOver,
    Install,
    Quiesce,
    Quiesced,
    Reply,
    State,
)
from shards.repartition import evenly_buffered, repartition
from shards.shard_state import ShardState
from shards.tables import Layout, ShardMap
from shards.wire_format import Buffer

LOOK_S = 0.02
QUIESCE_S = 60.0  # after which quiesced shards resume by themselves, if the operator dies
TELLING_S = 60.0  # the time for the new shards' addresses to reach every old shard

Frames = tuple[NDArray[Any] | bytes, ...]
Answer = tuple[Reply, Sequence[Buffer]]
Question = Callable[[int], FromOperator]
"""Makes a message from its request number."""


class UnconfirmedHandOver(Unreachable):
    """The new shards hold everything, but shard 0 has not confirmed that it hands its workers over.

    If shard 0 is dead, it will not hand over; if it is only silent, it may.
    """


class Side(NamedTuple):
    """The shards of one job that are asked together; `patience_s` bounds the silence of each.

    `description` is the answer of each to a `Describe`.
    """

    job: str
    layout: Layout
    map: ShardMap
    patience_s: float
    description: bytes = b""

    @property
    def shards(self) -> tuple[int, ...]:
        """The numbers of all shards."""
        return tuple(range(self.map.shards))


class Ask(NamedTuple):
    """Ask these shards a question until each has answered."""

    of: Side
    shards: Sequence[int]
    question: Question
    frames: Frames = ()


class Pause(NamedTuple):
    """Ask nothing for `seconds`."""

    seconds: float


class Answers(NamedTuple):
    """Each shard's answer, and the time of the last one in seconds of a monotonic clock."""

    now: float
    answers: Mapping[int, Answer]


Result = TypeVar("Result")
Plan = Generator[Ask | Pause, Answers, Result]


def quiesce(side: Side, seconds: float) -> Plan[dict[str, int]]:
    """Bring all shards to the same pushes of every worker, and hold them there for `seconds`.

    Returns each worker's last push. Raises Unreachable where the shards do not come together.
    """
    heard = yield hold(side, seconds)
    cut = furthest(heard)
    yield from _reach_cut(side, seconds, cut, heard.now + side.patience_s)
    return cut


def _reach_cut(
    side: Side,
    seconds: float,
    cut: Mapping[str, int],
    until: float,
    *,
    apply_buffer: bool = False,
) -> Plan[None]:
    """Hold every shard until it has all pushes up to `cut`, and has applied its buffer if asked."""
    missing: Sequence[int] = side.shards
    while True:
        heard = yield hold(side, seconds, cut, missing, apply_buffer=apply_buffer)
        missing = [shard for shard in missing if _holding(heard, shard).missing]
        if not missing:
            return
        if heard.now > until:
            yield from resume(side)
            raise Unreachable(
                f"shard {missing[0]} still lacks pushes of the others after {side.patience_s:g} s",
                missing[0],
            )
        yield Pause(LOOK_S)


def resume(side: Side) -> Plan[None]:
    """End a quiesce."""
    yield hold(side, 0.0)


def restore(side: Side, shard: int, state: ShardState, *, goes_on: bool) -> Plan[None]:
    """Give one shard a state; `goes_on` if the workers of that state are still alive."""
    yield Ask(
        side,
        (shard,),
        lambda request: Install(request, side.job, goes_on),
        shard_state.encode(structs.replace(state, description=side.description)),
    )


def hand_over(side: Side, successors: bytes, cuts: Sequence[Mapping[str, int]]) -> Plan[None]:
    """Send the workers of quiesced shards, each at its own of `cuts`, to their successors.

    Raises GiveUp when the quiesce has expired: then nothing has changed. Raises UnconfirmedHandOver
    when shard 0 does not answer.
    """
    try:
        yield from _still_there(side, cuts)
    except DownpourError:
        yield from resume(side)
        raise
    first, *others = side.shards
    try:
        yield sending_on(side, first, successors)
    except Unreachable as error:
        raise UnconfirmedHandOver(f"{error}; the new shards hold its state", first) from None
    for shard in others:
        with suppress(DownpourError):
            yield sending_on(side, shard, successors)


def _still_there(side: Side, cuts: Sequence[Mapping[str, int]]) -> Plan[None]:
    """Hold the shards at their cuts for the hand-over; raises GiveUp when one has advanced."""
    for shard, cut in zip(side.shards, cuts, strict=True):
        # A worker that had lost its lease may be back: a push that it sends now to the old shards
        # would not reach the new ones.
        _check_cut(furthest((yield hold(side, TELLING_S, cut, (shard,)))), cut)


def sending_on(side: Side, shard: int, successors: bytes) -> Ask:
    """The request that ends a shard: it hands its workers over to `successors`."""
    return Ask(
        side,
        (shard,),
        lambda request: HandOver(request, side.job, len(successors)),
        (successors,),
    )


def reshard(old: Side, new: Side, successors: bytes) -> Plan[None]:
    """Move a job's state and workers to fresh shards; `successors` is the encoded new cluster.

    Raises what asking raises; then the job stays on the old shards, unless the error is
    UnconfirmedHandOver.
    """
    cut = yield from quiesce(old, QUIESCE_S)
    try:
        states = yield from _held_at(old, cut)
        for shard, state in enumerate(repartition(states, old.layout, old.map, new.map)):
            yield from restore(new, shard, state, goes_on=True)
    except GeneratorExit:
        raise  # the driver has gone, so nothing more can be asked
    except BaseException:
        yield from resume(old)
        raise
    yield from hand_over(old, successors, [state.saved.ledger.cut for state in states])


def _held_at(side: Side, cut: Mapping[str, int]) -> Plan[list[ShardState]]:
    """The state of all shards, each with every push up to `cut` of all registered workers.

    A worker that had lost its lease when the shards came together may be back since, with a push
    that only some shards have.

    Buffers are handed over as they are if all shards have the same number of pushes in theirs. They
    may not: one shard has a dead worker's last push or noticed first that no worker was left. A new
    shard, with keys of several old ones, would then count pushes that some of its keys lack, and
    might update these without a gradient. So all shards apply their buffers first.
    """
    until: float | None = None
    while True:
        heard = yield Ask(side, side.shards, export(side))
        states = [state_in(*heard.answers[shard]) for shard in side.shards]
        for state in states:
            _check_cut(state.saved.ledger.cut, cut)
        uneven = not evenly_buffered([state.saved for state in states])
        if not uneven and not any(state.saved.ledger.short_of(cut) for state in states):
            return states
        until = heard.now + side.patience_s if until is None else until
        yield from _reach_cut(side, QUIESCE_S, cut, until, apply_buffer=uneven)


# --- questions and answers ------------------------------------------------------------------------


def hold(
    side: Side,
    seconds: float,
    cut: Mapping[str, int] | None = None,
    shards: Sequence[int] | None = None,
    *,
    apply_buffer: bool = False,
) -> Ask:
    """Quiesce at `cut`, or at the present state, for `seconds`; 0 resumes."""
    frames = () if cut is None else (wire_format.encode_state(Cut(dict(cut))),)
    asked = side.shards if shards is None else shards
    return Ask(
        side, asked, lambda request: Quiesce(request, side.job, seconds, apply_buffer), frames
    )


def export(side: Side) -> Question:
    """The question for a shard's whole state."""
    return lambda request: Export(request, side.job)


def state_in(reply: Reply, frames: Sequence[Buffer]) -> ShardState:
    """The state in an answer to `export`; arrays are views of its frames."""
    assert isinstance(reply, State)
    return shard_state.decode(frames)[0]


def furthest(heard: Answers) -> dict[str, int]:
    """The last push of each worker that any shard has applied."""
    cuts = [wire_format.decode_state(frames[0], Cut).pushes for _, frames in heard.answers.values()]
    workers = {worker for cut in cuts for worker in cut}
    return {worker: max(cut.get(worker, 0) for cut in cuts) for worker in workers}


def _check_cut(reached: Mapping[str, int], cut: Mapping[str, int]) -> None:
    """Raise GiveUp when a shard is beyond the cut: it restarted, or the reshard took too long."""
    if any(seq > cut.get(worker, 0) for worker, seq in reached.items()):
        raise GiveUp(
            "reshard: the old shards resumed before the new ones were ready: the job stays on the"
            " old shards; try again"
        )


def _holding(heard: Answers, shard: int) -> Quiesced:
    reply, _ = heard.answers[shard]
    assert isinstance(reply, Quiesced)
    return reply
