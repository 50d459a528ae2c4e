"""The data path against its peers and its limits, all doing the same work in turns.

    python tests/bench/bench_datapath.py            the sizes that the goals speak of
    python tests/bench/bench_datapath.py --all      every size, workers and shards; over an hour
    python tests/bench/bench_datapath.py --quick    a look: 1 M floats, one round
    python tests/bench/bench_datapath.py --floats 10000 60000000 --only ours:tcp torch_rpc:tcp
                                                    these sizes, one worker and one shard

An *update* is one worker pushing N float32 and pulling N float32, plain SGD at the server; a GB
counts both ways. A round visits every contender in a freshly shuffled order; each is a program of
its own (`peers/contract.py`), and CPU seconds are those of its whole process tree while it is
measured. Medians over rounds are printed with their ratio to ours in the same rounds. Wall times on
a shared machine swing; CPU seconds a GB repeat.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import psutil

from shards.rules import SGD, Decay
from shards.tables import RateRun
from tests.bench.datapath_picture import draw
from tests.bench.peers.contract import Result, Setting
from tests.bench.report import Goal, goals, save

START_S = 120.0


class Contender(NamedTuple):
    """A program of `peers/` and the option it is run with."""

    module: str
    option: str = ""

    @property
    def name(self) -> str:
        return f"{self.module}:{self.option}" if self.option else self.module


class Case(NamedTuple):
    floats: int
    workers: int
    shards: int

    def __str__(self) -> str:
        return f"N={self.floats:,} ({self.workers},{self.shards})"


class Figures(NamedTuple):
    """Of one measurement."""

    rate: float
    cpu_s_per_gb: float
    p50_s: float


CONTENDERS = (
    Contender("ours", "tcp"),
    Contender("ours", "ipc"),
    Contender("ours", "shm"),
    Contender("ray_pattern"),
    Contender("torch_rpc"),
    Contender("torch_rpc", "tcp"),
    Contender("ps_lite"),
    Contender("tensorflow_ps"),
    Contender("pickle_tcp"),
    Contender("raw_tcp"),
    Contender("raw_zmq"),
)

GOAL_CASES = (
    Case(10_000, 1, 1),
    Case(100_000, 1, 1),
    Case(1_000_000, 1, 1),
    Case(1_000_000, 2, 2),
    Case(25_000_000, 1, 1),
    Case(25_000_000, 1, 2),
    Case(25_000_000, 2, 2),
    Case(25_000_000, 8, 8),
)
ALL_CASES = tuple(
    Case(floats, workers, shards)
    for floats in (10_000, 100_000, 1_000_000, 25_000_000, 60_000_000)
    for workers, shards in ((1, 1), (2, 2), (4, 2), (8, 8))
)
_HERE, _ROOT = Path(sys.executable), Path(__file__).resolve().parents[2]
MISSING = ("Elephas",)


def measure(contender: Contender, case: Case, seconds: float) -> Figures | None:
    """Run one contender once; None when it could not run here."""
    interpreter = _interpreter(contender)
    if not interpreter.exists():
        print(f"  {contender.name} did not run: {interpreter} is missing: run `make bench B=peers`")
        return None
    wanted = Setting(case.floats, case.workers, case.shards, seconds, contender.option)
    program = subprocess.Popen(
        [
            interpreter,
            "-m",
            f"tests.bench.peers.{contender.module}",
            msgspec.json.encode(wanted).decode(),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(_ROOT)},
    )
    assert program.stdin is not None
    assert program.stdout is not None
    try:
        if not _await(program, "begin"):
            return None
        before = _cpu_seconds(program.pid)
        print(file=program.stdin, flush=True)
        last = _await(program, "end ")
        if not last:
            return None
        spent = _cpu_seconds(program.pid) - before
        print(file=program.stdin, flush=True)
        result = msgspec.convert(json.loads(last.removeprefix("end ")), Result)
        moved_gb = result.updates * 8 * case.floats / 1e9
        return Figures(result.rate, spent / moved_gb, statistics.median(result.latencies))
    finally:
        _end(program)


def _interpreter(contender: Contender) -> Path:
    """Its own where its packages do not go with this project's: peers/NAME.txt lists them."""
    own = (_ROOT / "tests" / "bench" / "peers" / contender.module).with_suffix(".txt")
    return _ROOT / ".venv-peers" / own.stem / "bin" / "python" if own.exists() else _HERE


