"""What the death of a primary costs its workers, and what a second copy costs all the time.

Two workers push small gradients to one replicated shard, each waiting for every acknowledgement.
The primary is killed, stopped, or cut off from all others, as by a cable that is pulled: it goes on
and knows of nothing, and its packets vanish (that needs root). Measured is the time until every
worker has been acknowledged a push that it began after that. Then the next copy is waited for, and
the next primary is hit. In the end the weights tell whether each acknowledged push was applied
once.

Then CPU seconds for each GB moved, of all processes together: updates of 16 MB by one worker, a
push and a pull each, over TCP, with one copy and with two, one run after the other so that a busy
neighbour slows them alike.

With `--curve` all of it over CURVE, as where other hosts can reach the shards.

    python tests/bench/bench_failover.py [--kills 20] [--stops 5] [--cuts 20] [--rounds 3] [--curve]
"""

import argparse
import itertools
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import numpy as np
import psutil

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_replicas, process_shards
from ps.transport.transports import Transport
from shards.schedules import Fixed
from tests.bench.report import Goal, goals, save
from tests.chaos import namespaces

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
        with Client(self._cluster, worker=self._name, patience_s=_LONGEST_S) as client:
            client.pull()
            while not self._ended.is_set():
                begun_at = time.monotonic()
                client.push(np.ones(client.layout.size, np.float32))
                client.flush()
                self.begun_at, self.acknowledged = begun_at, client.seq

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.acknowledged


def specs_of(floats: int) -> list[Any]:
    table = ps.DenseTable("net", (ps.TensorSpec("w", (floats,)),))
    return shard_specs(table, schedule=Fixed(base_rate=1.0), lease_s=60.0)


def until(holds: Any, what: str) -> None:
    give_up_at = time.monotonic() + _LONGEST_S
    while not holds():
        if time.monotonic() > give_up_at:
            raise SystemExit(f"bench_failover: {what} has not come for {_LONGEST_S:g} s")
        time.sleep(0.001)


Break = Callable[[int], AbstractContextManager[None]]


@contextmanager
def killed(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGKILL)
    yield


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    yield
    os.kill(pid, signal.SIGCONT)


def cutting(ports: namespaces.Ports) -> Break:
    """Have what a process says from or to any of its ports vanish."""

    @contextmanager
    def cut_off(pid: int) -> Iterator[None]:
        own = {one.laddr.port for one in psutil.Process(pid).net_connections("tcp")}
        with ports.cut(own):
            yield

    return cut_off


def hit(hosts: Any, workers: list[Worker], break_: Break) -> float:
    """Seconds from the fault until every worker is acknowledged what it began after it."""
    until(lambda: hosts.redundant, "a second copy")
    time.sleep(0.5)  # as many pushes as that takes, undisturbed
    pid = hosts.pids[_PRIMARY]
    at = time.monotonic()
    with break_(pid):
        broken_at = time.monotonic()
        until(lambda: all(one.begun_at > broken_at for one in workers), "an acknowledgement")
        took_s = time.monotonic() - at
        until(lambda: hosts.pids.get(_PRIMARY, pid) != pid, "word of the new primary")
    return took_s


class Failovers(NamedTuple):
    """Seconds of each, and acknowledged pushes that were lost or doubled."""

    killed: list[float]
    stopped: list[float]
    cut: list[float]
    wrong: float


def failovers(kills: int, stops: int, cuts: int, secure: bool) -> Failovers:
    """Hit so many primaries in each way."""
    specs = specs_of(1000)
    with (
        process_replicas(specs, secure=secure) as hosts,
        ps.AdminClient(hosts.cluster) as console,
    ):
        console.install(specs[0].layout.empty())
        workers = [Worker(hosts.cluster, name) for name in ("a", "b")]
        for worker in workers:
            worker.start()
        until(lambda: all(worker.acknowledged for worker in workers), "a first push")
        by_kill = [hit(hosts, workers, killed) for _ in range(kills)]
        by_stop = [hit(hosts, workers, stopped) for _ in range(stops)]
        cut_off = cutting(namespaces.Ports()) if cuts else killed
        by_cut = [hit(hosts, workers, cut_off) for _ in range(cuts)]
        pushed = sum(worker.end() for worker in workers)
        return Failovers(by_kill, by_stop, by_cut, abs(-float(console.read()[0]) - pushed))


