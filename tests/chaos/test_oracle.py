"""The oracle of reads, on journals written by hand: it finds each violation, and accuses no other.

Two workers, two shards, bound 2. Worker w0 pushes and w1 reads, unless a test says otherwise.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from shards.tables import Layout, cut_evenly
from tests.chaos.journal import (
    Acked,
    Began,
    Content,
    Event,
    Journal,
    Leaves,
    Pushes,
    Reads,
    Ready,
    contents,
    read_journal,
)
from tests.chaos.oracle import GRACE_S, Breach, Death, Found, Move, Promise, Stop, judge_reads
from tests.chaos.record import LifeStart, gradient, mark, marks_to, table_for

LEASE_S, BOUND = 10.0, 2
PROMISE = Promise(BOUND, LEASE_S)
ROLLS_BACK = PROMISE._replace(rollback_s=2.0)


def life(
    *events: Event, at: float = 0.0, seq: int = 0, clock: int = 0, number: int = 1
) -> list[Event]:
    """A life that begins at `at` and is registered a tenth of a second later."""
    return [Began(at), Ready(at + 0.1, seq, clock, number), *events]


def sum_to(last: int) -> int:
    """The marks of a first life's pushes 1 to `last`."""
    return marks_to(last, [LifeStart(0, 1)])


def reader(*events: Event) -> list[Event]:
    """A worker that only reads, and holds back nobody."""
    return life(*events, clock=99)


def pushed(seq: int, at: float, clock: int | None = None) -> list[Event]:
    """Push `seq` is sent at `at`, and acknowledged a tenth of a second later."""
    return [Pushes(at, seq), Acked(at, at + 0.1, seq, seq if clock is None else clock)]


def holds(*counts: int, marks: Sequence[int] | None = None) -> Content:
    """One shard's part: so many pushes of each worker, each of them once."""
    return Content(sum(counts), counts, tuple(marks or map(sum_to, counts)))


def read(at: float, clock: int, *shards: Content, seq: int = 0) -> Reads:
    """A read asked for at `at` and answered a tenth of a second later."""
    return Reads(at, at + 0.1, clock, seq, 1, shards)


def judged(
    w0: Sequence[Event],
    w1: Sequence[Event],
    promise: Promise = PROMISE,
    deaths: Sequence[Death] = (),
    moves: Sequence[Move] = (),
    stops: Sequence[Stop] = (),
) -> Found:
    return judge_reads({"w0": w0, "w1": w1}, promise, deaths, moves, stops)


def breaches(found: Found) -> list[Breach]:
    return [finding.breach for finding in found.findings]


FOUR = [event for seq in (1, 2, 3, 4) for event in pushed(seq, 1.0 * seq)]
"""w0's pushes 1 to 4, sent and acknowledged at 1, 2, 3 and 4 s."""


def test_nothing_is_wrong_with_what_was_promised() -> None:
    """A read holds all that was acknowledged before, perhaps what was sent, and is in time."""
    reads = [
        read(1.5, 2, holds(1, 0), holds(1, 0)),
        read(3.05, 4, holds(2, 0), holds(3, 0)),
        read(4.5, 6, holds(4, 0), holds(4, 0)),
    ]
    found = judged(life(*FOUR), reader(*reads))
    assert (found.findings, found.reads, found.behind) == ((), 3, 2)
    assert found.judged == 3 * 2 * 2


@pytest.mark.parametrize(
    ("wrong", "breach"),
    [
        pytest.param(Content(2, (2, 0), (sum_to(2), 0), torn=True), Breach.TORN, id="keys"),
        pytest.param(Content(3, (2, 0), (sum_to(2), 0)), Breach.TORN, id="version"),
        pytest.param(holds(3, 0), Breach.DOUBLED, id="one more than was sent"),
        pytest.param(holds(2, 1), Breach.DOUBLED, id="of another that sent none"),
        pytest.param(holds(2, 0, marks=(2 * mark(1, 1), 0)), Breach.DOUBLED, id="one twice"),
        pytest.param(holds(1, 0), Breach.LOST, id="lost"),
    ],
)
@pytest.mark.parametrize("shard", [0, 1])
def test_what_is_wrong_at_one_shard_is_found(wrong: Content, breach: Breach, shard: int) -> None:
    """Each violation is found in either shard's part, and is the only one."""
    parts = [holds(2, 0), holds(2, 0)]
    parts[shard] = wrong
    assert breaches(judged(life(*FOUR), reader(read(2.5, 3, *parts)))) == [breach]