def _await(program: subprocess.Popen[str], word: str) -> str:
    """The line that starts with `word`; says what went wrong, and returns "", where none comes."""
    assert program.stdout is not None
    for line in program.stdout:
        if line.startswith(word):
            return line
    assert program.stderr is not None
    wrong = [line for line in program.stderr.read().splitlines() if line.strip()]
    print(f"  did not run: {wrong[-1] if wrong else 'no word of why'}")
    return ""


def _end(program: subprocess.Popen[str]) -> None:
    """Give it a moment to close, then end it with all that descends from it."""
    family = _children(program.pid)
    try:
        program.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        program.kill()
    for process in family:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _cpu_seconds(pid: int) -> float:
    """CPU seconds so far of a process and of all that descend from it and live."""
    total = 0.0
    for process in [psutil.Process(pid), *_children(pid)]:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def apply_seconds(floats: int, rounds: int = 9) -> float:
    """One update applied, and nothing else: the bound for shared memory."""
    rule, whole = SGD(), (RateRun(0, floats, 1.0, 1.0),)
    rule.prepare()
    weights, gradient, out = (np.ones(floats, np.float32) for _ in range(3))
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        rule.apply(weights, gradient, (), out, whole, rate=1e-3, decay=Decay(), count=1)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:])


Table = dict[Case, dict[str, list[Figures]]]


def race(
    cases: Sequence[Case], contenders: Sequence[Contender], rounds: int, seconds: float
) -> Table:
    """Every contender on every case, `rounds` times, in shuffled order."""
    table: Table = {case: defaultdict(list) for case in cases}
    dice = random.Random(11)
    for number in range(rounds):
        for case in cases:
            order = list(contenders)
            dice.shuffle(order)
            for contender in order:
                figures = measure(contender, case, seconds)
                if figures is None:
                    continue
                table[case][contender.name].append(figures)
                print(
                    f"round {number} {case!s:22} {contender.name:14}"
                    f" {figures.rate:9.1f} updates/s {figures.cpu_s_per_gb:7.2f} CPU s/GB"
                    f" p50 {1e3 * figures.p50_s:8.2f} ms",
                    flush=True,
                )
    return table


def median(table: Table, case: Case, name: str, figure: str) -> float:
    """The median over rounds, NaN where the contender did not run."""
    values = [getattr(one, figure) for one in table.get(case, {}).get(name, [])]
    return statistics.median(values) if values else float("nan")


def report(table: Table, contenders: Sequence[Contender]) -> None:
    """One table a case: medians, and the ratio to ours over sockets in the same run."""
    for case in table:
        print(f"\n{case}: updates/s, CPU s/GB, rate and CPU against ours over tcp")
        for contender in contenders:
            name = contender.name
            rate, cpu = (median(table, case, name, f) for f in ("rate", "cpu_s_per_gb"))
            ours_rate, ours_cpu = (
                median(table, case, "ours:tcp", f) for f in ("rate", "cpu_s_per_gb")
            )
            ratios = f"{rate / ours_rate:6.2f}x {cpu / ours_cpu:6.2f}x"
            print(f"  {name:14} {rate:9.1f} {cpu:8.3f}   {ratios}")
    print(f"\nnot run, for want of a package of theirs or its size: {', '.join(MISSING)}")


