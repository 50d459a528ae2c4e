"""The operations of an operator on a job's shards, as plans that do no I/O.

A plan is a generator. It yields questions or pauses, is sent the answers, and returns the result.
The driver repeats each question until it is answered, and throws into the plan any error that
prevents an answer: the plan then tidies up and raises it. So an admin client over sockets
(admin_client.py) and the simulator make the same decisions.

To reshard a job (resharding.py):

1. The shards quiesce at one cut (shards/quiesce.py).
2. Their state is repartitioned by the new map (shards/repartition.py) and given to the new shards.
3. Each old shard is asked to stay at that cut, and reports the pushes that it has. If the quiesce
   has expired, the old shards may hold pushes that the new ones lack, and the reshard is abandoned.
4. Each old shard hands its workers over, shard 0 first.

A large state travels in pieces (shards/state_pieces.py), a few of which are in flight at a time.
A shard that has restarted, or another copy that has taken over, no longer has an open export, and
refuses to continue it: the export of that shard then begins again. An install that is interrupted
continues at a copy that has the earlier pieces, and otherwise begins again.

Until step 4 nothing has changed, and after any failure the old shards resume. Shard 0 arbitrates
between two operators: it obeys one; the other waits, or finds that the job has moved. As soon as
shard 0 hands over its workers, the job belongs to the new shards, because without shard 0 no push
is fully acknowledged any more. The death of another shard then does no harm: workers ask all
shards, and one answer is enough.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from msgspec import structs
from numpy.typing import NDArray

from ps.session.events import Unreachable
from shards import shard_state, wire_format
from shards.errors import DownpourError, GiveUp, Resynchronise, Retry
from shards.live_settings import newest_settings
from shards.messages import (
    PIECE_BYTES,
    AskPiece,
    AskStatus,
    ChangeSettings,
    Cut,
    Export,
    FromOperator,
    HandOver,
    Install,
    Installed,
    LiveSettings,
    Quiesce,
    Quiesced,
    Reply,
    SettingsInForce,
    State,
)
from shards.repartition import evenly_buffered, repartition
from shards.shard_state import ShardState
from shards.shard_status import ShardStatus
from shards.state_pieces import AHEAD, CutState, GatheredState
from shards.tables import Layout, ShardMap
from shards.wire_format import Buffer

POLL_S = 0.02
BUSY_S = 0.2  # the pause between requests to shards that another operator has quiesced
QUIESCE_S = 60.0  # after which quiesced shards resume by themselves, if the operator dies
HAND_OVER_S = 60.0  # the time for the new shards' addresses to reach every old shard
_TRIES = 8  # how often a shard may lose an export or an install before the plan gives up

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

    `owner` is the number by which shards know this operator (shards/quiesce.py). `description` is
    the answer of each to a `Describe`. States travel in pieces of `piece_bytes`.
    """

    job: str
    layout: Layout
    map: ShardMap
    owner: int
    patience_s: float
    description: bytes = b""
    piece_bytes: int = PIECE_BYTES

    @property
    def shards(self) -> tuple[int, ...]:
        """The numbers of all shards."""
        return tuple(range(self.map.shards))


class Query(NamedTuple):
    """One question to one shard; `behind` is sent right after it, and its answer is not awaited."""

    shard: int
    question: Question
    frames: Frames = ()
    behind: Question | None = None


class Ask(NamedTuple):
    """Ask these questions at the same time, each until it is answered."""

    of: Side
    queries: Sequence[Query]

    @property
    def kind(self) -> type[FromOperator]:
        """The type of the questions, of which there is at least one."""
        return type(self.queries[0].question(0))


class Pause(NamedTuple):
    """Ask nothing for `seconds`."""

    seconds: float


class Answers(NamedTuple):
    """The answer to each query, and the time of the last one in seconds of a monotonic clock."""

    now: float
    answers: Sequence[Answer]


Result = TypeVar("Result")
Plan = Generator[Ask | Pause, Answers, Result]


def quiesce(side: Side, seconds: float) -> Plan[dict[str, int]]:
    """Bring all shards to the same pushes of every worker, and hold them there for `seconds`.

    Returns each worker's last push. Raises Unreachable if the shards do not reach one cut, and
    Retry while another operator quiesces them.
    """
    try:
        cut = furthest((yield from _acquire(side, seconds)))
        yield from _reach_cut(side, seconds, cut)
    except (GeneratorExit, Unreachable):
        raise  # nothing more can be asked, or the silent shard would not answer `resume` either
    except BaseException:
        yield from resume(side)
        raise
    return cut


