"""What every single read proves: untorn, nothing lost or twice, and how far it was behind.

The weights say for each shard and worker how many pushes they hold, and which (record.py). The
workers' journals say when each push was sent and acknowledged and when each read was asked for and
answered (journal.py). Nothing is known of the moment in between at which a shard answered. So the
oracle accuses only where every such moment would be wrong:

- *untorn*: all keys of a shard agree, and a worker's pushes add up to the shard's version.
- *nothing twice, nothing made up*: a shard holds at most what was sent before the answer came, each
  push once and none in place of another, nor in place of a former life's push of that number.
- *nothing lost*: it holds at least what was acknowledged before the read was asked for. A copy that
  was replaced without its knowledge may still answer those that do not know it either
  (docs/explanation/durability.md). So of replicated shards this is asked of a worker's own pushes
  alone.
- *own writes*: it holds all that the reader had pushed and heard acknowledged.
- *monotonic*: what a worker reads never gets older.
- *not beyond the bound*: a read for the step at clock c under bound s holds, shard by shard,
  everything that each worker who counts had pushed up to clock c - s. What a shard holds of a
  worker says at which clock that worker really stands there; `lack` is c minus that clock. No
  counter of the shards is asked.

A worker counts for certain from when its life is registered everywhere until its lease could have
run out: every answered request is a sign of life from when it was asked for. It may count for
longer, and nobody is accused then. It counts no more from when its next life begins or it leaves,
and may not count from when the job begins to move until the new shards have answered it.

A worker that dies may leave its last pushes at some shards only. Its next life begins after the
last that any shard has, and the others never get theirs. What a shard lacks in this way is measured
by the next life's own reads, must not change during that life, and is at most what the former life
had sent and not heard acknowledged.

A shard at level `memory` that dies goes back to its last save, and its workers then number on from
what they had reached. Between two of its deaths what it lacks of a worker's numbers stays the same:
that difference is measured by the worker's own reads, must not change, and only grows from one
death to the next. What it grows by is what the death took back.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from math import inf
from typing import NamedTuple

from tests.chaos.journal import Acked, Began, Content, Event, Leaves, Pushes, Reads, Ready
from tests.chaos.record import LifeStart, marks_to

GRACE_S = 5.0
"""What a save, and the wait for a core to write it on, may add to the time between two saves."""
_SURE = 0.9  # of a lease: what a shard's clock and the last message's way may take off it


class Breach(StrEnum):
    """What a read may prove wrong."""

    TORN = "torn"
    DOUBLED = "counted twice, or never sent"
    LOST = "acknowledged and lost"
    OWN = "own push not in it"
    OLDER = "older than the read before"
    LACKS = "further behind than the bound allows"
    TAKEN_BACK = "a death took back more than it may"


class Finding(NamedTuple):
    """One thing that is wrong with one read."""

    breach: Breach
    text: str

    def __str__(self) -> str:
        return f"{self.breach}: {self.text}"


class Death(NamedTuple):
    """A shard was killed: it lived until `before`, and was gone at `after`."""

    shard: int
    before: float
    after: float


class Stop(NamedTuple):
    """A shard was stopped between these times, and neither served nor saved."""

    shard: int
    since: float
    until: float

    def within(self, begin: float, end: float) -> float:
        """How many seconds of that time."""
        return max(0.0, min(self.until, end) - max(self.since, begin))


class Move(NamedTuple):
    """The job moved to other shards between these times."""

    before: float
    after: float


class Promise(NamedTuple):
    """What a level promises its readers.

    `bound` is the staleness bound, None for none; `rollback_s` how much a death may take back, None
    where it may take nothing; `one_copy` whether each shard has a single copy.
    """

    bound: int | None
    lease_s: float
    rollback_s: float | None = None
    one_copy: bool = True


class Found(NamedTuple):
    """What all reads came to.

    `judged` counts, over reads, shards and workers, how often the bound could be judged, and
    `behind` the largest lack among those. `taken_back_s` is the age of the oldest push that a death
    took back, without the time that its shard was stopped. `lacking` is what each shard lacks in
    the end for good of each worker: how many pushes, and their marks.
    """

    reads: int
    judged: int
    behind: int
    taken_back_s: float
    findings: tuple[Finding, ...]
    lacking: Mapping[tuple[int, int], tuple[int, int]]

    def count(self, breach: Breach) -> int:
        return sum(finding.breach is breach for finding in self.findings)


class _Times:
    """Numbers that were reached at times: the largest that was reached before a moment."""

    def __init__(self, reached: Iterable[tuple[float, int]]) -> None:
        self.at: list[float] = []
        self.seqs: list[int] = []
        for at, seq in reached:
            if not self.seqs or seq > self.seqs[-1]:
                self.at.append(at)
                self.seqs.append(seq)

    def before(self, moment: float) -> int:
        index = bisect_left(self.at, moment)
        return self.seqs[index - 1] if index else 0

    def when(self, seq: int) -> float | None:
        """When it was reached; None if it never was."""
        index = bisect_left(self.seqs, seq)
        return self.at[index] if index < len(self.at) else None


class _Stint(NamedTuple):
    """Between these times a life counts for certain, at every shard."""

    since: float
    until: float
    life: "_Life"


class _Life:
    """One life of a worker: where it began to count, and the clocks that its pushes reached."""

    def __init__(self, events: Sequence[Event], ends: float, lease_s: float) -> None:
        self.ready = next(event for event in events if isinstance(event, Ready))
        self.began = next(event.at for event in events if isinstance(event, Began))
        self._acked = [event for event in events if isinstance(event, Acked)]
        self._seqs = [event.seq for event in self._acked]
        left = next((event.at for event in events if isinstance(event, Leaves)), ends)
        answered = [(e.asked, e.at) for e in events if isinstance(e, Reads | Acked)]
        self.stints = list(self._stints([(self.began, self.ready.at), *answered], left, lease_s))

    def clock_at(self, seq: int) -> int | None:
        """The clock at which it stands where all its pushes up to `seq` are; None if unknown."""
        clocks = [self.ready.clock] if seq <= self.ready.seq else []
        for wanted in (seq, seq + 1):  # it may be put ahead between the two
            index = bisect_left(self._seqs, wanted)
            if wanted > self.ready.seq and index < len(self._acked):
                acked = self._acked[index]
                clocks.append(acked.clock - (acked.seq - seq))
        return max(clocks, default=None)

    def _stints(
        self, answered: Sequence[tuple[float, float]], ends: float, lease_s: float
    ) -> Iterator[_Stint]:
        since, until = answered[0][1], answered[0][0] + _SURE * lease_s
        for asked, at in answered[1:]:
            if at >= until:
                yield _Stint(since, min(until, ends), self)
                since = at
            until = asked + _SURE * lease_s
        yield _Stint(since, min(until, ends), self)


class _Worker:
    """What one worker's journal says."""

    def __init__(self, name: str, events: Sequence[Event], lease_s: float) -> None:
        self.name = name
        self.sent = _Times((e.at, e.seq) for e in events if isinstance(e, Pushes))
        self.acked = _Times((e.at, e.seq) for e in events if isinstance(e, Acked))
        self.reads = [event for event in events if isinstance(event, Reads)]
        self.lives = list(_lives(events, lease_s))
        self._answered = [(e.asked, e.at) for e in events if isinstance(e, Reads | Acked)]
        self._stints = [stint for life in self.lives for stint in life.stints]
        self._since = [stint.since for stint in self._stints]
        self._began = [life.began for life in self.lives]
        self._starts = [LifeStart(life.ready.seq, life.ready.life) for life in self.lives]

    def life_at(self, moment: float) -> int:
        """The number of the life that may count at a moment, from 0."""
        return max(0, bisect_right(self._began, moment) - 1)

    def marks_to(self, last: int, life: int) -> int:
        """The marks of its pushes 1 to `last`, as its lives up to number `life` have made them."""
        return marks_to(last, self._starts[: life + 1])

    def counting(self, asked: float, at: float) -> _Life | None:
        """The life that counted for certain all the time between."""
        index = bisect_right(self._since, asked) - 1
        if index < 0 or self._stints[index].until < at:
            return None
        return self._stints[index].life

    def heard_since(self, moment: float) -> float:
        """When a request of its was answered that it had begun after that moment."""
        index = bisect_right(self._answered, (moment, inf))
        return self._answered[index][1] if index < len(self._answered) else inf