def judged(table: Table) -> list[Goal]:
    """The goals that this run can speak of."""
    large, medium, small = Case(25_000_000, 1, 1), Case(1_000_000, 1, 1), Case(100_000, 1, 1)
    two, tiny = Case(25_000_000, 2, 2), Case(10_000, 1, 1)
    rows: list[Goal] = []

    def cpu(case: Case, peer: str, target: float) -> None:
        ratio = median(table, case, "ours:tcp", "cpu_s_per_gb") / median(
            table, case, peer, "cpu_s_per_gb"
        )
        rows.append(Goal(f"{case} sockets' CPU/GB against {peer}", ratio, target, "x"))

    def rate(case: Case, ours: str, peer: str, target: float) -> None:
        ratio = median(table, case, ours, "rate") / median(table, case, peer, "rate")
        rows.append(Goal(f"{case} {ours} rate against {peer}", ratio, target, "x", at_least=True))

    for case in (large, two):
        cpu(case, "ps_lite", 0.75)
        cpu(case, "torch_rpc:tcp", 0.6)
        cpu(case, "tensorflow_ps", 0.6)
    rate(large, "ours:tcp", "raw_tcp", 0.9)
    for peer, target in (
        ("ray_pattern", 4.5),
        ("ps_lite", 4.0),
        ("torch_rpc:tcp", 6.5),
        ("tensorflow_ps", 6.5),
        ("pickle_tcp", 27.0),
    ):
        rate(large, "ours:shm", peer, target)
    rate(medium, "ours:shm", "ray_pattern", 10.0)
    rate(small, "ours:shm", "ray_pattern", 50.0)
    for case, shards in ((large, 1), (Case(25_000_000, 1, 2), 2)):
        if case in table:
            share = median(table, case, "ours:shm", "rate") * apply_seconds(case.floats // shards)
            rows.append(Goal(f"{case} shared memory against the apply alone", share, 0.9, "", True))
    eight = Case(25_000_000, 8, 8)
    ratio = median(table, eight, "ours:tcp", "cpu_s_per_gb") / median(
        table, large, "ours:tcp", "cpu_s_per_gb"
    )
    rows.append(Goal(f"{eight} sockets' CPU/GB against {large}", ratio, 1.15, "x"))
    best = max(median(table, tiny, name, "rate") for name in ("ours:tcp", "ours:ipc", "ours:shm"))
    rows.append(Goal(f"{tiny} updates/s", best, 5000, "", at_least=True))
    p50 = min(median(table, tiny, name, "p50_s") for name in ("ours:tcp", "ours:ipc", "ours:shm"))
    rows.append(Goal(f"{tiny} push+pull p50", 1e6 * p50, 250, "us"))
    return [row for row in rows if row.measured == row.measured]  # not a NaN


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--all", action="store_true", help="every size and number of processes")
    parser.add_argument("--quick", action="store_true", help="1 M floats only, one round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--floats", type=int, nargs="+", help="only these sizes")
    names = [one.name for one in CONTENDERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="only these peers")
    given = parser.parse_args()
    contenders = [one for one in CONTENDERS if one.name in given.only]
    cases = ALL_CASES if given.all else GOAL_CASES
    if given.floats:
        cases = tuple(Case(floats, 1, 1) for floats in given.floats)
    table = (
        race((Case(1_000_000, 1, 1),), contenders, 1, 1.0)
        if given.quick
        else race(cases, contenders, given.rounds, given.seconds)
    )
    report(table, contenders)
    rows = judged(table)
    path = save(
        "datapath",
        {
            str(case): {name: [one._asdict() for one in each] for name, each in found.items()}
            for case, found in table.items()
        },
    )
    draw(
        {
            str(case): {c.name: median(table, case, c.name, "cpu_s_per_gb") for c in contenders}
            for case in table
        },
        path.with_suffix(".png"),
    )
    print(f"figures: {path}, picture: {path.with_suffix('.png')}\n")
    goals(rows)


if __name__ == "__main__":
    main()
