"""The socket path by itself, against the bare limits and, if wanted, another checkout of this code.

    python tests/bench/bench_wire.py [--quick] [--against CHECKOUT] [--rounds 5] [--seconds 2]

An *update* is one worker pushing N float32 and pulling N float32, plain SGD at the shard; a GB
counts both ways. Every round visits every contender in a freshly shuffled order: this code, the
other checkout's, and a ZeroMQ stream of the same bytes that nobody applies; CPU seconds are those
of all processes together. Beside them stand one core's memcpy and the apply alone, each in CPU
seconds for the GB that an update moves.
"""

import argparse
import os
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from shards.rules import SGD, Decay
from shards.tables import RateRun
from tests.bench.bench_datapath import Case, Contender, Figures, measure
from tests.bench.report import Goal, goals, save

OURS, OTHER, STREAM = "this code", "other checkout", "zmq stream"
CASES = tuple(
    Case(floats, workers, shards)
    for floats in (10_000, 1_000_000, 25_000_000)
    for workers, shards in ((1, 1), (2, 2), (4, 1))
)
QUICK = (Case(10_000, 1, 1), Case(1_000_000, 1, 1), Case(25_000_000, 1, 1))

Table = dict[Case, dict[str, list[Figures]]]


@contextmanager
def running(checkout: Path) -> Iterator[None]:
    """Programs started here import the code of `checkout`."""
    former = dict(os.environ)
    os.environ |= {"PYTHONPATH": str(checkout), "PYTHONSAFEPATH": "1"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= former


def race(cases: tuple[Case, ...], against: Path | None, rounds: int, seconds: float) -> Table:
    here = Path(__file__).resolve().parents[2]
    contenders = {OURS: (here, "ours"), STREAM: (here, "raw_zmq")}
    if against is not None:
        contenders[OTHER] = (against, "ours")
    table: Table = {case: defaultdict(list) for case in cases}
    dice = random.Random(5)
    for case in (case for _ in range(rounds) for case in cases):
        for name in dice.sample(list(contenders), len(contenders)):
            checkout, module = contenders[name]
            with running(checkout):
                figures = measure(Contender(module, "tcp" * (module == "ours")), case, seconds)
            if figures is not None:
                table[case][name].append(figures)
    return table


def cpu_seconds(work: Callable[[], object], rounds: int = 9) -> float:
    """The median CPU seconds of one call, the first of which warms up."""
    taken = []
    for _ in range(rounds):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken[1:])


def alone(floats: int) -> dict[str, float]:
    """CPU s/GB of a copy and of an apply of `floats`, each once an update of 8 bytes a float."""
    rule, whole = SGD(), (RateRun(0, floats, 1.0, 1.0),)
    rule.prepare()
    weights, gradient, out = (np.ones(floats, np.float32) for _ in range(3))
    moved_gb = 8 * floats / 1e9

    def apply() -> None:
        rule.apply(weights, gradient, (), out, whole, rate=1e-3, decay=Decay(), count=1)

    return {
        "memcpy": cpu_seconds(lambda: np.copyto(out, weights)) / moved_gb,
        "the apply alone": cpu_seconds(apply) / moved_gb,
    }


def median(table: Table, case: Case, name: str, figure: str) -> float:
    return float(statistics.median(getattr(one, figure) for one in table[case][name]))


def report(table: Table) -> None:
    for case, found in table.items():
        print(f"\n{case!s:22}{'updates/s':>10}{'GB/s':>8}{'CPU s/GB':>10}{'p50 ms':>9}")
        for name in found:
            rate, cpu, p50 = (median(table, case, name, f) for f in Figures._fields)
            moved = rate * 8 * case.floats / 1e9
            print(f"  {name:20}{rate:10.1f}{moved:8.2f}{cpu:10.3f}{1e3 * p50:9.2f}")
        if case.workers == 1:
            for name, cpu in alone(case.floats).items():
                print(f"  {name:20}{'':18}{cpu:10.3f}")


def judged(table: Table) -> list[Goal]:
    rows = []
    small, large, four = Case(10_000, 1, 1), Case(25_000_000, 1, 1), Case(25_000_000, 4, 1)
    if small in table:
        rate, p50 = median(table, small, OURS, "rate"), median(table, small, OURS, "p50_s")
        rows.append(Goal(f"{small} updates/s", rate, 5000, "", at_least=True))
        rows.append(Goal(f"{small} push+pull p50", 1e6 * p50, 250, "us"))
    if large in table:
        rows.append(Goal(f"{large}", median(table, large, OURS, "cpu_s_per_gb"), 0.71, "s/GB"))
    if four in table and OTHER in table[four]:
        ratio = median(table, four, OURS, "rate") / median(table, four, OTHER, "rate")
        rows.append(Goal(f"{four} rate over the other's", ratio, 1.7, "x", at_least=True))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one worker, one shard, one round")
    parser.add_argument("--against", type=Path, help="another checkout of this project")
    parser.add_argument("--only", help="cases whose name holds this, as '(4,1)'")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    given = parser.parse_args()
    cases = tuple(c for c in (QUICK if given.quick else CASES) if (given.only or "") in str(c))
    table = race(cases, given.against, 1 if given.quick else given.rounds, given.seconds)
    report(table)
    figures = {
        str(case): {name: [one._asdict() for one in each] for name, each in found.items()}
        for case, found in table.items()
    }
    print(f"\nfigures: {save('wire', figures)}")
    goals(judged(table))


if __name__ == "__main__":
    main()
