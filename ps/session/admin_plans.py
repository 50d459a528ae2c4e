"""What an operator asks of a job's shards, question after question, as plans that know no network.

A plan is a generator. It yields what is to be asked, or a pause, and is sent what was heard; it
returns what came of it. Who carries it out repeats each question until it is answered, and throws
into the plan what cannot be: the plan then tidies up, and raises it. So a console over sockets
(admin_client.py) and the simulator decide alike.

To move a job (resharding.py):

1. The shards come to a standstill at one cut (shards/quiesce.py).
2. Their state is cut by the new map (shards/repartition.py) and given to the new shards.
3. Each old shard is told to stay at that cut, and says how far it has come: had the standstill run
   out meanwhile, pushes may be in the old shards that the new ones lack, and the move is off.
4. Each old shard sends its workers on, shard 0 first.

Until 4 nothing has changed, and whatever goes wrong leaves the old shards to go on. Shard 0 then
decides: of two operators it obeys one. As soon as it sends its workers on, the job is with the new
shards, for without it no push is acknowledged any more. It is no matter then if another has died:
workers ask all shards, and one is enough to hear it from.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from ps.session.events import Unreachable
from shards import wire_format
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
from shards.parameters import SavedProgress, ShardState
from shards.repartition import repartition
from shards.tables import ShardMap
from shards.wire_format import Buffer

LOOK_S = 0.02
STANDSTILL_S = 60.0
TELLING_S = 60.0  # for a successor's address to reach every shard

Frames = tuple[NDArray[np.float32] | bytes, ...]
Answer = tuple[Reply, Sequence[Buffer]]
Question = Callable[[int], FromOperator]
"""Makes a message of its request number."""


class UnconfirmedHandOver(Unreachable):
    """The new shards hold everything, but shard 0 has not said that it sends its workers there.

    If it is dead it will not; if it is only silent, nobody knows.
    """


class Side(NamedTuple):
    """Shards of a job that are asked together, and how long one of them may be silent."""

    job: str
    map: ShardMap
    patience_s: float

    @property
    def shards(self) -> tuple[int, ...]:
        """All of them."""
        return tuple(range(self.map.shards))


class Ask(NamedTuple):
    """Ask these shards, until each has answered."""

    of: Side
    shards: Sequence[int]
    question: Question
    frames: Frames = ()


class Pause(NamedTuple):
    """Ask nothing for a while."""

    seconds: float


class Answers(NamedTuple):
    """Each shard's answer, and when the last one came, in seconds of a monotonic clock."""

    now: float
    answers: Mapping[int, Answer]


Result = TypeVar("Result")
Plan = Generator[Ask | Pause, Answers, Result]


def quiesce(side: Side, seconds: float) -> Plan[dict[str, int]]:
    """Bring all shards to the same pushes of every worker, and keep them there so long.

    Returns each worker's last push. Raises Unreachable where the shards do not come together.
    """
    heard = yield hold(side, seconds)
    cut = furthest(heard)
    yield from _reach_cut(side, seconds, cut, heard.now + side.patience_s)
    return cut


def _reach_cut(side: Side, seconds: float, cut: Mapping[str, int], until: float) -> Plan[None]:
    """Have every shard hold the pushes up to `cut`."""
    missing: Sequence[int] = side.shards
    while True:
        heard = yield hold(side, seconds, cut, missing)
        missing = [shard for shard in missing if _holding(heard, shard).missing]
        if not missing:
            return
        if heard.now > until:
            yield from resume(side)
            raise Unreachable(
                f"shard {missing[0]} lacks pushes that others have, for {side.patience_s:g} s",
                missing[0],
            )
        yield Pause(LOOK_S)


def resume(side: Side) -> Plan[None]:
    """End a standstill."""
    yield hold(side, 0.0)


def restore(side: Side, shard: int, state: ShardState, *, goes_on: bool) -> Plan[None]:
    """Give one shard a state; `goes_on` if its workers live on."""
    yield Ask(
        side,
        (shard,),
        lambda request: Install(request, side.job, side.map.table, list(state.slots), goes_on),
        (wire_format.encode_state(state.saved), state.weights, *state.slots.values()),
    )


