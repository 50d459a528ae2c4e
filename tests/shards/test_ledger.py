"""The ledger: which workers are known, which pushes are applied, and which clocks count."""

from math import inf, nan

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shards.errors import Fenced, Gap, Resynchronise
from shards.ledger import Ledger, LedgerEntry, Verdict
from shards.messages import FromWorker, Join, Leave, Pull, Push, Renew
from shards.shard_status import Standing


def ledger_of(**clocks: int) -> Ledger:
    """A ledger in which each of these workers has joined at its clock."""
    ledger = Ledger()
    for worker in clocks:
        ledger.greet(worker, 0, 10.0)
        ledger.join(worker, 0)
    for worker, clock in clocks.items():
        ledger.advance(worker, clock)
    return ledger


def renew(worker: str, incarnation: int = 0) -> Renew:
    return Renew(1, "job", worker, incarnation, 1)


# --- exactly once ---------------------------------------------------------------------------------


def test_only_the_next_push_is_applied() -> None:
    """last + 1 is applied; anything before it is a duplicate; anything after it a gap."""
    ledger = ledger_of(w=0)
    assert ledger.judge("w", 1) is Verdict.APPLY
    assert ledger.judge("w", 0) is Verdict.DUPLICATE
    with pytest.raises(Gap, match="worker w: expected push 1, got 2") as caught:
        ledger.judge("w", 2)
    assert caught.value.expected == 1
    ledger.record("w", 1, clock=1, step=1, loss=0.5)
    assert ledger.judge("w", 1) is Verdict.DUPLICATE
    assert ledger.judge("w", 2) is Verdict.APPLY


def test_a_newer_life_fences_the_older() -> None:
    """A higher incarnation takes over the name and its seq; the lower one is refused for ever."""
    ledger = ledger_of(w=0)
    ledger.record("w", 1, clock=1, step=1, loss=0.5)
    entry = ledger.greet("w", 3, 10.0)
    assert (entry.seq, entry.step, entry.takeovers) == (1, 1, 1)
    assert entry.standing is Standing.KNOWN
    for late in (renew("w", 0), renew("w", 2)):
        with pytest.raises(Fenced, match=r"worker w: incarnation 3 has taken over from [02]"):
            ledger.identify(late, 20.0)
    with pytest.raises(Fenced):
        ledger.greet("w", 2, 20.0)
    assert entry.lease_until == 10.0


def test_a_takeover_is_counted_when_a_life_was_lost() -> None:
    """A life that had left in order, as in a resumed job, is not counted as lost."""
    ledger = ledger_of(a=0, b=0, c=0)
    ledger.leave("a")
    ledger.expire(ledger.silent(10.0))
    assert [ledger.greet(worker, 1, 20.0).takeovers for worker in "abc"] == [0, 1, 1]
    ledger.detach_workers()
    assert [ledger.greet(worker, 2, 20.0).takeovers for worker in "abc"] == [0, 1, 1]


@pytest.mark.parametrize(
    ("standing", "message", "answer"),
    [
        (Standing.ACTIVE, Pull, None),
        (Standing.ACTIVE, Push, None),
        (Standing.KNOWN, Join, None),
        (Standing.KNOWN, Leave, None),
        (Standing.KNOWN, Pull, "worker w has not joined this shard"),
        (Standing.KNOWN, Push, "worker w has not joined this shard"),
        (Standing.LEFT, Leave, None),
        (Standing.LEFT, Join, "worker w has left this shard"),
        (Standing.LEFT, Pull, "worker w has left this shard"),
        (Standing.LEFT, Push, "worker w has left this shard"),
        (Standing.LEFT, Renew, "worker w has left this shard"),
        (Standing.EXPIRED, Leave, "worker w: the lease ran out at step 0"),
        (Standing.EXPIRED, Renew, "worker w: the lease ran out at step 0"),
    ],
)
def test_which_messages_a_standing_allows(
    standing: Standing, message: type[FromWorker], answer: str | None
) -> None:
    """A late copy of a message from before a departure is refused, and changes nothing."""
    said: dict[type[FromWorker], FromWorker] = {
        Join: Join(1, "job", "w", 0, 1, 0),
        Pull: Pull(1, "job", "w", 0, 1, 1, 0, []),
        Push: Push(1, "job", "w", 0, 1, 1, 1, 1, 1, 1, 1, 0, [], 0, 0, 0),
        Leave: Leave(1, "job", "w", 0, 1),
        Renew: renew("w"),
    }
    ledger = Ledger({"w": LedgerEntry(0, standing=standing, lease_until=5.0)})
    if answer is None:
        assert ledger.identify(said[message], 9.0).lease_until == 9.0
    else:
        with pytest.raises(Resynchronise, match=answer):
            ledger.identify(said[message], 9.0)
        assert ledger.entries["w"] == LedgerEntry(0, standing=standing, lease_until=5.0)


def test_a_stranger_must_say_hello() -> None:
    """No worker is known before a Hello, and no incarnation before its own."""
    for stranger in (renew("x"), renew("w", 1)):
        with pytest.raises(Resynchronise, match="has not said hello to this shard"):
            ledger_of(w=0).identify(stranger, 1.0)


def test_a_loss_without_a_number_is_not_kept() -> None:
    """A snapshot is JSON, which knows neither infinity nor NaN: the last finite loss stays."""
    ledger = ledger_of(w=0)
    for seq, loss in enumerate([0.5, inf, nan], start=1):
        ledger.record("w", seq, clock=seq, step=seq, loss=loss)
    assert ledger.entries["w"].loss == 0.5


# --- clocks ---------------------------------------------------------------------------------------


