"""How kernels are timed against each other.

Every contender enters twice, so that the difference between its two medians shows what the clock is
worth (A/A). Rounds visit all entries in a freshly shuffled order; before each, the L2 cache is
overwritten. Times are CUDA events' around one run; medians are reported with the tenth and the
ninetieth percentile. Quality of kernels is compared by graph replay on both sides; what a user
waits for, by host time around a synchronised step.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from tests.bench.report import Goal
from tests.gpu.ground import GpuGround, Ground, Run

ROUNDS = 40
_LONGEST_S = 6.0  # of one race


@dataclass(frozen=True)
class Entry:
    """One contender, run `repeats` times for one time.

    It is replayed as a CUDA graph, captured by whom `graph` says, or run as it is without one;
    `host` has it timed by the host's clock, up to its end.
    """

    name: str
    run: Run
    graph: Literal["ours", "torch"] | None = "ours"
    host: bool = False
    repeats: int = 1


@dataclass(frozen=True)
class Times:
    """Seconds of one run; `again` is the median of the same contender's second entry."""

    median: float
    p10: float
    p90: float
    again: float


@dataclass(frozen=True)
class Race:
    """Contenders with one job, and what their times say about the goals."""

    name: str
    entries: list[Entry]
    judge: "Judge"
    flush: bool = True
    notes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches: bytes a second of a device copy, read and written together."""

    bandwidth: float


Races = Callable[[Ground], Iterator[Race]]
Judge = Callable[[dict[str, Times], Ceilings], list[Goal]]


def run(ground: GpuGround, race: Race, rounds: int = ROUNDS) -> dict[str, Times]:
    """Time every entry of a race."""
    ground.settle()
    with ground.stream():
        prepared = {entry.name: _prepared(ground, entry) for entry in race.entries}
        slots = [(entry, twin) for entry in race.entries for twin in (0, 1)]
        taken: dict[tuple[str, int], list[float]] = {(e.name, twin): [] for e, twin in slots}
        dice, started = random.Random(race.name), time.monotonic()
        for number in range(rounds + 2):
            dice.shuffle(slots)
            for entry, twin in slots:
                if race.flush:
                    ground.flush()
                seconds = _once(ground, entry, prepared[entry.name])
                if number >= 2:  # the first rounds warm up
                    taken[entry.name, twin].append(seconds / entry.repeats)
            if time.monotonic() - started > _LONGEST_S and number >= 6:
                break
    return {e.name: _times(taken[e.name, 0], taken[e.name, 1]) for e in race.entries}


def rehearse(ground: Ground, race: Race) -> None:
    """Run every entry once, untimed."""
    for entry in race.entries:
        entry.run()


def _prepared(ground: GpuGround, entry: Entry) -> Run:
    for _ in range(3):
        entry.run()
    ground.main.synchronize()

    def repeated() -> None:
        for _ in range(entry.repeats):
            entry.run()

    match entry.graph:
        case "ours":
            return ground.captured(repeated)
        case "torch":
            return ground.captured_by_torch(repeated)
        case None:
            return repeated


def _once(ground: GpuGround, entry: Entry, prepared: Run) -> float:
    if not entry.host:
        return ground.seconds(prepared)
    ground.main.synchronize()
    started = time.perf_counter()
    prepared()
    ground.main.synchronize()
    return time.perf_counter() - started


def _times(first: list[float], second: list[float]) -> Times:
    low, middle, high = np.percentile(first, [10, 50, 90])
    return Times(float(middle), float(low), float(high), float(np.median(second)))


def share_of_bandwidth(
    name: str, bytes_moved: float, target: float
) -> Callable[[dict[str, Times], Ceilings], Goal]:
    """A goal: `bytes_moved` over the time of `name`, against the measured copy bandwidth."""

    def judged(times: dict[str, Times], ceilings: Ceilings) -> Goal:
        share = bytes_moved / times[name].median / ceilings.bandwidth
        return Goal(f"{name}: share of copy bandwidth", share, target, "", at_least=True)

    return judged


def faster(ours: str, theirs: str, target: float) -> Callable[[dict[str, Times]], list[Goal]]:
    """A goal: how many times faster `ours` is; none where `theirs` did not run."""

    def judged(times: dict[str, Times]) -> list[Goal]:
        if theirs not in times:
            return []
        ratio = times[theirs].median / times[ours].median
        return [Goal(f"{ours} against {theirs}", ratio, target, "x", at_least=True)]

    return judged


def both(
    goal: Callable[[dict[str, Times], Ceilings], Goal] | None,
    race: Callable[[dict[str, Times]], list[Goal]],
) -> Judge:
    """A goal against the device's ceiling, if there is one, and one against a contender."""

    def judged(times: dict[str, Times], ceilings: Ceilings) -> list[Goal]:
        first = [] if goal is None else [goal(times, ceilings)]
        return first + race(times)

    return judged