def _acquire(side: Side, seconds: float) -> Plan[Sequence[Answer]]:
    """Quiesce every shard where it is; waits while another operator quiesces one of them.

    Of two operators that ask at the same time, each may get some shards. The operator that has
    shard 0 waits for the rest; the other operator resumes its shards, so neither waits for ever.
    """
    until: float | None = None
    while True:
        heard = yield hold(side, seconds)
        busy_s = _busy_s(heard.answers)
        if not busy_s:
            return heard.answers
        until = heard.now + side.patience_s if until is None else until
        if heard.now > until:
            raise Retry(
                "the shards are quiesced by another operator, which reshards, saves or reads the"
                f" job, for at most {busy_s:.0f} s more"
            )
        if _busy_s(heard.answers[:1]):
            yield from resume(side)
        yield Pause(min(busy_s, BUSY_S))


def _reach_cut(
    side: Side, seconds: float, cut: Mapping[str, int], *, apply_buffer: bool = False
) -> Plan[None]:
    """Hold every shard until it has all pushes up to `cut`, and has applied its buffer if asked.

    Then all of them stay there for half of `seconds` or longer.
    """
    missing: Sequence[int] = side.shards
    began: float | None = None
    patience_s = min(side.patience_s, seconds)  # shards already at the cut resume after `seconds`
    while True:
        heard = yield hold(side, seconds, cut, missing, apply_buffer=apply_buffer)
        _check_owned(heard.answers)
        began = heard.now if began is None else began
        missing = [
            shard for shard, answer in zip(missing, heard.answers, strict=True) if _lacks(answer)
        ]
        if not missing:
            if heard.now - began > seconds / 2:
                _check_owned((yield hold(side, seconds, cut)).answers)
            return
        if heard.now - began > patience_s:
            yield from resume(side)
            raise Unreachable(
                f"shard {missing[0]} still lacks pushes that others have after {patience_s:g} s",
                missing[0],
            )
        yield Pause(POLL_S)


def resume(side: Side) -> Plan[None]:
    """End this operator's quiesce; another operator's stays in force."""
    yield hold(side, 0.0)


class SettingsChange(NamedTuple):
    """An operator's change to a job's settings; a `rate_factor` of None keeps the present factor.

    `bound` takes effect only with `sets_bound`, because None is itself a bound: no limit.
    """

    sets_bound: bool = False
    bound: int | None = None
    rate_factor: float | None = None

    def of(self, present: LiveSettings, owner: int) -> LiveSettings:
        """The next settings after the `present` ones, changed by the operator `owner`."""
        return LiveSettings(
            self.bound if self.sets_bound else present.bound,
            present.rate_factor if self.rate_factor is None else self.rate_factor,
            present.revision + 1,
            owner,
        )


def change_settings(side: Side, change: SettingsChange) -> Plan[LiveSettings]:
    """Change settings of a job while it trains; returns those in force at all shards.

    Shard 0 decides which of two operators is first. Raises GiveUp for the other one. Raises
    BadInput for settings that the job cannot follow, and Retry while another operator quiesces the
    shards.
    """
    heard = yield Ask(
        side, [Query(shard, lambda request: AskStatus(request, side.job)) for shard in side.shards]
    )
    known = [wire_format.decode_state(frames[0], ShardStatus) for _, frames in heard.answers]
    present = max((status.settings for status in known), key=lambda settings: settings.revision)
    ordered = change.of(present, side.owner)
    first, *others = side.shards
    # Shard 0 alone first: it accepts one change of a revision, so only one of two operators
    # continues to the others.
    (accepted,) = yield from _follow_everywhere(side, ordered, (first,))
    if accepted != ordered:
        raise GiveUp("set: another operator has changed the settings at the same time: try again")
    yield from _follow_everywhere(side, ordered, others)
    return ordered


def spread_settings(side: Side, settings: LiveSettings) -> Plan[None]:
    """Give settings that were in force at one shard to all that lack them, as after a rollback."""
    yield from _follow_everywhere(side, settings, side.shards)


def _follow_everywhere(
    side: Side, ordered: LiveSettings, shards: Sequence[int]
) -> Plan[Sequence[LiveSettings]]:
    """The settings in force at these shards after each was asked to follow `ordered`.

    A shard that an operator quiesces is asked again.
    """
    question = _question_of(ChangeSettings(0, side.job, ordered))
    until: float | None = None
    while shards:
        heard = yield Ask(side, [Query(shard, question) for shard in shards])
        replies = [reply for reply, _ in heard.answers if isinstance(reply, SettingsInForce)]
        busy_s = max(reply.busy_s for reply in replies)
        if not busy_s:
            return [reply.settings for reply in replies]
        until = heard.now + side.patience_s if until is None else until
        if heard.now > until:
            raise Retry(
                "set: the shards are quiesced by an operator, which reshards, saves or reads the"
                f" job, for at most {busy_s:.0f} s more"
            )
        yield Pause(min(busy_s, BUSY_S))
    return ()