def test_the_slowest_registered_clock() -> None:
    """Only workers that have joined count; one that leaves or expires holds back no other."""
    ledger = ledger_of(a=3, b=5, c=9)
    ledger.greet("d", 0, 10.0)
    assert (ledger.min_clock, ledger.clock_gap) == (3, 6)
    ledger.leave("a")
    assert (ledger.min_clock, ledger.clock_gap) == (5, 4)
    ledger.identify(renew("c"), 12.0)
    assert ledger.silent(11.0) == ["b", "d"]
    ledger.expire(["b", "d"])
    assert ledger.silent(11.0) == []
    assert (ledger.active, ledger.min_clock, ledger.clock_gap) == (["c"], 9, 0)
    ledger.leave("c")
    assert (ledger.min_clock, ledger.clock_gap) == (None, 0)


def test_a_latecomer_starts_at_the_slowest_clock() -> None:
    """It holds back no running worker; if it names a later clock itself, it starts there."""
    ledger = ledger_of(a=3, b=5)
    for worker, word, clock in (("late", 0, 3), ("later", 4, 4)):
        ledger.greet(worker, 0, 10.0)
        assert ledger.join(worker, word) == clock
    assert ledger.min_clock == 3


def test_the_slowest_clock_never_goes_back() -> None:
    """Two workers that return one after the other, when none is left, start at one clock.

    Without a floor the first to return would count from its own old clock, and the other, which had
    run alone, would be 97 steps ahead of it: far more than any bound.
    """
    ledger = ledger_of(slow=3, fast=4)
    ledger.identify(renew("fast"), 99.0)
    ledger.expire(ledger.silent(10.0))
    ledger.advance("fast", 100)
    ledger.expire(ledger.silent(99.0))
    assert ledger.active == []
    for worker in ("slow", "fast"):
        ledger.greet(worker, 0, 200.0)
        assert ledger.join(worker, 0) == 100
    assert ledger.clock_gap == 0


def test_leases_that_run_out_together_end_at_one_moment() -> None:
    """In whatever order they are named, none of them counts alone in between: the slowest clock
    stays the same if no worker is left, otherwise it is that of the remaining ones.
    """
    for names in (["slow", "fast"], ["fast", "slow"]):
        ledger = ledger_of(slow=3, fast=40)
        ledger.expire(names)
        assert (ledger.active, ledger.floor) == ([], 3)
        ledger = ledger_of(slow=3, fast=40, last=7)
        ledger.expire(names)
        assert (ledger.active, ledger.floor) == (["last"], 7)


def test_clocks_only_rise() -> None:
    """Neither a late push nor a push of a worker that was put ahead lowers its clock."""
    ledger = ledger_of(w=7)
    ledger.record("w", 1, clock=5, step=1, loss=0.0)
    assert (ledger.entries["w"].clock, ledger.entries["w"].step) == (7, 1)


class Life(RuleBasedStateMachine):
    """Three workers come, push, fall silent, leave and are replaced, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.now = 0.0
        self.applied = dict.fromkeys("abc", 0)
        self.lives = dict.fromkeys("abc", 0)
        self.floor = 0

    workers = st.sampled_from("abc")

    @rule(worker=workers, older=st.integers(-1, 2))
    def hello(self, worker: str, older: int) -> None:
        incarnation = max(0, self.lives[worker] + older)
        try:
            entry = self.ledger.greet(worker, incarnation, self.now + 10)
        except Fenced:
            assert incarnation < self.lives[worker]
            return
        assert incarnation >= self.lives[worker]
        assert entry.seq == self.applied[worker]
        self.lives[worker] = incarnation

    @precondition(lambda self: self.ledger.entries)
    @rule(worker=workers, clock=st.integers(0, 6))
    def join(self, worker: str, clock: int) -> None:
        if self._may(Join(1, "job", worker, self.lives[worker], 1, clock)):
            assert self.ledger.join(worker, clock) >= max(clock, self.floor)

    @precondition(lambda self: self.ledger.active)
    @rule(worker=workers, ahead=st.integers(-2, 2))
    def push(self, worker: str, ahead: int) -> None:
        if not self._may(Pull(1, "job", worker, self.lives[worker], 1, 1, 0, [])):
            return
        entry, seq = self.ledger.entries[worker], max(0, self.applied[worker] + ahead)
        try:
            verdict = self.ledger.judge(worker, seq)
        except Gap:
            assert seq > self.applied[worker] + 1, "a gap where there is none"
            return
        assert (verdict is Verdict.APPLY) == (seq == self.applied[worker] + 1)
        if verdict is Verdict.APPLY:
            self.ledger.record(worker, seq, entry.clock + 1, seq, 0.0)
            self.applied[worker] = seq

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        if self._may(Leave(1, "job", worker, self.lives[worker], 1)):
            self.ledger.leave(worker)

    @rule(seconds=st.sampled_from([1.0, 4.0, 11.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        silent = self.ledger.silent(self.now)
        self.ledger.expire(silent)
        for worker in silent:
            assert self.ledger.entries[worker].lease_until <= self.now

    def _may(self, message: FromWorker) -> bool:
        try:
            self.ledger.identify(message, self.now + 10)
        except Resynchronise:
            entry = self.ledger.entries.get(message.worker)
            assert entry is None or entry.standing is not Standing.ACTIVE
            return False
        return True

    @invariant()
    def the_slowest_clock_rises(self) -> None:
        slowest = self.ledger.min_clock
        assert slowest is None or slowest >= self.floor
        self.floor = self.floor if slowest is None else slowest

    @invariant()
    def pushes_are_counted(self) -> None:
        for worker, entry in self.ledger.entries.items():
            assert entry.seq == self.applied[worker]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=60, stateful_step_count=40)
