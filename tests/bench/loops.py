"""How benchmarks compare loops: in short runs, in turn, each figure the median of its rounds.

A step is timed in this process; an update, which other processes share, by the CPU time of all.
"""

import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import psutil

Step = Callable[[], object]


class StepTime(NamedTuple):
    """Milliseconds of a step: wall time, and CPU time of this process."""

    wall: float
    cpu: float


class UpdateCost(NamedTuple):
    """Microseconds of an update: wall time, and CPU time of all its processes."""

    wall_us: float
    cpu_us: float


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU seconds that these processes have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure_update(
    update: Step,
    processes: Iterable[psutil.Process] = (),
    *,
    updates: float = math.inf,
    seconds: float = math.inf,
) -> UpdateCost:
    """Return the mean cost of an update over this many updates, or seconds.

    `processes` are those that work for the update besides this one.
    """
    watched = [psutil.Process(), *processes]
    before, started, done, elapsed_s = cpu_seconds(watched), time.perf_counter(), 0, 0.0
    while done < updates and elapsed_s < seconds:
        update()
        done += 1
        elapsed_s = time.perf_counter() - started
    return UpdateCost(1e6 * elapsed_s / done, 1e6 * (cpu_seconds(watched) - before) / done)


def median_cost(costs: Iterable[UpdateCost]) -> UpdateCost:
    """Return the median of each figure."""
    return UpdateCost(*(statistics.median(values) for values in zip(*costs, strict=True)))


def step_ms(step: Step, steps: int) -> StepTime:
    """What a step takes, the mean of `steps` of them."""
    started, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    took = time.perf_counter() - started, time.process_time() - used
    return StepTime(1e3 * took[0] / steps, 1e3 * took[1] / steps)


def rows_for(milliseconds: float, made: Callable[[int], Step], rows: int = 256) -> int:
    """The rows of which a step of `made(rows)` takes about so much CPU time."""
    step = made(rows)
    step_ms(step, 10)
    took = statistics.median(step_ms(step, 5).cpu for _ in range(5))
    return max(1, round(rows * milliseconds / took))


def in_turn(cases: Mapping[str, Step], steps: int, rounds: int) -> dict[str, StepTime]:
    """What a step of each takes; they take turns in random order."""
    found: dict[str, list[StepTime]] = defaultdict(list)
    dice = random.Random(7)
    for step in cases.values():
        step_ms(step, 10)  # warm
    for _ in range(rounds):
        for name in dice.sample(list(cases), len(cases)):
            found[name].append(step_ms(cases[name], steps))
    return {
        name: StepTime(*(statistics.median(each) for each in zip(*found[name], strict=True)))
        for name in cases
    }
