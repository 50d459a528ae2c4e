"""What the death of a primary costs its workers, and what a second copy costs all the time.

Two workers push small gradients to one replicated shard, each waiting for every acknowledgement.
The primary is killed, or stopped; measured is the time until every worker has been acknowledged a
push that it began after that. Then the next copy is waited for, and the next primary is hit. In the
end the weights tell whether each acknowledged push was applied once.

Then CPU seconds for each GB moved, of all processes together: updates of 16 MB by one worker, a
push and a pull each, over TCP, with one copy and with two, one run after the other so that a busy
neighbour slows them alike.

    python tests/bench/bench_failover.py [--kills 20] [--stops 5] [--rounds 3]
"""

import argparse
import itertools
import os
import signal
import statistics
import threading
import time
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import psutil

import ps
from ps.transport import Transport
from shards.schedules import Fixed
from tests.bench.report import Goal, goals, save

_FLOATS = 4 << 20
_UPDATES = 40
_PRIMARY = "shard 0 primary"
_LONGEST_S = 120.0
_EDGES_MS = (25, 50, 100, 200, 500, 1000, 2000)


class Worker(threading.Thread):
    """Pushes ones, one at a time, and notes when the last acknowledged one was begun."""

    def __init__(self, cluster: ps.Cluster, name: str) -> None:
        super().__init__(daemon=True)
        self._cluster, self._name = cluster, name
        self._ended = threading.Event()
        self.begun_at = 0.0
        self.acknowledged = 0

    def run(self) -> None:
        with ps.Client(self._cluster, worker=self._name, patience_s=_LONGEST_S) as client:
            client.pull()
            while not self._ended.is_set():
                begun_at = time.monotonic()
                client.push(np.ones(client.table.size, np.float32))
                client.flush()
                self.begun_at, self.acknowledged = begun_at, client.seq

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.acknowledged


def specs_of(floats: int) -> list[Any]:
    table = ps.DenseTable("net", (ps.TensorSpec("w", (floats,)),))
    return ps.shard_specs(table, schedule=Fixed(base_rate=1.0), lease_s=60.0)


def until(holds: Any, what: str) -> None:
    give_up_at = time.monotonic() + _LONGEST_S
    while not holds():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"bench_failover: {what} has not come for {_LONGEST_S:g} s")
        time.sleep(0.001)


def hit(hosts: Any, workers: list[Worker], how: signal.Signals) -> float:
    """Seconds from the signal until every worker is acknowledged what it began after it."""
    until(lambda: hosts.redundant, "a second copy")
    time.sleep(0.5)  # as many pushes as that takes, undisturbed
    pid = hosts.pids[_PRIMARY]
    at = time.monotonic()
    os.kill(pid, how)
    until(lambda: all(worker.begun_at > at for worker in workers), "an acknowledgement")
    took_s = time.monotonic() - at
    until(lambda: hosts.pids.get(_PRIMARY, pid) != pid, "word of the new primary")
    if how is signal.SIGSTOP:
        os.kill(pid, signal.SIGCONT)
    return took_s


def failovers(kills: int, stops: int) -> tuple[list[float], list[float], float]:
    """Seconds of each kill and stop; and acknowledged pushes that are lost or doubled."""
    specs = specs_of(1000)
    with ps.replicated_shards(specs) as hosts, ps.Console(hosts.cluster) as console:
        console.install(specs[0].table.empty())
        workers = [Worker(hosts.cluster, name) for name in ("a", "b")]
        for worker in workers:
            worker.start()
        until(lambda: all(worker.acknowledged for worker in workers), "a first push")
        killed = [hit(hosts, workers, signal.SIGKILL) for _ in range(kills)]
        stopped = [hit(hosts, workers, signal.SIGSTOP) for _ in range(stops)]
        pushed = sum(worker.end() for worker in workers)
        return killed, stopped, abs(-float(console.read()[0]) - pushed)


def cpu_seconds_a_gb(shards: AbstractContextManager[Any]) -> float:
    """Of this process, which is the worker, and its children: the shards."""
    with shards as hosts, ps.Console(hosts.cluster) as console:
        console.install(hosts.cluster.table.empty())
        with ps.Client(hosts.cluster, worker="w", transport=Transport.TCP) as client:
            gradient = np.ones(client.table.size, np.float32)
            for _ in range(4):
                update(client, gradient)
            before = spent()
            for _ in range(_UPDATES):
                update(client, gradient)
            client.flush()
            return (spent() - before) / (_UPDATES * 2 * gradient.nbytes / 1e9)


def update(client: ps.Client, gradient: np.ndarray[Any, np.dtype[np.float32]]) -> None:
    client.pull()
    client.push(gradient)


def spent() -> float:
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children())]
    return sum(one.user + one.system for one in times)


def histogram(seconds: list[float]) -> list[tuple[str, int]]:
    edges = (0, *_EDGES_MS)
    rows = [
        (f"{low:>5} - {high} ms", sum(low <= 1000 * one < high for one in seconds))
        for low, high in itertools.pairwise(edges)
    ]
    return [*rows, (f"{edges[-1]:>5} ms or more", sum(1000 * one >= edges[-1] for one in seconds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    told = parser.parse_args()
    load = os.getloadavg()[0]
    killed, stopped, wrong = failovers(told.kills, told.stops)
    print(f"kill -9 of a primary, until every worker is acknowledged again ({len(killed)} times)")
    for name, count in histogram(killed):
        print(f"  {name:16} {'#' * count}")
    memory, replicated = [], []
    for _ in range(told.rounds):
        specs = specs_of(_FLOATS)
        memory.append(cpu_seconds_a_gb(ps.process_shards(specs, transport=Transport.TCP)))
        replicated.append(cpu_seconds_a_gb(ps.replicated_shards(specs_of(_FLOATS))))
    print(f"CPU s/GB over TCP: one copy {memory}, two {replicated}")
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    killed_ms = np.array(killed) * 1000
    figures = {
        "killed_ms": killed_ms.tolist(),
        "stopped_s": stopped,
        "memory_s_gb": memory,
        "replicated_s_gb": replicated,
        "load_before": load,
        "lost_or_doubled": wrong,
    }
    save("failover", figures)
    ratio = statistics.median(replicated) / statistics.median(memory)
    p50, p99 = np.percentile(killed_ms, (50, 99)).tolist()
    goals(
        [
            Goal("acknowledged pushes lost or doubled", wrong, 0),
            Goal("kill -9 to acknowledged again, p50", p50, 100, "ms"),
            Goal("kill -9 to acknowledged again, p99", p99, 500, "ms"),
            Goal("SIGSTOP to acknowledged again, longest", max(stopped), 1, "s"),
            Goal("CPU a GB of replicated to memory, TCP", ratio, 2.2, "x"),
        ]
    )


if __name__ == "__main__":
    main()