def restore(side: Side, shard: int, state: ShardState, *, keep_workers: bool) -> Plan[None]:
    """Give one shard a state; `keep_workers` if the workers of that state are still alive.

    Raises Unreachable if the shard has lost a part of the state in each of several attempts.
    """
    frames = shard_state.encode(structs.replace(state, description=side.description))
    cut = CutState(frames, side.piece_bytes)
    if cut.count == 1:
        whole = Install(0, side.job, keep_workers)
        yield Ask(side, (Query(shard, _question_of(whole), frames),))
        return
    # One name for all attempts, so that a shard keeps the pieces that it has.
    name = cut.name
    for _ in range(_TRIES):
        for first in range(0, cut.count, AHEAD):
            queries = []
            for number in range(first, min(first + AHEAD, cut.count)):
                piece, slices = cut.piece(number, name)
                message = Install(0, side.job, keep_workers, piece)
                queries.append(Query(shard, _question_of(message), slices))
            heard = yield Ask(side, queries)
            # Checked after each batch: the shard may have the rest from the previous attempt.
            if any(
                isinstance(reply, Installed) and not reply.missing for reply, _ in heard.answers
            ):
                return
    raise Unreachable(f"shard {shard} lost part of its state in each of {_TRIES} attempts", shard)


def export(side: Side, *, behind: Question | None = None) -> Plan[list[ShardState]]:
    """The state of every shard, each at one version; all shards are asked at the same time.

    The question `behind` is sent to each shard right after the one that fixes its version. With it,
    an export that a shard loses cannot begin again at that version: raises Resynchronise.
    """
    whole: dict[int, ShardState] = {}
    partial: dict[int, tuple[int, GatheredState]] = {}
    tries = _TRIES
    while len(whole) < len(side.shards):
        queries = []
        for shard in side.shards:
            if shard in partial:
                boot, gathered = partial[shard]
                asked = (
                    AskPiece(0, side.job, boot, gathered.of, number)
                    for number in gathered.missing[:AHEAD]
                )
                queries += [Query(shard, _question_of(message)) for message in asked]
            elif shard not in whole:
                opening = Export(0, side.job, side.piece_bytes)
                queries.append(Query(shard, _question_of(opening), (), behind))
        try:
            heard = yield Ask(side, queries)
        except Resynchronise as error:
            tries -= 1
            if behind is not None or error.shard not in partial or not tries:
                raise
            # The shard no longer has that export: it begins again, at another version.
            del partial[error.shard]
            continue
        for query, (reply, frames) in zip(queries, heard.answers, strict=True):
            assert isinstance(reply, State)
            if reply.piece is None:
                whole[query.shard] = shard_state.decode(frames)[0]
                continue
            if query.shard not in partial:
                partial[query.shard] = reply.boot, GatheredState(reply.piece.of)
            gathered = partial[query.shard][1]
            gathered.take(reply.piece, frames)
            if gathered.complete:
                whole[query.shard] = shard_state.decode(gathered.frames())[0]
                del partial[query.shard]
    return [whole[shard] for shard in side.shards]


def hand_over(
    side: Side,
    successors: bytes,
    cuts: Sequence[Mapping[str, int]],
    settings: LiveSettings | None = None,
) -> Plan[None]:
    """Send the workers of quiesced shards to their successors; `cuts` has the cut of each shard.

    `settings` are those that the successors have (None: no operator has changed any). Raises GiveUp
    when the quiesce has expired: then nothing has changed. Raises UnconfirmedHandOver when shard 0
    does not answer.
    """
    try:
        # Before shard 0 hands over: afterwards the job cannot return to the old shards.
        yield from _hold_for_handover(side, cuts, settings.revision if settings is not None else 0)
    except DownpourError:
        yield from resume(side)
        raise
    first, *others = side.shards
    try:
        yield hand_over_request(side, first, successors)
    except Unreachable as error:
        raise UnconfirmedHandOver(f"{error}; the new shards hold its state", first) from None
    for shard in others:
        with suppress(DownpourError):
            # A dead shard does no harm here: its workers hear of the move from shard 0.
            yield hand_over_request(side, shard, successors)


