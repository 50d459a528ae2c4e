"""How fast a shard applies an update on one core: the fused loops, plain NumPy, and memcpy.

Rounds visit all contenders in a freshly shuffled order, so that a busy neighbour slows them alike;
medians are reported, and the ratio to memcpy in the same round is what carries to other machines.

    python tests/bench/bench_apply.py [--floats 25000000] [--rounds 15]
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

import numpy as np

from cupy_kernels.ops.updates import sgd_measured, squared_norm
from shards.rules import RULES, Decay, Floats
from shards.run_plans import cover_gaps
from shards.tables import RateRun
from tests.bench.report import Goal, goals, save

NAMES = ("sgd", "momentum", "adagrad", "adam")
RATE = np.float32(0.01)


def fused(name: str, arrays: dict[str, Floats]) -> Callable[[], None]:
    """One push applied as a shard does it."""
    rule = RULES[name]()
    rule.prepare()
    weights, gradient, out = (arrays[key] for key in ("weights", "gradient", "out"))
    slots = tuple(arrays[f"slot{number}"] for number in range(len(rule.slot_names)))
    whole = (RateRun(0, weights.size, 1.0, 1.0),)
    return lambda: rule.apply(
        weights, gradient, slots, out, whole, rate=float(RATE), decay=Decay(), count=100
    )


def with_norm(arrays: dict[str, Floats]) -> dict[str, Callable[[], None]]:
    """One push judged and applied: in the one pass that plain SGD has, and in two, as others do."""
    weights, gradient, out = (arrays[key] for key in ("weights", "gradient", "out"))
    runs = cover_gaps((RateRun(0, weights.size, 1.0, 1.0),), weights.size, float(RATE))
    update = fused("sgd", arrays)

    def one_pass() -> None:
        sgd_measured(weights, gradient, out, runs)

    def two_passes() -> None:
        squared_norm(gradient)
        update()

    return {
        "sgd with its norm": one_pass,
        "norm, then sgd": two_passes,
    }


def plain_sgd(arrays: dict[str, Floats]) -> Callable[[], None]:
    """As one would first write it: `out = w - rate * g`."""
    weights, gradient, out = (arrays[key] for key in ("weights", "gradient", "out"))

    def run() -> None:
        out[:] = weights - RATE * gradient

    return run


def plain_adagrad(arrays: dict[str, Floats]) -> Callable[[], None]:
    """As one would first write it: `h += g*g; out = w - rate * g / (sqrt(h) + delta)`."""
    weights, gradient, out, total = (arrays[k] for k in ("weights", "gradient", "out", "slot0"))

    def run() -> None:
        total[:] = total + gradient * gradient
        out[:] = weights - RATE * (gradient / (np.sqrt(total) + np.float32(1e-8)))

    return run


def measure(
    contenders: dict[str, Callable[[], None]], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU seconds of every contender in every round."""
    taken: dict[str, dict[str, list[float]]] = {n: {"wall": [], "cpu": []} for n in contenders}
    order, dice = list(contenders), random.Random(7)
    for number in range(rounds + 1):
        dice.shuffle(order)
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            contenders[name]()
            if number:  # the first round warms up
                taken[name]["wall"].append(time.perf_counter() - wall)
                taken[name]["cpu"].append(time.process_time() - cpu)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--floats", type=int, default=25_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    dice = np.random.default_rng(1)
    arrays = {
        key: dice.standard_normal(options.floats, np.float32) for key in ("weights", "gradient")
    }
    arrays |= {key: np.ones(options.floats, np.float32) for key in ("out", "slot0", "slot1")}
    contenders = {"memcpy": lambda: np.copyto(arrays["out"], arrays["weights"])}
    contenders |= {name: fused(name, arrays) for name in NAMES}
    contenders |= with_norm(arrays)
    contenders |= {
        "sgd, plain NumPy": plain_sgd(arrays),
        "adagrad, plain NumPy": plain_adagrad(arrays),
    }
    taken = measure(contenders, options.rounds)

    wall = {name: statistics.median(times["wall"]) for name, times in taken.items()}
    ratio = {
        name: statistics.median(
            own / copy for own, copy in zip(times["wall"], taken["memcpy"]["wall"], strict=True)
        )
        for name, times in taken.items()
    }
    print(f"{'':24}{'ms':>10}{'CPU ms':>10}{'x memcpy':>10}")
    for name, times in taken.items():
        cpu = statistics.median(times["cpu"])
        print(f"{name:24}{1e3 * wall[name]:10.1f}{1e3 * cpu:10.1f}{ratio[name]:10.2f}")
    print(save("apply", {"floats": options.floats, "cores": os.cpu_count(), "seconds": taken}))
    scale = options.floats / 25e6
    goals(
        [
            Goal("apply: adagrad, 25 M floats, one core", 1e3 * wall["adagrad"] / scale, 45, "ms"),
            Goal(
                "apply: sgd out of place, 25 M floats, one core",
                1e3 * wall["sgd"] / scale,
                27,
                "ms",
            ),
            Goal("apply: sgd against memcpy", ratio["sgd"], 1.35, "x"),
            Goal("apply: adagrad against memcpy", ratio["adagrad"], 2.2, "x"),
        ]
    )


if __name__ == "__main__":
    main()
