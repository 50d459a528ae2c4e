"""Where the time of a small update goes: which thread computes for how long, and what waking costs.

    python tests/bench/bench_small.py [--floats 10000] [--updates 3000] [--rounds 3]

One worker and one shard, each a process, over every transport, and a ZeroMQ stream of the same
bytes; each once as the system places it and once with both on one core. An update is one thread
after another, so its time is their sum and that of waking each. On one core none of them sleeps
deeply: the difference is what waking idle cores costs. Linux only: threads are read from /proc.
Last come how often a thread of each kind wakes for an update, and the calls of Python functions
that it takes, which no busy machine changes. Its goals are for the default of 10,000 floats.
"""

import argparse
import multiprocessing
import os
import random
import statistics
import sys
import threading
import time
from collections import Counter, defaultdict
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from ps.server.server import ShardServer
from tests.bench.peers import ours
from tests.bench.peers.contract import Setting
from tests.bench.report import Goal, goals, save

CONTENDERS = (("ours", "tcp"), ("ours", "ipc"), ("ours", "shm"), ("raw_zmq", ""))
WARM_UP = 300


KINDS = ("worker", "worker_zmq", "shard", "shard_zmq")


class ThreadCosts(NamedTuple):
    """An update: microseconds until it is done, and of each kind of thread's CPU; its wakings."""

    p50: float
    worker: float
    worker_zmq: float
    shard: float
    shard_zmq: float
    worker_woken: float
    worker_zmq_woken: float
    shard_woken: float
    shard_zmq_woken: float


def threads(*pids: int) -> tuple[list[float], list[float]]:
    """So far, of each process's own threads and of ZeroMQ's in it: CPU microseconds, and sleeps."""
    spent, slept = [0.0] * (2 * len(pids)), [0.0] * (2 * len(pids))
    for number, pid in enumerate(pids):
        for task in Path(f"/proc/{pid}/task").iterdir():
            kind = 2 * number + (task / "comm").read_text().startswith("ZMQ")
            spent[kind] += int((task / "schedstat").read_text().split()[0]) / 1e3
            status = (task / "status").read_text()
            slept[kind] += int(status.split("\nvoluntary_ctxt_switches:")[1].split()[0])
    return spent, slept


def serve(module: str, wanted: Setting, door: Connection, pinned: bool) -> None:
    if pinned:
        os.sched_setaffinity(0, {0})
    import_module(f"tests.bench.peers.{module}").serve(wanted, 0, door)


def work(
    module: str, wanted: Setting, updates: int, pinned: bool, shard: int, door: Connection
) -> None:
    if pinned:
        os.sched_setaffinity(0, {0})
    update, close = import_module(f"tests.bench.peers.{module}").connect(wanted, 0, [door.recv()])
    for _ in range(WARM_UP):
        update()
    before, took = threads(os.getpid(), shard), []
    for _ in range(updates):
        started = time.perf_counter()
        update()
        took.append(time.perf_counter() - started)
    each = [
        (late - early) / updates
        for earlier, later in zip(before, threads(os.getpid(), shard), strict=True)
        for early, late in zip(earlier, later, strict=True)
    ]
    door.send(ThreadCosts(1e6 * statistics.median(took), *each))
    close()


def measure(module: str, wanted: Setting, updates: int, pinned: bool) -> ThreadCosts:
    """One contender once, in processes of its own."""
    spawn = multiprocessing.get_context("spawn")
    (door, shards), (ours, workers) = spawn.Pipe(), spawn.Pipe()
    shard = spawn.Process(target=serve, args=(module, wanted, shards, pinned))
    shard.start()
    ours.send(door.recv())
    worker = spawn.Process(target=work, args=(module, wanted, updates, pinned, shard.pid, workers))
    worker.start()
    try:
        spent: ThreadCosts = ours.recv()
    finally:
        door.send("stop")
        worker.join(20)
        shard.join(20)
        for process in (worker, shard):
            if process.is_alive():
                process.kill()
    return spent


class Calls(NamedTuple):
    """Calls of Python functions an update, at each end; the median."""

    worker: float
    shard: float


def calls(wanted: Setting, updates: int = 100) -> Calls:
    """Counted in one process, in which the shard is a thread."""
    found: Counter[str] = Counter()
    at_worker: list[int] = []
    at_shard: list[int] = []

    def count(_frame: object, event: str, _what: object) -> None:
        found[threading.current_thread().name] += event == "call"

    threading.setprofile(count)  # of threads that begin from here on: the server's
    try:
        server = ShardServer(ours.specs_of(wanted)[0], boot=1).start()
    finally:
        threading.setprofile(None)
    try:
        update, close = ours.connect(wanted, 0, [server.endpoint])
        for number in range(2 * updates):
            before = found.copy()
            sys.setprofile(count)
            update()
            sys.setprofile(None)
            if number >= updates:
                at_worker.append((found - before)[threading.current_thread().name])
                at_shard.append((found - before)["shard-0"])
        close()
    finally:
        sys.setprofile(None)
        server.stop()
    return Calls(statistics.median(at_worker), statistics.median(at_shard))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--floats", type=int, default=10_000)
    options.add_argument("--updates", type=int, default=3000)
    options.add_argument("--rounds", type=int, default=3)
    given = options.parse_args()
    rounds: dict[str, list[ThreadCosts]] = defaultdict(list)
    dice = random.Random(7)
    cases = [(*one, pinned) for one in CONTENDERS for pinned in (False, True)]
    for _ in range(given.rounds):
        for module, option, pinned in dice.sample(cases, len(cases)):
            name = f"{module} {option}".strip() + (", one core" if pinned else "")
            wanted = Setting(given.floats, 1, 1, 0.0, option)
            rounds[name].append(measure(module, wanted, given.updates, pinned))
    counted = calls(Setting(given.floats, 1, 1, 0.0, "ipc"))
    show({name: median(each) for name, each in sorted(rounds.items())})
    print(f"calls an update: {counted.worker:.0f} at the worker, {counted.shard:.0f} at the shard")


def in_columns(values: Any, digits: int) -> str:
    """One of each kind of thread."""
    columns = zip(KINDS, values, strict=True)
    return "  ".join(f"{value:{len(kind)}.{digits}f}" for kind, value in columns)


def median(each: list[ThreadCosts]) -> ThreadCosts:
    return ThreadCosts(*(statistics.median(values) for values in zip(*each, strict=True)))


def show(found: dict[str, ThreadCosts]) -> None:
    print(f"{'us an update':20}{'p50':>7}{'CPU':>7}   of it: {'  '.join(KINDS)}   woken: the same")
    for name, spent in found.items():
        cpu: Any = spent[1:5]
        print(
            f"{name:20}{spent.p50:7.0f}{sum(cpu):7.0f}{'':10}{in_columns(cpu, 0)}"
            f"{'':10}{in_columns(spent[5:], 1)}"
        )
    print(save("small", {name: spent._asdict() for name, spent in found.items()}))
    goals(
        Goal(f"small: p50 of an update, {option}", found[f"ours {option}"].p50, 180, "us")
        for option in ("ipc", "tcp")
    )


if __name__ == "__main__":
    main()