def _lives(events: Sequence[Event], lease_s: float) -> Iterator[_Life]:
    starts = [index for index, event in enumerate(events) if isinstance(event, Began)]
    for start, stop in pairwise([*starts, len(events)]):
        life = events[start:stop]
        ends = events[stop].at if stop < len(events) else inf
        if any(isinstance(event, Ready) for event in life):
            yield _Life(life, ends, lease_s)


class _Lag(NamedTuple):
    """What a shard lacks for good of a worker's pushes, as known `since` a certain read."""

    pushes: int
    marks: int
    since: float


_NO_LAG = _Lag(0, 0, -inf)


class _Held(NamedTuple):
    """A worker's pushes in one part of a read: the number of the last, and all their marks."""

    pushes: int
    marks: int


def judge_reads(
    journals: Mapping[str, Sequence[Event]],
    promise: Promise,
    deaths: Sequence[Death] = (),
    moves: Sequence[Move] = (),
    stops: Sequence[Stop] = (),
) -> Found:
    """Judge every read in the journals of these workers, which are in the order of their numbers.

    `deaths` and `stops` matter where shards roll back; `moves` where they do not.
    """
    return _Oracle(journals, promise, deaths, moves, stops).judge()


class _Oracle:
    def __init__(
        self,
        journals: Mapping[str, Sequence[Event]],
        promise: Promise,
        deaths: Sequence[Death],
        moves: Sequence[Move],
        stops: Sequence[Stop],
    ) -> None:
        self._promise = promise
        self._moves, self._stops = moves, stops
        self._workers = [
            _Worker(name, events, promise.lease_s) for name, events in journals.items()
        ]
        self._deaths: dict[int, list[Death]] = {}
        for death in deaths if promise.rollback_s is not None else ():
            self._deaths.setdefault(death.shard, []).append(death)
        self._findings: list[Finding] = []
        self._reads = self._judged = self._behind = 0
        self._taken_back_s = 0.0
        # By shard, number of the shard's deaths, worker, and number of the worker's life.
        self._lags: dict[tuple[int, int, int, int], _Lag] = {}

    def judge(self) -> Found:
        for number, worker in enumerate(self._workers):
            for read in worker.reads:
                self._measure(number, worker, read)
        self._judge_deaths()
        self._judge_lives()
        for number, worker in enumerate(self._workers):
            before: Reads | None = None
            for read in worker.reads:
                self._reads += 1
                self._judge_read(number, read)
                if before is not None:
                    self._judge_order(number, before, read)
                before = read
        return Found(
            self._reads,
            self._judged,
            self._behind,
            self._taken_back_s,
            tuple(self._findings),
            dict(self._lacking()),
        )

    def _lacking(self) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        for (shard, era, number, _), lag in sorted(self._lags.items()):
            if era == len(self._deaths.get(shard, ())):
                yield (shard, number), lag[:2]

    # --- deaths that take something back ----------------------------------------------------------

    def _era(self, shard: int, read: Reads) -> int | None:
        """After how many of its deaths the shard answered this; None if it may have died then."""
        deaths = self._deaths.get(shard, ())
        era = sum(death.after < read.asked for death in deaths)
        over = sum(death.before < read.at for death in deaths)
        return era if era == over else None

    def _measure(self, number: int, worker: _Worker, read: Reads) -> None:
        """Compare a reader's own numbers, all of which it holds, with what the shards count."""
        life = worker.life_at(read.asked)
        if not self._deaths and not life:
            return
        for shard, content in enumerate(read.shards):
            era = self._era(shard, read)
            if era is None or content.torn:
                continue
            pushes = read.seq - content.counts[number]
            lag = _Lag(pushes, worker.marks_to(read.seq, life) - content.marks[number], read.at)
            first = lag if era or life else _NO_LAG
            known = self._lags.setdefault((shard, era, number, life), first)
            if known[:2] != lag[:2]:
                breach = Breach.LOST if pushes > known.pushes else Breach.DOUBLED
                text = f"shard {shard} held {known.pushes} fewer than {worker.name} numbers"
                text = f"{text} (marks {known.marks}), now {pushes} ({lag.marks}), and did not die"
                self._accuse(breach, text, number, read)

    def _judge_deaths(self) -> None:
        assert not self._deaths or self._promise.rollback_s is not None
        for shard, deaths in self._deaths.items():
            for number, worker in enumerate(self._workers):
                lacked = 0
                for era, lags in self._by_era(shard, number):
                    if era:
                        self._judge_death(deaths[era - 1], worker, lags[0].pushes - lacked)
                    lacked = lags[-1].pushes

    def _by_era(self, shard: int, number: int) -> Iterator[tuple[int, list[_Lag]]]:
        """What a shard lacked of a worker after each number of its deaths, life after life."""
        eras: dict[int, list[_Lag]] = {}
        for (at, era, other, _), lag in sorted(self._lags.items()):
            if (at, other) == (shard, number):
                eras.setdefault(era, []).append(lag)
        yield from eras.items()

    def _judge_lives(self) -> None:
        """What a life finds missing at a shard was not acknowledged to the life before."""
        for (shard, era, number, life), lag in sorted(self._lags.items()):
            worker = self._workers[number]
            before = self._lags.get((shard, era, number, life - 1), None if era else _NO_LAG)
            if not life or before is None:
                continue
            began = worker.lives[life].ready
            lost, marks = lag.pushes - before.pushes, lag.marks - before.marks
            expected = worker.marks_to(began.seq, life) - worker.marks_to(began.seq - lost, life)
            text = f"shard {shard}: a life of {worker.name} begins after push {began.seq}"
            if lost > began.seq - worker.acked.before(began.at):
                text = f"{text} and finds {lost} missing, more than were not acknowledged"
                self._findings.append(Finding(Breach.LOST, text))
            elif lost < 0 or marks != expected:
                text = f"{text}, of which the last {lost} with marks {marks} are missing"
                self._findings.append(Finding(Breach.DOUBLED, text))

    def _judge_death(self, death: Death, worker: _Worker, lost: int) -> None:
        where = f"death of shard {death.shard} at {death.before:.3f} s"
        if lost < 0:
            text = f"{where}: {-lost} pushes of {worker.name} more than before"
            self._findings.append(Finding(Breach.DOUBLED, text))
        if lost <= 0:
            return
        # Up to its last push, at most: the oldest that it can have lost is no older than this one.
        oldest = worker.sent.before(death.before) - lost + 1
        acked_at = worker.acked.when(oldest)
        age_s = 0.0
        if acked_at is not None:
            stops = [stop for stop in self._stops if stop.shard == death.shard]
            stopped_s = sum([stop.within(acked_at, death.before) for stop in stops])
            age_s = max(0.0, death.before - acked_at - stopped_s)
        self._taken_back_s = max(self._taken_back_s, age_s)
        assert self._promise.rollback_s is not None
        if age_s > self._promise.rollback_s + GRACE_S:
            text = f"{where}: {lost} pushes of {worker.name}, the oldest acknowledged {age_s:.1f} s"
            self._findings.append(Finding(Breach.TAKEN_BACK, f"{text} before"))

    # --- reads ------------------------------------------------------------------------------------

    def _judge_read(self, reader: int, read: Reads) -> None:
        for shard, content in enumerate(read.shards):
            # Weights start at zero with version 0, and each applied push makes one version.
            if content.torn or sum(content.counts) != content.version:
                text = f"{sum(content.counts)} pushes at version {content.version}"
                self._accuse(Breach.TORN, f"shard {shard}: {text}", reader, read)
                continue
            for number in range(len(self._workers)):
                held = self._held(shard, number, content, read)
                if held is not None:
                    self._judge_pushes(shard, number, held, reader, read)
                    self._judge_lack(shard, number, held.pushes, reader, read)

    def _held(self, shard: int, number: int, content: Content, read: Reads) -> _Held | None:
        """What this part of a read holds of a worker, by the worker's own numbers, if known."""
        pushes, marks = content.counts[number], content.marks[number]
        worker, era = self._workers[number], self._era(shard, read)
        life = worker.life_at(read.at)
        lag = None if era is None else self._lags.get((shard, era, number, life))
        if era == 0 and life == 0:
            lag = _NO_LAG
        if lag is None or read.asked < lag.since:
            return None  # the shard may not have heard from that worker yet what it lacks
        return _Held(pushes + lag.pushes, marks + lag.marks)

    def _judge_pushes(self, shard: int, number: int, held: _Held, reader: int, read: Reads) -> None:
        other, seq = self._workers[number], held.pushes
        what = f"shard {shard}: push {seq} of {other.name}"
        sent, acked = other.sent.before(read.at), other.acked.before(read.asked)
        if seq > sent:
            self._accuse(Breach.DOUBLED, f"{what}, and {sent} were sent", reader, read)
        elif held.marks != (due := other.marks_to(seq, other.life_at(read.at))):
            self._accuse(Breach.DOUBLED, f"{what}: marks {held.marks}, not {due}", reader, read)
        if number == reader and seq < read.seq:
            self._accuse(Breach.OWN, f"{what}, and {read.seq} were acknowledged", reader, read)
        elif seq < acked and (number == reader or self._promise.one_copy):
            self._accuse(Breach.LOST, f"{what}, and {acked} were acknowledged", reader, read)

    def _judge_lack(self, shard: int, number: int, seq: int, reader: int, read: Reads) -> None:
        other, bound = self._workers[number], self._promise.bound
        if any(m.before < read.at and read.asked < other.heard_since(m.after) for m in self._moves):
            return  # the new shards may not have heard from it yet
        life = other.counting(read.asked, read.at)
        clock = None if life is None else life.clock_at(seq)
        if bound is None or clock is None:
            return
        self._judged += 1
        behind = read.clock - clock
        self._behind = max(self._behind, behind)
        if behind > bound:
            text = f"shard {shard}: at clock {read.clock}, and {other.name} stood at {clock} there"
            self._accuse(Breach.LACKS, f"{text}: {behind} behind, bound {bound}", reader, read)

    def _judge_order(self, reader: int, before: Reads, read: Reads) -> None:
        if before.epoch != read.epoch:
            return
        for shard, (old, new) in enumerate(zip(before.shards, read.shards, strict=True)):
            era = self._era(shard, read)
            if era is None or era != self._era(shard, before) or old.torn or new.torn:
                continue
            older = any(a > b for a, b in zip(old.counts, new.counts, strict=True))
            if older or old.version > new.version:
                text = f"shard {shard}: version {new.version} after {old.version}"
                self._accuse(Breach.OLDER, text, reader, read)

    def _accuse(self, breach: Breach, text: str, reader: int, read: Reads) -> None:
        where = f"{self._workers[reader].name}'s read of {read.asked:.3f} to {read.at:.3f} s"
        self._findings.append(Finding(breach, f"{where}: {text}"))