def test_a_read_lacks_the_readers_own_push() -> None:
    """It is due at once, also where a replaced copy may not know of the others' pushes."""
    own = pushed(1, 1.0)
    for promise in (PROMISE, PROMISE._replace(one_copy=False)):
        found = judged(reader(), life(*own, read(2.0, 1, holds(0, 1), holds(0, 0), seq=1)), promise)
        assert breaches(found) == [Breach.OWN]
    stale = read(4.5, 2, holds(1, 0), holds(4, 0))
    replicated = PROMISE._replace(one_copy=False, bound=None)
    assert not judged(life(*FOUR), reader(stale), replicated).findings


def test_a_later_read_is_older() -> None:
    """Version or pushes that go back between two reads of a worker."""
    first = read(2.05, 3, holds(3, 0), holds(2, 0))
    second = read(3.02, 3, holds(2, 0), holds(2, 0))
    w0 = life(*pushed(1, 1.0), *pushed(2, 1.2), Pushes(2.0, 3), Acked(2.0, 5.0, 3, 3))
    assert breaches(judged(w0, reader(first, second))) == [Breach.OLDER]


def test_a_read_is_further_behind_than_the_bound() -> None:
    """At clock 5 under bound 2 push 3 is due, though it is not acknowledged yet."""
    found = judged(life(*FOUR), reader(read(2.95, 5, holds(3, 0), holds(2, 0))))
    assert (breaches(found), found.behind) == ([Breach.LACKS], 3)
    assert "shard 1: at clock 5, and w0 stood at 2 there" in found.findings[0].text


def test_a_read_past_a_join() -> None:
    """A joiner is given clock 10, and a shard with a higher floor lets others read five ahead.

    Shard 0 waits for the joiner's pushes; shard 1, to which its link is slow, counts it at 13.
    """
    joiner = life(Pushes(1.0, 1), Pushes(1.1, 2), Pushes(1.2, 3), Acked(1.0, 3.0, 3, 13), clock=10)
    reads = [
        read(0.5, 12, holds(0, 0), holds(0, 0)),
        read(1.5, 15, holds(3, 0), holds(0, 0)),
    ]
    found = judged(joiner, reader(*reads))
    assert (breaches(found), found.behind) == ([Breach.LACKS], 2 * BOUND + 1)


LATE = read(5.0, 9, holds(4, 0), holds(4, 0))
"""Asked at 5 s and answered at 5.1 s: five steps ahead of w0 after its four pushes."""


@pytest.mark.parametrize(
    ("w0", "lease_s"),
    [
        pytest.param(life(*FOUR, Leaves(5.05)), LEASE_S, id="it leaves"),
        pytest.param(life(*FOUR) + life(at=5.05, seq=4, clock=9), LEASE_S, id="another life"),
        pytest.param([*life(*FOUR), Began(5.05)], LEASE_S, id="another life begins"),
        pytest.param(life(*FOUR), 1.1, id="its lease may have run out"),
        pytest.param(life(seq=4, clock=4, at=4.95)[:1], LEASE_S, id="it never was registered"),
    ],
)
def test_nobody_is_accused_who_may_not_count(w0: list[Event], lease_s: float) -> None:
    """One whose registration is not certain all through the read need not be in it."""
    found = judged(w0, reader(LATE), PROMISE._replace(lease_s=lease_s))
    assert Breach.LACKS not in breaches(found)


def test_who_is_killed_counts_until_its_lease_runs_out() -> None:
    """The last journal entry is no departure: the others wait for it."""
    assert breaches(judged(life(*FOUR), reader(LATE))) == [Breach.LACKS] * 2


def test_one_that_was_put_ahead_stands_where_it_was_put() -> None:
    """Its next push is acknowledged at a clock that the others had come to without it."""
    w0 = life(*FOUR, *pushed(5, 5.5, clock=8))
    assert not judged(w0, reader(LATE)).findings


def test_after_a_move_a_worker_counts_from_its_first_answer() -> None:
    """Nothing is due of one that the new shards may not have heard from; then it is, as before."""
    w0 = [*life(*FOUR), read(5.3, 4, holds(4, 0), holds(4, 0), seq=4)]
    later = read(6.0, 9, holds(4, 0), holds(4, 0))
    found = judged(w0, reader(LATE, later), moves=[Move(4.5, 5.2)])
    assert breaches(found) == [Breach.LACKS] * 2
    assert all("w1's read of 6.000" in one.text for one in found.findings)