def cpu_seconds_a_gb(shards: AbstractContextManager[Any]) -> float:
    """Of this process, which is the worker, and its children: the shards."""
    with shards as hosts, ps.AdminClient(hosts.cluster) as console:
        console.install(hosts.cluster.layout.empty())
        with Client(hosts.cluster, worker="w", transport=Transport.TCP) as client:
            gradient = np.ones(client.layout.size, np.float32)
            for _ in range(4):
                update(client, gradient)
            before = spent()
            for _ in range(_UPDATES):
                update(client, gradient)
            client.flush()
            return (spent() - before) / (_UPDATES * 2 * gradient.nbytes / 1e9)


def update(client: Client, gradient: np.ndarray[Any, np.dtype[np.float32]]) -> None:
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
    parser.add_argument("--cuts", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--curve", action="store_true", help="have all links speak CURVE")
    told = parser.parse_args()
    load = os.getloadavg()[0]
    if told.cuts and (why := namespaces.missing()) is not None:
        told.cuts = 0
        print(f"no primary is cut off: {why}")
    if told.cuts:
        namespaces.move_into_own()
    found = failovers(told.kills, told.stops, told.cuts, told.curve)
    for what, took in (("kill -9", found.killed), ("SIGSTOP", found.stopped), ("cut", found.cut)):
        if not took:
            continue
        print(f"{what} of a primary, until every worker is acknowledged again ({len(took)} times)")
        for name, count in histogram(took):
            print(f"  {name:16} {'#' * count}")
    memory, replicated = [], []
    for _ in range(told.rounds):
        specs = specs_of(_FLOATS)
        one_copy = process_shards(specs, transport=Transport.TCP, secure=told.curve)
        memory.append(cpu_seconds_a_gb(one_copy))
        two = process_replicas(specs_of(_FLOATS), secure=told.curve)
        replicated.append(cpu_seconds_a_gb(two))
    print(f"CPU s/GB over {'CURVE' if told.curve else 'TCP'}: one copy {memory}, two {replicated}")
    print(f"load before: {load:.1f} on {os.cpu_count()} cores")
    figures = {
        "killed_ms": [1000 * one for one in found.killed],
        "stopped_s": found.stopped,
        "cut_s": found.cut,
        "memory_s_gb": memory,
        "replicated_s_gb": replicated,
        "load_before": load,
        "lost_or_doubled": found.wrong,
    }
    save("failover_curve" if told.curve else "failover", figures)
    goals(rows(found, memory, replicated, ", CURVE" if told.curve else ""))


def rows(
    found: Failovers, memory: list[float], replicated: list[float], how: str
) -> Iterator[Goal]:
    """The goals of whatever was measured; `how` is added to what they are called."""
    yield Goal(f"acknowledged pushes lost or doubled{how}", found.wrong, 0)
    if found.killed:
        p50, p99 = 1000 * np.percentile(found.killed, (50, 99))
        yield Goal(f"kill -9 to acknowledged again, p50{how}", p50, 100, "ms")
        yield Goal(f"kill -9 to acknowledged again, p99{how}", p99, 500, "ms")
    if found.stopped:
        yield Goal(f"SIGSTOP to acknowledged again, longest{how}", max(found.stopped), 1, "s")
    if found.cut:
        what = f"cut off {len(found.cut)} times to acknowledged again{how}"
        yield Goal(f"{what}, p50", statistics.median(found.cut), 1, "s")
        yield Goal(f"{what}, longest", max(found.cut), 1, "s")
    if memory:
        ratio = statistics.median(replicated) / statistics.median(memory)
        yield Goal(f"CPU a GB of replicated to memory, TCP{how}", ratio, 2.2, "x")


if __name__ == "__main__":
    main()