def _hold_for_handover(side: Side, cuts: Sequence[Mapping[str, int]], revision: int) -> Plan[None]:
    """Hold the shards at their cuts for the hand-over; raises GiveUp when one has advanced, or has
    other settings than those of this revision.
    """
    for shard, cut in zip(side.shards, cuts, strict=True):
        # A worker that had lost its lease may be back: a push that it sends now to the old shards
        # would not reach the new ones.
        heard = yield hold(side, HAND_OVER_S, cut, (shard,))
        _check_owned(heard.answers)
        _check_cut(furthest(heard.answers), cut)
        if any(
            isinstance(reply, Quiesced) and reply.revision > revision for reply, _ in heard.answers
        ):
            raise GiveUp(
                "reshard: an operator has changed the job's settings meanwhile: the job stays on"
                " the old shards; try again"
            )


def hand_over_request(side: Side, shard: int, successors: bytes) -> Ask:
    """The request that ends a shard: it hands its workers over to `successors`."""
    message = HandOver(0, side.job, len(successors), side.owner)
    return Ask(side, (Query(shard, _question_of(message), (successors,)),))


def reshard(old: Side, new: Side, successors: bytes) -> Plan[None]:
    """Move a job's state and workers to fresh shards; `successors` is the encoded new cluster.

    Raises what asking raises; then the job stays on the old shards, unless the error is
    UnconfirmedHandOver.
    """
    states = yield from move(old, new)
    cuts = [state.saved.ledger.cut for state in states]
    yield from hand_over(old, successors, cuts, newest_settings(states))


def move(old: Side, new: Side) -> Plan[list[ShardState]]:
    """Quiesce the old shards and give the new ones their state, which is returned.

    Raises what asking raises, and then resumes the old shards.
    """
    cut = yield from quiesce(old, QUIESCE_S)
    try:
        states = yield from _export_at_cut(old, cut)
        for shard, state in enumerate(repartition(states, old.layout, old.map, new.map)):
            yield from restore(new, shard, state, keep_workers=True)
    except GeneratorExit:
        raise  # the driver has gone, so nothing more can be asked
    except BaseException:
        yield from resume(old)
        raise
    return states


def _export_at_cut(side: Side, cut: Mapping[str, int]) -> Plan[list[ShardState]]:
    """The state of all shards, each with every push up to `cut` of all registered workers.

    A worker that had lost its lease when the shards came together may be back since, with a push
    that only some shards have.

    If all shards have buffered the same number of pushes, the buffers are handed over unchanged.
    The numbers differ if one shard has a dead worker's last push, or noticed first that no worker
    was left. A new shard, with keys of several old ones, would then count pushes that some of its
    keys lack, and might update those keys without a gradient. So all shards apply their buffers
    first.
    """
    for _ in range(_TRIES):
        states = yield from export(side)
        for state in states:
            # The quiesce may have ended during the export: pushes beyond the cut would be applied
            # twice.
            _check_cut(state.saved.ledger.cut, cut)
        uneven = not evenly_buffered([state.saved for state in states])
        if not uneven and not any(state.saved.ledger.short_of(cut) for state in states):
            return states
        yield from _reach_cut(side, QUIESCE_S, cut, apply_buffer=uneven)
    raise Unreachable(f"the shards did not reach one cut in {_TRIES} attempts")


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
    question = _question_of(Quiesce(0, side.job, seconds, side.owner, apply_buffer))
    asked = side.shards if shards is None else shards
    return Ask(side, [Query(shard, question, frames) for shard in asked])


def furthest(answers: Sequence[Answer]) -> dict[str, int]:
    """The last push of each worker that any shard has applied."""
    cuts = [wire_format.decode_state(frames[0], Cut).pushes for _, frames in answers]
    workers = {worker for cut in cuts for worker in cut}
    return {worker: max(cut.get(worker, 0) for cut in cuts) for worker in workers}


def _check_cut(reached: Mapping[str, int], cut: Mapping[str, int]) -> None:
    """Raise GiveUp when a shard is beyond the cut: it restarted, or the reshard took too long."""
    if any(seq > cut.get(worker, 0) for worker, seq in reached.items()):
        raise GiveUp(
            "reshard: the old shards resumed before the new ones were ready: the job stays on the"
            " old shards; try again"
        )


def _check_owned(answers: Sequence[Answer]) -> None:
    """Raise Retry when another operator's quiesce has replaced this operator's."""
    if _busy_s(answers):
        raise Retry("another operator has quiesced the shards meanwhile: try again")


def _busy_s(answers: Sequence[Answer]) -> float:
    """The most seconds for which another operator quiesces one of the shards; 0 if none does."""
    return max(reply.busy_s for reply, _ in answers if isinstance(reply, Quiesced))


def _lacks(answer: Answer) -> bool:
    reply, _ = answer
    assert isinstance(reply, Quiesced)
    return reply.missing


def _question_of(message: FromOperator) -> Question:
    return lambda request: structs.replace(message, request=request)