# --- deaths that take something back --------------------------------------------------------------

DEATH = Death(1, 3.5, 4.0)


def survivor(lost: int, again_s: float = 5.0) -> list[Event]:
    """w0 pushes 1, 2 and 3; its read after the death of shard 1 lacks `lost` of them there."""
    before = [event for seq in (1, 2, 3) for event in pushed(seq, 1.0 * seq)]
    kept = 3 - lost
    after = read(again_s, 3, holds(3, 0), holds(kept, 0), seq=3)
    return life(*before, after)


def test_a_death_takes_back_what_it_may() -> None:
    """Push 3, acknowledged less than two seconds before, is missing from then on, and no fault."""
    others = [
        read(3.2, 3, holds(3, 0), holds(3, 0)),
        read(3.6, 3, holds(3, 0), holds(0, 0)),  # may have been answered before or after
        read(6.0, 3, holds(3, 0), holds(2, 0)),
    ]
    found = judged(survivor(1), reader(*others), ROLLS_BACK, [DEATH])
    assert not found.findings
    assert found.taken_back_s == pytest.approx(0.4)
    assert found.lacking == {(1, 0): (1, mark(3, 1))} | dict.fromkeys(
        ((0, 0), (0, 1), (1, 1)), (0, 0)
    )


def test_a_death_takes_back_too_much() -> None:
    """Or anything at all from a shard that did not die, or more later in the shard's life."""
    late = Death(1, GRACE_S + 10.0, GRACE_S + 10.5)
    found = judged(survivor(2, GRACE_S + 11.0), reader(), ROLLS_BACK, [late])
    assert breaches(found) == [Breach.TAKEN_BACK]
    stops = [Stop(1, 5.0, 9.0), Stop(1, 9.0, 19.0), Stop(0, 5.0, 19.0)]
    found = judged(survivor(2, GRACE_S + 11.0), reader(), ROLLS_BACK, [late], stops=stops[2:])
    assert breaches(found) == [Breach.TAKEN_BACK], "another shard was stopped"
    found = judged(survivor(2, GRACE_S + 11.0), reader(), ROLLS_BACK, [late], stops=stops)
    assert breaches(found) == [], "it could not save while it was stopped"
    found = judged(survivor(0), reader(read(6.0, 3, holds(2, 0), holds(3, 0))), ROLLS_BACK, [DEATH])
    assert breaches(found) == [Breach.LOST]
    w0 = [*survivor(1), read(6.0, 3, holds(3, 0), holds(1, 0), seq=3)]
    found = judged(w0, reader(), ROLLS_BACK, [DEATH])
    assert Breach.LOST in breaches(found)


def test_what_was_taken_back_does_not_return() -> None:
    """After a second death of the shard its worker numbers on from one less than it lacked."""
    w0 = [*survivor(1), *pushed(4, 6.0)]
    w0 += [read(9.0, 4, holds(4, 0), holds(4, 0), seq=4)]
    found = judged(w0, reader(), ROLLS_BACK, [DEATH, Death(1, 7.0, 8.0)])
    assert breaches(found) == [Breach.DOUBLED]


def test_a_level_that_takes_nothing_back_has_no_excuse() -> None:
    """The same deaths and reads are losses where nothing may be lost."""
    found = judged(survivor(1), reader(read(6.0, 3, holds(3, 0), holds(2, 0))), PROMISE, [DEATH])
    assert set(breaches(found)) == {Breach.OWN, Breach.LOST}


# --- lives ----------------------------------------------------------------------------------------


def half(missing: Content, seq: int = 4) -> list[Event]:
    """w0 dies with pushes 3 and 4 unacknowledged; `missing` is what its next life reads of shard 1.

    Shard 0 has both. That life makes push 5.
    """
    before = [*pushed(1, 1.0), *pushed(2, 2.0), Pushes(3.0, 3), Pushes(3.01, 4)]
    after = [read(6.0, 5, holds(4, 0), missing, seq=seq), *pushed(5, 7.0)]
    return [*life(*before), *life(*after, at=5.0, seq=seq, clock=4, number=2)]


