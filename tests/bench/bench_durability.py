"""What the levels `process` and `logged` cost, and how soon a killed shard serves again.

    python tests/bench/bench_durability.py [--rounds 3] [--seconds 4] [--floats 25000000]
                                           [--state-mb 720] [--folder runs/bench/durability]

An *update* is a worker pushing N float32 and pulling N float32 over TCP, plain SGD, one shard; a GB
counts both ways. Rounds visit the levels in a freshly shuffled order; CPU seconds are those of both
processes. Beside `logged` stands the bare disk: write and fdatasync of the same bytes in the same
chunks. What comes first is not counted, until a log is written over its own old files, as it is
for all but the beginning of a job. Last, a shard of so many MB with a log of two pushes is killed,
and the time taken from its successor's start to its first answer. The logs lie below `folder`,
whose disk is what is measured.
"""

import argparse
import os
import random
import shutil
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

import ps
from ps import AdminClient, Durability
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from ps.launch.single_copies import SingleCopies
from shards.schedules import Fixed
from shards.spec import ShardSpec
from tests.bench.report import Goal, goals, save

PATIENCE_S = 300.0
UNCOUNTED = 12  # pushes, each of the state's size: the log has left its files twice by then


class Figures(NamedTuple):
    """Of one level in one round."""

    cpu_s_per_gb: float
    gb_per_s: float


def specs_of(floats: int) -> list[ShardSpec]:
    table = ps.DenseTable("net", (ps.TensorSpec("w", (floats,)),))
    return shard_specs(table, schedule=Fixed(base_rate=1e-3), lease_s=PATIENCE_S)


def for_s(seconds: float, work: Callable[[], object]) -> tuple[int, float]:
    """How often it was done, and in what time."""
    started, done = time.monotonic(), 0
    while time.monotonic() - started < seconds or done < 2:
        work()
        done += 1
    return done, time.monotonic() - started


def update(level: Durability, floats: int, seconds: float, folder: Path) -> Figures:
    shutil.rmtree(folder, ignore_errors=True)
    with process_shards(specs_of(floats), durability=level, logs=folder) as hosts:
        return measured(hosts, seconds)


def measured(hosts: SingleCopies, seconds: float) -> Figures:
    """What updates cost a fresh shard and its one worker."""
    shard, floats = psutil.Process(hosts.pids[0]), hosts.cluster.layout.size

    def cpu_s() -> float:
        times = shard.cpu_times()
        return times.user + times.system + time.process_time()

    with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
        console.install(hosts.cluster.layout.empty())
    told = {"worker": "w", "transport": "tcp", "patience_s": PATIENCE_S}
    with Client(hosts.cluster, **told) as client:  # type: ignore[arg-type]
        gradient = np.ones(floats, np.float32)

        def once() -> None:
            client.pull()
            client.push(gradient)
            client.flush()

        for _ in range(UNCOUNTED):
            once()
        before = cpu_s()
        updates, took_s = for_s(seconds, once)
        spent = cpu_s() - before
    moved_gb = updates * 8 * floats / 1e9
    return Figures(spent / moved_gb, moved_gb / took_s)


def raw_disk(floats: int, seconds: float, folder: Path) -> float:
    """GB/s of writing and flushing a push's bytes, again and again."""
    folder.mkdir(parents=True, exist_ok=True)
    chunk, path = np.ones(floats, np.float32).data, folder / "raw"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)

    def once() -> None:
        left = memoryview(chunk).cast("B")
        while left:
            left = left[os.write(file, left) :]
        os.fdatasync(file)

    writes, took_s = for_s(seconds, once)
    os.close(file)
    path.unlink()
    return writes * 4 * floats / 1e9 / took_s


def pushed(floats: int, seconds: float, folder: Path) -> float:
    """GB/s of pushes, as many in flight as the client sees fit, into a shard that is `logged`."""
    shutil.rmtree(folder, ignore_errors=True)
    told = {"worker": "w", "transport": "tcp", "patience_s": PATIENCE_S}
    with process_shards(specs_of(floats), durability=Durability.LOGGED, logs=folder) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(hosts.cluster.layout.empty())
        with Client(hosts.cluster, **told) as client:  # type: ignore[arg-type]
            client.pull()
            gradient = np.ones(hosts.cluster.layout.size, np.float32)
            for _ in range(UNCOUNTED):
                client.push(gradient)
            client.flush()
            started = time.monotonic()
            pushes, _ = for_s(seconds, lambda: client.push(gradient))
            client.flush()
            took_s = time.monotonic() - started
    return pushes * 4 * floats / 1e9 / took_s


def recovery_s(megabytes: int, folder: Path) -> float:
    """From the start of a killed shard's successor to its first answer."""
    shutil.rmtree(folder, ignore_errors=True)
    specs = specs_of(megabytes * 250_000)
    with process_shards(specs, durability=Durability.LOGGED, logs=folder) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(hosts.cluster.layout.empty())
        with Client(hosts.cluster, worker="w", patience_s=PATIENCE_S) as client:
            for _ in range(2):
                client.pull()
                client.push(np.ones(hosts.cluster.layout.size, np.float32))
                client.flush()
        os.kill(hosts.pids[0], signal.SIGSTOP)  # its host is to start no successor
    started = time.monotonic()
    with process_shards(specs, durability=Durability.LOGGED, logs=folder) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            (status,) = console.status()
        assert status.version == 2
        return time.monotonic() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--floats", type=int, default=25_000_000)
    parser.add_argument("--state-mb", type=int, default=720)
    parser.add_argument("--folder", type=Path, default=Path("runs/bench/durability"))
    given = parser.parse_args()
    dice = random.Random(5)
    found: dict[str, list[Figures]] = defaultdict(list)
    disk: dict[str, list[float]] = defaultdict(list)
    levels = [Durability.MEMORY, Durability.PROCESS, Durability.LOGGED]
    for _ in range(given.rounds):
        for level in dice.sample(levels, len(levels)):
            found[level].append(update(level, given.floats, given.seconds, given.folder))
        disk["raw"].append(raw_disk(given.floats, given.seconds, given.folder))
        disk["logged"].append(pushed(given.floats, given.seconds, given.folder))

    def median(level: Durability, figure: str) -> float:
        return float(statistics.median(getattr(one, figure) for one in found[level]))

    for level in levels:
        cpu, rate = median(level, "cpu_s_per_gb"), median(level, "gb_per_s")
        print(f"{level:10}{cpu:8.3f} CPU s/GB{rate:8.3f} GB/s")
    raw, logged = (statistics.median(disk[name]) for name in ("raw", "logged"))
    print(f"pushes alone, logged: {logged:.3f} GB/s; the bare disk: {raw:.3f} GB/s")
    took_s = recovery_s(given.state_mb, given.folder)
    shutil.rmtree(given.folder, ignore_errors=True)
    figures = {level: [one._asdict() for one in each] for level, each in found.items()}
    print(f"figures: {save('durability', figures | {'disk': disk, 'recovery_s': took_s})}")
    alone = median(Durability.MEMORY, "cpu_s_per_gb")
    goals(
        [
            Goal("process over memory", median(Durability.PROCESS, "cpu_s_per_gb") / alone, 1.3),
            Goal("logged over the bare disk", logged / raw, 0.8, at_least=True),
            Goal(f"{given.state_mb} MB killed -> serving", took_s, 8, "s"),
        ]
    )


if __name__ == "__main__":
    main()
