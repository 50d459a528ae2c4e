"""A state that travels in pieces arrives as it was cut, or not at all."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.session import admin_plans
from ps.session.admin_plans import Answers, Ask, Pause, Side
from ps.session.events import Unreachable
from shards import shard_state, wire_format
from shards.errors import BadMessage, Resynchronise, Retry
from shards.messages import AskPiece, Export, Install, Installed, Piece, Quiesce, Refusal, State
from shards.refusals import error_of
from shards.shard import Shard
from shards.state_pieces import AHEAD, EXPORT_S, MAX_EXPORTS, CutState, GatheredState
from tests.support.shard_dsl import SIZE, blank, hello, join, push, spec

PIECE = 256
SHAPE = spec(bound=None, lease_s=1000.0)
OF = 7


def pieces_of(cut: CutState) -> list[tuple[Piece, list[bytes]]]:
    made = (cut.piece(number, OF) for number in range(cut.count))
    return [(piece, [bytes(frame) for frame in frames]) for piece, frames in made]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 3 * PIECE), max_size=8), st.randoms(use_true_random=False))
def test_frames_come_back(sizes: list[int], chance: Any) -> None:
    """Whatever the sizes of the frames, in any order, and with repetitions."""
    frames = [chance.randbytes(size) for size in sizes]
    pieces = pieces_of(CutState(frames, PIECE))
    assert all(sum(map(len, own[1:])) <= PIECE for _, own in pieces)
    gathered = GatheredState(OF)
    arriving = [*pieces, *chance.choices(pieces, k=3)]
    chance.shuffle(arriving)
    for piece, own in arriving:
        gathered.take(piece, own)
    assert gathered.complete
    assert [bytes(frame) for frame in gathered.frames()] == frames


def test_wrong_pieces_are_refused() -> None:
    """A piece of another state, in another's place, damaged or too large; nothing is taken."""
    content = np.arange(PIECE, dtype=np.float32)
    pieces = pieces_of(CutState([content], PIECE))
    other = pieces_of(CutState([content[::-1].copy(), b"x"], PIECE))
    gathered = GatheredState(OF, content.nbytes)
    gathered.take(*pieces[0])
    (first, own), (_, second) = pieces[0], pieces[1]
    flipped = [own[0], bytes([own[1][0] ^ 1]) + own[1][1:]]
    wrong: list[tuple[Piece, Sequence[bytes]]] = [
        (msgspec.structs.replace(first, of=OF + 1), own),
        (msgspec.structs.replace(first, number=1), own),
        (first, second),
        (first, flipped),
        (first, own[:1]),
        (first, ()),
        (msgspec.structs.replace(first, number=9), own),
        other[1],
    ]
    for piece, frames in wrong:
        with pytest.raises(BadMessage):
            gathered.take(piece, frames)
    assert gathered.missing == [1, 2, 3]
    with pytest.raises(BadMessage, match="at most 1000 bytes"):
        GatheredState(OF, 1000).take(*pieces[0])


class Answering:
    """Shards that answer a plan, in place of sockets; `before` runs ahead of each question."""

    def __init__(self, *shards: Shard) -> None:
        self.shards = list(shards)
        self.asked: list[tuple[str, int]] = []
        self.side = Side("job", SHAPE.layout, SHAPE.map, 1, 1.0, b"", PIECE)
        self._request = 0

    def carry_out(self, plan: Any, before: Any = lambda _: None) -> Any:
        try:
            step = next(plan)
            while True:
                assert isinstance(step, Ask)
                before(self.asked)
                error, answers = None, list[Any]()
                for query in step.queries:
                    self._request += 1
                    message: Any = query.question(self._request)
                    self.asked.append((step.kind.__name__, query.shard))
                    frames = [bytes(frame) for frame in query.frames]
                    shard = self.shards[query.shard]
                    (answer,) = shard.handle(b"operator", message, frames, 0.0)
                    if isinstance(answer.message, Refusal):
                        error = error_of(answer.message)
                    answers.append((answer.message, wire_format.wrap(answer.frames)))
                step = plan.throw(error) if error else plan.send(Answers(0.0, answers))
        except StopIteration as end:
            return end.value


def trained(boot: int = 1, pushes: int = 3) -> Shard:
    shard = Shard(SHAPE, boot)
    shard.restore(blank(spec=SHAPE))
    for message in (hello("w"), msgspec.structs.replace(join("w"), boot=boot)):
        shard.handle(b"w", message, (), 0.0)
    train(shard, 1, pushes)
    return shard


def train(shard: Shard, first: int, last: int) -> None:
    for seq in range(first, last + 1):
        gradient = [np.full(SIZE, seq, np.float32).tobytes()]
        shard.handle(b"w", push("w", seq, boot=shard.boot), gradient, 0.0)


def weights(shard: Shard) -> bytes:
    return shard.parameters.weights().tobytes()


def test_an_export_is_one_version_while_workers_push() -> None:
    shard = trained()
    before, answering, seq = weights(shard), Answering(shard), [3]

    def pushes(asked: Any) -> None:
        if asked:
            seq[0] += 1
            train(shard, seq[0], seq[0])

    (state,) = answering.carry_out(admin_plans.export(answering.side), pushes)
    assert len(answering.asked) > 3
    assert state.arrays["net/weights"].tobytes() == before
    assert (state.saved.version, state.saved.ledger.entries["w"].seq) == (3, 3)
    assert weights(shard) != before


