"""What the SDK adds to the data path: steps, several tables, readers of asyncio.

    python tests/bench/bench_sdk.py [--updates 2000] [--rounds 5]

A job in a process of this machine and one worker. Contenders take turns in short runs, in random
order, and each figure is a median over the rounds; beside wall time stands the CPU time of worker
and shards. The strategies' cost at the worker is measured by bench_strategies.py.
"""

import argparse
import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import psutil

import ps
from tests.bench.loops import UpdateCost, measure_update, median_cost
from tests.bench.report import Goal, goals, save

STEP_US = 30.0
TABLES = 1.3
READERS = 1000


def in_turn(
    cases: dict[str, tuple[Callable[[], object], int]], rounds: int
) -> dict[str, UpdateCost]:
    """Each case's cost: the median over rounds, in each of which all take turns."""
    children = psutil.Process().children(recursive=True)
    found: dict[str, list[UpdateCost]] = defaultdict(list)
    dice = random.Random(7)
    for update, updates in cases.values():
        measure_update(update, updates=max(10, updates // 10))  # warm
    for _ in range(rounds):
        for name in dice.sample(list(cases), len(cases)):
            update, updates = cases[name]
            found[name].append(measure_update(update, children, updates=updates))
    return {name: median_cost(costs) for name, costs in found.items()}


def steps(updates: int, rounds: int) -> dict[str, UpdateCost]:
    """Steps of 10 k floats, and a pull and a push of the client below, by one worker in turn.

    One step pushes an array of the user's, and one fills that of `step.gradients`.
    """
    params = {"w": np.zeros((100, 100), np.float32)}
    with ps.start(params) as job, job.worker("w0") as me:
        gradient = {"w": np.zeros((100, 100), np.float32)}
        client = me.client

        def step() -> None:
            with me.step() as step:
                step.pull()
                step.push(gradient)

        def filled() -> None:
            with me.step() as step:
                step.pull()
                step.gradients()["w"][:] = 0

        def plain() -> None:
            client.pull()
            filled = client.new_gradient(zeroed=False)
            filled[:] = 0
            client.push(filled)

        cases = {"step": step, "filled step": filled, "pull and push": plain}
        return in_turn({name: (update, updates) for name, update in cases.items()}, rounds)


def tables(updates: int, rounds: int) -> dict[str, UpdateCost]:
    """Ten tables of 100 k floats, and one of a million, by steps that fill gradients in place."""
    with ExitStack() as stack:
        cases: dict[str, tuple[Callable[[], object], int]] = {}
        for count in (10, 1):
            zeros = np.zeros(1_000_000 // count, np.float32)
            described = ps.Tables({f"t{n}": ps.Dense.like({"w": zeros}) for n in range(count)})
            job = stack.enter_context(ps.start(described))
            me = stack.enter_context(job.worker("w0"))
            cases[f"{count} tables"] = (filled_step(me, list(described)), updates)
        return in_turn(cases, rounds)


def filled_step(me: ps.Worker, names: list[str]) -> Callable[[], None]:
    """A step that pulls and pushes all tables."""

    def update() -> None:
        with me.step() as step:
            for name in names:
                step.pull(name)
                step.gradients(name)["w"][0] = 1

    return update


def readers(reads: int) -> dict[str, float]:
    """Concurrent coroutines that read 10 k floats from two shards: milliseconds, reads a second."""

    async def read(job: Any) -> list[float]:
        async with ps.aio.reader(job) as reader:

            async def one() -> list[float]:
                took = []
                for _ in range(reads):
                    started = time.perf_counter()
                    await reader.pull()
                    took.append(time.perf_counter() - started)
                return took

            each = await asyncio.gather(*(one() for _ in range(READERS)))
            return [seconds for took in each for seconds in took]

    with ps.start({"w": np.zeros(10_000, np.float32)}, shards=2) as job:
        started = time.perf_counter()
        took = asyncio.run(read(job))
        seconds = time.perf_counter() - started
    return {
        "p50_ms": 1e3 * float(np.quantile(took, 0.5)),
        "p99_ms": 1e3 * float(np.quantile(took, 0.99)),
        "reads_s": len(took) / seconds,
    }


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--updates", type=int, default=2000)
    options.add_argument("--rounds", type=int, default=5)
    given = options.parse_args()
    found = {
        **steps(given.updates, given.rounds),
        **tables(max(20, given.updates // 20), given.rounds),
    }
    print(f"{'an update':16}{'wall us':>10}{'CPU us':>10}")
    for name, spent in found.items():
        print(f"{name:16}{spent.wall_us:10.0f}{spent.cpu_us:10.0f}")
    served = readers(5)
    print(
        f"{READERS} readers: " + ", ".join(f"{name} {value:.4g}" for name, value in served.items())
    )
    print(save("sdk", {**{name: one._asdict() for name, one in found.items()}, "readers": served}))
    plain_us = found["pull and push"].wall_us
    ratio = found["10 tables"].wall_us / found["1 tables"].wall_us
    goals(
        [
            Goal("a step, added to pull + push", found["step"].wall_us - plain_us, STEP_US, "us"),
            Goal("a filled step, added", found["filled step"].wall_us - plain_us, STEP_US, "us"),
            Goal("10 tables of 100 k against one of 1 M", ratio, TABLES),
        ]
    )


if __name__ == "__main__":
    main()