def test_a_death_may_leave_its_last_pushes_at_some_shards() -> None:
    """What the next life finds missing of them stays missing, for whoever reads, and is no loss."""
    later = Content(3, (3, 0), (sum_to(2) + mark(5, 2), 0))
    others = [
        read(4.0, 4, holds(4, 0), holds(2, 0)),
        read(5.5, 4, holds(4, 0), holds(2, 0)),  # the next life may have begun
        read(8.0, 5, holds(5, 0, marks=(sum_to(4) + mark(5, 2), 0)), later),
    ]
    found = judged(half(holds(2, 0)), reader(*others), PROMISE._replace(bound=None))
    assert not found.findings
    assert found.lacking == {(0, 0): (0, 0), (1, 0): (2, mark(3, 1) + mark(4, 1))}


@pytest.mark.parametrize(
    ("missing", "breach"),
    [
        pytest.param(holds(1, 0), Breach.LOST, id="one that was acknowledged"),
        pytest.param(
            Content(3, (3, 0), (sum_to(2) + mark(4, 1), 0)),
            Breach.DOUBLED,
            id="one before the last",
        ),
        pytest.param(holds(5, 0), Breach.DOUBLED, id="one that nobody sent"),
    ],
)
def test_a_death_leaves_no_other_pushes_out(missing: Content, breach: Breach) -> None:
    """Neither may an acknowledged push be missing, nor one before another that is there."""
    found = judged(half(missing), reader(), PROMISE._replace(bound=None))
    assert breach in breaches(found)


def test_what_a_shard_lacks_of_a_former_life_is_not_completed() -> None:
    """A push that the next life makes under the number of a half one shows as one too many."""
    shards = holds(5, 0, marks=(sum_to(4) + mark(5, 2), 0)), holds(4, 0)
    both = [*half(holds(2, 0)), read(8.0, 6, *shards, seq=5)]
    found = judged(both, reader(), PROMISE._replace(bound=None))
    assert Breach.DOUBLED in breaches(found)


def test_a_push_of_a_former_life_in_place_of_the_present_ones_is_found() -> None:
    """Push 4 of the first life is at shard 0 alone, and the next life makes its own push 4.

    Shard 0 acknowledges that as a duplicate: the counts of both shards agree, and the marks do not.
    """
    before = [*pushed(1, 1.0), *pushed(2, 2.0), *pushed(3, 3.0), Pushes(4.0, 4)]
    w0 = [*life(*before), *life(*pushed(4, 7.0), at=5.0, seq=3, clock=3, number=2)]
    first, second = sum_to(4), sum_to(3) + mark(4, 2)
    begins = read(6.0, 4, holds(3, 0), holds(3, 0), seq=3)
    after = read(8.0, 4, holds(4, 0, marks=(first, 0)), holds(4, 0, marks=(second, 0)), seq=4)
    found = judged([*w0[:-2], begins, *w0[-2:], after], reader(), PROMISE._replace(bound=None))
    assert set(breaches(found)) == {Breach.DOUBLED}
    assert all("shard 0" in finding.text for finding in found.findings)


# --- journals -------------------------------------------------------------------------------------


def test_a_journal_is_read_as_it_was_written(tmp_path: Path) -> None:
    """But for a last line that its writer's death cut off."""
    events: list[Event] = [*life(*FOUR), read(5.0, 4, holds(4, 0), holds(4, 0)), Leaves(6.0)]
    journal = Journal(tmp_path, "w0")
    for event in events:
        journal.write(event)
    journal.close()
    with (tmp_path / "w0.journal").open("a") as file:
        file.write('{"type":"Leav')
    assert read_journal(tmp_path, "w0") == events
    assert read_journal(tmp_path, "w1") == []


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_weights_show_what_each_shard_holds(shards: int) -> None:
    """Counts and marks by worker, whatever key a shard begins at; one odd float is a torn shard."""
    table = table_for(3, 1000)
    shard_map = cut_evenly(Layout((table,)), shards)
    weights, push = np.zeros(table.size, np.float32), table.empty()
    for worker, seq in [(0, 1), (0, 2), (2, 1)]:
        gradient(push, worker, 3, seq, 1)
        weights -= push
    whole = Content(3, (2, 0, 1), (mark(1, 1) + mark(2, 1), 0, mark(1, 1)))
    assert contents(weights, [3] * shards, shard_map, 3) == (whole,) * shards
    weights[-1] += 1.0
    *others, last = contents(weights, [3] * shards, shard_map, 3)
    assert (others, last.torn) == ([whole] * (shards - 1), True)