def test_an_operator_waits_for_another_one() -> None:
    """For its patience; it asks again from time to time, and resumes nothing of the other's."""
    shard, times = trained(), [0.0]
    shard.handle(b"other", Quiesce(1, "job", 60.0, 2), (), 0.0)

    def carry_out(plan: Any) -> None:
        step = next(plan)
        while True:
            answers = list[Any]()
            if isinstance(step, Pause):
                times.append(times[-1] + step.seconds)
            else:
                question = step.queries[0].question(7)
                (answer,) = shard.handle(b"operator", question, (), times[-1])
                answers = [(answer.message, wire_format.wrap(answer.frames))]
            step = plan.send(Answers(times[-1], answers))

    plan = admin_plans.quiesce(Side("job", SHAPE.layout, SHAPE.map, 1, 1.0), 10.0)
    with pytest.raises(Retry, match=r"quiesced by another operator, .* for at most 59 s more$"):
        carry_out(plan)
    assert times == pytest.approx([0.0, 0.2, 0.4, 0.6, 0.8, 1.0, 1.2])
    assert shard.reshard.quiesce.is_owned(2, times[-1])


def test_an_export_begins_again_at_a_shard_that_has_restarted() -> None:
    """Pieces of the two states are never mixed."""
    first, second = trained(1, 3), trained(2, 5)
    answering = Answering(first)

    def restart(asked: Any) -> None:
        if len(asked) == 1:
            answering.shards[0] = second

    (state,) = answering.carry_out(admin_plans.export(answering.side), restart)
    assert state.arrays["net/weights"].tobytes() == weights(second)
    assert [kind for kind, _ in answering.asked].count("Export") == 2
    behind = admin_plans.export(answering.side, behind=lambda n: Export(n, "job"))
    answering.asked.clear()
    answering.shards[0] = first
    with pytest.raises(Resynchronise, match="begin the export again"):
        answering.carry_out(behind, restart)


def test_exports_are_few_and_expire() -> None:
    shard = trained()

    def opened(sender: bytes, request: int, now: float) -> State:
        (answer,) = shard.handle(sender, Export(request, "job", PIECE), (), now)
        assert isinstance(answer.message, State)
        return answer.message

    def asks(state: State, now: float) -> type:
        assert state.piece is not None
        (answer,) = shard.handle(b"", AskPiece(9, "job", 1, state.piece.of, 1), (), now)
        return type(answer.message)

    states = [opened(b"%d" % number, 1, float(number)) for number in range(MAX_EXPORTS + 1)]
    assert [asks(one, 5.0) for one in states] == [Refusal, *[State] * MAX_EXPORTS]
    again, other = opened(b"4", 1, 6.0), opened(b"4", 2, 6.0)
    assert again == states[4], "a repeated request opens no other export"
    assert [asks(states[4], 6.0), asks(other, 6.0)] == [Refusal, State]
    shard.tick(6.0 + EXPORT_S)
    assert asks(other, 6.0) is State
    shard.tick(6.1 + EXPORT_S)
    assert asks(other, 6.1) is Refusal


def test_a_state_is_installed_once_all_pieces_are_there() -> None:
    state = trained().copy()
    fresh = Shard(SHAPE, 9)
    answering = Answering(fresh)
    seen = []
    answering.carry_out(
        admin_plans.restore(answering.side, 0, state, keep_workers=True),
        lambda _: seen.append(fresh.parameters.empty),
    )
    assert len(seen) > 1
    assert all(seen)
    assert weights(fresh) == state.arrays["net/weights"].tobytes()
    assert not fresh.waiting()


@pytest.mark.parametrize("carried", [True, False])
def test_an_install_continues_at_another_copy_and_begins_again_without_one(carried: bool) -> None:
    """The pieces are part of what waits at a shard; one that has lost them needs all again."""
    state = trained().copy()
    first, second = Shard(SHAPE, 1), Shard(SHAPE, 2)
    answering = Answering(first)

    def fail_over(asked: Any) -> None:
        if len(asked) == AHEAD:
            for message, frames in first.waiting() if carried else ():
                second.park_request(message, frames, 0.0)
            answering.shards[0] = second

    answering.carry_out(admin_plans.restore(answering.side, 0, state, keep_workers=True), fail_over)
    assert weights(second) == state.arrays["net/weights"].tobytes()
    pieces = CutState(shard_state.encode(state), PIECE).count
    assert len(answering.asked) == (pieces if carried else pieces + AHEAD)


def test_a_shard_that_always_forgets_ends_the_install() -> None:
    answering = Answering(Shard(SHAPE, 1))

    def forget(asked: Any) -> None:
        answering.shards[0] = Shard(SHAPE, len(asked) + 2)

    with pytest.raises(Unreachable, match="lost part of its state in each of 8 attempts"):
        answering.carry_out(
            admin_plans.restore(answering.side, 0, trained().copy(), keep_workers=False), forget
        )


def test_a_refused_install_leaves_the_other_pieces() -> None:
    """Every copy of a shard holds the same pieces, and copies do not see a refused request."""
    shard = Shard(SHAPE, 1)
    pieces = pieces_of(CutState([b"not a state" * 100], PIECE))
    for number, (piece, frames) in enumerate(pieces):
        (answer,) = shard.handle(b"o", Install(number, "job", piece=piece), frames, 0.0)
        if number < len(pieces) - 1:
            assert isinstance(answer.message, Installed)
            assert answer.message.missing == len(pieces) - 1 - number
        else:
            assert isinstance(answer.message, Refusal)
    assert len(shard.waiting()) == len(pieces) - 1
    assert shard.parameters.empty
