"""What a strategy costs a worker a step, besides the gradient, at the size of LeNet.

The step machine of each strategy runs without a network: pulls return the same weights, a gradient
is there at once. So the CPU time is that of the machine, the local step and the contribution, and
other processes hardly change it. Rounds of all strategies are interleaved, and each figure is the
median of its rounds.

    python tests/bench/bench_strategies.py [--rounds 9] [--steps 60]

The goal is about the loop itself: the machine with plain Downpour may take 1 % of LeNet's step of
20 ms, 200 microseconds.
"""

import argparse
import time
from statistics import median

import numpy as np
from msgspec.structs import replace
from threadpoolctl import threadpool_limits

from ps import DenseTable, TensorSpec
from shards.schedules import Fixed
from worker.strategies import STRATEGIES, Strategy
from worker.training import step_machine as machine
from worker.training.step_machine import Plan, StepMachine

FLOATS = 431_080
GOAL_US = 200.0
_WINDOW = {"h": 10, "window": 10, "tau": 10}
TABLE = DenseTable(
    "lenet",
    (
        TensorSpec("conv1", (20, 1, 5, 5)),
        TensorSpec("conv1.bias", (20,), lr_mult=2.0),
        TensorSpec("conv2", (50, 20, 5, 5)),
        TensorSpec("conv2.bias", (50,), lr_mult=2.0),
        TensorSpec("ip1", (500, 800)),
        TensorSpec("ip1.bias", (500,), lr_mult=2.0),
        TensorSpec("ip2", (10, 500)),
        TensorSpec("ip2.bias", (10,), lr_mult=2.0),
    ),
)


def strategies() -> dict[str, Strategy]:
    """Every strategy, with windows of ten steps."""
    found = {}
    for name, kind in STRATEGIES.items():
        known = {field: n for field, n in _WINDOW.items() if field in kind.__struct_fields__}
        found[name] = replace(kind(), **known).for_workers(8)
    return found


def step_us(strategy: Strategy, steps: int) -> float:
    """Microseconds a step of one run."""
    plan = Plan(steps=steps, seed=1, strategy=strategy, schedule=Fixed(base_rate=0.01))
    weights = TABLE.empty()
    weights.flags.writeable = False
    gradients = [np.full(TABLE.size, 1e-3, np.float32) for _ in range(4)]

    def carry_out(want: machine.Want) -> machine.Answer:
        match want:
            case machine.ReadBatches():
                return machine.BatchesRead(64)
            case machine.PullWeights():
                return machine.WeightsPulled(weights, (0,))
            case machine.ComputeGradient():
                return machine.GradientComputed(gradients[want.step % 4], 1.0)
        return None

    steps_of = StepMachine(plan, TABLE)
    started = time.process_time()
    steps_of.drive(carry_out)
    return (time.process_time() - started) / steps * 1e6


def main() -> None:
    """Measure, and print a row a strategy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=60)
    given = parser.parse_args()
    assert TABLE.parameters == FLOATS
    kinds = strategies()
    times: dict[str, list[float]] = {name: [] for name in kinds}
    with threadpool_limits(1):
        for strategy in kinds.values():
            step_us(strategy, 20)  # compiles, and touches the memory
        for _ in range(given.rounds):
            for name, strategy in kinds.items():
                times[name].append(step_us(strategy, given.steps))
    plain = median(times["downpour"])
    print(f"{FLOATS:,} floats, windows of 10 steps, {given.rounds} rounds of {given.steps} steps")
    print(f"{'strategy':<14}{'CPU us a step':>14}{'above downpour':>16}{'of 20 ms':>10}")
    for name, found in sorted(times.items(), key=lambda row: median(row[1])):
        cost = median(found)
        print(f"{name:<14}{cost:>14.1f}{cost - plain:>16.1f}{cost / 20_000:>10.2%}")
    met = "met" if plain <= GOAL_US else "short"
    print(f"the loop with plain Downpour: {plain:.1f} us a step, goal {GOAL_US:g} us: {met}")


if __name__ == "__main__":
    main()
