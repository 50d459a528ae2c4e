"""How a contender is run and measured.

It is a program: `python -m tests.bench.peers.NAME '{"floats": ..., ...}'`. It starts its servers
and workers, takes a few updates to warm up, and prints `begin`; the benchmark then reads the CPU
seconds of the whole process tree and answers a line. After the given seconds it prints `end` and
its result and waits again, with all its processes alive. So start and end count for nobody.
"""

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

RATE = 1e-3
WARM_UPDATES = 3


class Setting(msgspec.Struct, frozen=True):
    """One measurement: `floats` parameters, cut evenly over `shards`, trained by `workers`."""

    floats: int
    workers: int
    shards: int
    seconds: float
    option: str = ""

    def parts(self) -> list[slice]:
        """Each shard's keys."""
        edges = np.linspace(0, self.floats, self.shards + 1).astype(int)
        return [slice(int(a), int(b)) for a, b in pairwise(edges)]


class Result(msgspec.Struct, frozen=True):
    """What the workers did together: updates a second, and each update's seconds."""

    updates: int
    rate: float
    latencies: list[float]


Update = Callable[[], object]


def setting() -> Setting:
    """What the command line asks for."""
    return msgspec.json.decode(sys.argv[1].encode(), type=Setting)


def gradient(floats: int) -> NDArray[np.float32]:
    """What every worker pushes, every time."""
    return np.full(floats, 1e-3, np.float32)


def begin() -> None:
    """Everything is warm: let the benchmark look at the clock of every process."""
    print("begin", flush=True)
    sys.stdin.readline()


def end(result: Result) -> None:
    """The measured span is over; processes must still be alive."""
    print("end " + json.dumps(msgspec.to_builtins(result)), flush=True)
    sys.stdin.readline()


def take_updates(update: Update, seconds: float) -> tuple[float, list[float]]:
    """Repeat one worker's update for `seconds`: the seconds it took and each update's."""
    started = last = time.perf_counter()
    latencies = []
    while last - started < seconds:
        update()
        now = time.perf_counter()
        latencies.append(now - last)
        last = now
    return last - started, latencies


def joined(spans: list[tuple[float, list[float]]]) -> Result:
    """The workers' spans as one result."""
    latencies = [one for _, each in spans for one in each]
    rate = sum(len(each) / took for took, each in spans)
    return Result(len(latencies), rate, latencies)


Worker = Callable[[Setting, int, list[str]], tuple[Update, Callable[[], None]]]
"""Connect worker number `int` to the servers' addresses: its update, and how to close it."""

Server = Callable[[Setting, int, Connection], None]
"""Serve shard number `int`: send the address through the pipe; return when the pipe has a word."""


def run_fleet(server: Server, worker: Worker) -> None:
    """Servers and workers as processes of their own, one a shard and one a worker."""
    wanted = setting()
    spawn = multiprocessing.get_context("spawn")
    doors, processes = [], []
    for shard in range(wanted.shards):
        ours, theirs = spawn.Pipe()
        process = spawn.Process(target=server, args=(wanted, shard, theirs), daemon=True)
        process.start()
        doors.append(ours)
        processes.append(process)
    addresses = [door.recv() for door in doors]
    ready, finished = spawn.Barrier(wanted.workers + 1), spawn.Event()
    results: Any = spawn.SimpleQueue()
    for number in range(wanted.workers):
        process = spawn.Process(
            target=_work,
            args=(worker, wanted, number, addresses, ready, finished, results),
            daemon=True,
        )
        process.start()
        processes.append(process)
    ready.wait()
    begin()
    ready.wait()
    spans = [results.get() for _ in range(wanted.workers)]
    end(joined(spans))
    finished.set()
    for door in doors:
        door.send("stop")
    for process in reversed(processes):
        process.join(20)


def _work(
    worker: Worker,
    wanted: Setting,
    number: int,
    addresses: list[str],
    ready: Barrier,
    finished: Event,
    results: Any,
) -> None:
    update, close = worker(wanted, number, addresses)
    for _ in range(WARM_UPDATES):
        update()
    ready.wait()
    ready.wait()
    results.put(take_updates(update, wanted.seconds))
    finished.wait()
    close()
    os._exit(0)  # some contenders' threads never end