def hand_over(side: Side, successors: bytes, cuts: Sequence[Mapping[str, int]]) -> Plan[None]:
    """Send the workers of shards that stand still, each at its own of `cuts`, to their successors.

    Raises GiveUp when the standstill has ended before: then nothing has changed. Raises Untold when
    shard 0 does not answer.
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
        raise UnconfirmedHandOver(f"{error}; the new shards hold what it had", first) from None
    for shard in others:
        with suppress(DownpourError):
            yield sending_on(side, shard, successors)


def _still_there(side: Side, cuts: Sequence[Mapping[str, int]]) -> Plan[None]:
    """Hold the shards where they are for the telling; raises GiveUp when one has gone on."""
    for shard, cut in zip(side.shards, cuts, strict=True):
        # A worker that had been given up may be back, and what it brings now would stay behind.
        _check_cut(furthest((yield hold(side, TELLING_S, cut, (shard,)))), cut)


def sending_on(side: Side, shard: int, successors: bytes) -> Ask:
    """The order that ends a shard: its workers go to `successors`."""
    return Ask(
        side,
        (shard,),
        lambda request: HandOver(request, side.job, side.map.table, len(successors)),
        (successors,),
    )


def reshard(old: Side, new: Side, successors: bytes) -> Plan[None]:
    """Move a job's state and workers to fresh shards; `successors` tells a worker where they are.

    Raises what asking raises; then the job goes on where it was, unless it is UnconfirmedHandOver.
    """
    cut = yield from quiesce(old, STANDSTILL_S)
    try:
        states = yield from _held_at(old, cut)
        for shard, state in enumerate(repartition(states, old.map, new.map)):
            yield from restore(new, shard, state, goes_on=True)
    except GeneratorExit:
        raise  # nobody is there any more to ask
    except BaseException:
        yield from resume(old)
        raise
    yield from hand_over(old, successors, [state.saved.ledger.cut for state in states])


def _held_at(side: Side, cut: Mapping[str, int]) -> Plan[list[ShardState]]:
    """What the shards hold, each of them with the pushes up to `cut` of everybody who is there.

    A worker that was given up when they came together may be back since, with half of a push.
    """
    until: float | None = None
    while True:
        heard = yield Ask(side, side.shards, export(side))
        states = [state_in(*heard.answers[shard]) for shard in side.shards]
        for state in states:
            _check_cut(state.saved.ledger.cut, cut)
        if not any(state.saved.ledger.short_of(cut) for state in states):
            return states
        until = heard.now + side.patience_s if until is None else until
        yield from _reach_cut(side, STANDSTILL_S, cut, until)


# --- questions and answers ------------------------------------------------------------------------


def hold(
    side: Side,
    seconds: float,
    cut: Mapping[str, int] | None = None,
    shards: Sequence[int] | None = None,
) -> Ask:
    """Stand still at `cut`, or right here, for so long; 0: go on."""
    frames = () if cut is None else (wire_format.encode_state(Cut(dict(cut))),)
    asked = side.shards if shards is None else shards
    return Ask(
        side, asked, lambda request: Quiesce(request, side.job, side.map.table, seconds), frames
    )


def export(side: Side) -> Question:
    """Give me everything you have."""
    return lambda request: Export(request, side.job, side.map.table)


def state_in(reply: Reply, frames: Sequence[Buffer]) -> ShardState:
    """What an answer to `export` holds; arrays are views of its frames."""
    assert isinstance(reply, State)
    weights, *slots = (np.frombuffer(frame, np.float32) for frame in frames[1:])
    saved = wire_format.decode_state(frames[0], SavedProgress)
    return ShardState(saved, weights, dict(zip(reply.slots, slots, strict=True)))


def furthest(heard: Answers) -> dict[str, int]:
    """For each worker the last push that any shard has applied."""
    cuts = [wire_format.decode_state(frames[0], Cut).pushes for _, frames in heard.answers.values()]
    workers = {worker for cut in cuts for worker in cut}
    return {worker: max(cut.get(worker, 0) for cut in cuts) for worker in workers}


def _check_cut(reached: Mapping[str, int], cut: Mapping[str, int]) -> None:
    """Raise GiveUp when a shard has gone beyond the cut: it was started again, or took long."""
    if any(seq > cut.get(worker, 0) for worker, seq in reached.items()):
        raise GiveUp("the shards' standstill has ended before their successors were ready")


def _holding(heard: Answers, shard: int) -> Quiesced:
    reply, _ = heard.answers[shard]
    assert isinstance(reply, Quiesced)
    return reply
