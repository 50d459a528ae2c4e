"""LeNet on one host with two cores, and on two hosts with one each: what does the network cost?

    python -m tests.bench.two_hosts [--rounds 3] [--steps 400]

The hosts are namespaces of this machine (tests/bench/packed_cluster.py), so both have the same
cores; between two hosts gradients travel over TCP, within one through shared memory, and in a
further way over TCP as well, which shows what of the difference that is. Each host has a node of
Ray and a worker of Spark; the driver is on the first. Ray places the two shards. The ways take
turns. The speed is that of the updates in the middle eight tenths of the run. It needs root
and namespaces, and other work on the cores spoils it.
"""

import argparse
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from tests.bench.packed_cluster import (
    HOME,
    LIMIT_S,
    TRAIN,
    cluster,
    packed_files,
    submit_command,
)
from tests.bench.report import Goal, goals
from tests.support.hosts import bare_hosts, missing_for_bare_hosts

WAYS: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "one host": ((2,), ()),
    "one host over TCP": ((2,), ("--transport", "tcp")),
    "two hosts": ((1, 1), ()),
}
"""The cores of Spark's worker on each host, and further options of the run."""
_SLOWER = 1.05


def main() -> None:
    """Pack, train in turns, and print the goal."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    if reason := missing_for_bare_hosts():
        sys.exit(f"skipped: {reason}")
    times_slower: dict[str, list[float]] = {way: [] for way in WAYS}
    with packed_files() as (folder, files):
        for number in range(options.rounds):
            speeds = {
                way: measure_speed(folder / f"{number} {way}", files, way, options.steps)
                for way in WAYS
            }
            print(", ".join(f"{way}: {speed:.1f} updates/s" for way, speed in speeds.items()))
            for way, speed in speeds.items():
                times_slower[way].append(speeds["one host"] / speed)
    medians = {way: statistics.median(ratios) for way, ratios in times_slower.items()}
    print(f"one host over TCP: {medians['one host over TCP']:.3f} times slower than one host")
    goals([Goal("two hosts: times slower than one", medians["two hosts"], _SLOWER)])


def measure_speed(folder: Path, files: Mapping[str, Path], way: str, steps: int) -> float:
    """Train in one of the ways; returns the updates a second."""
    cores, more = WAYS[way]
    folder.mkdir()
    names = ["one", "two"][: len(cores)]
    with bare_hosts(folder, names, files) as hosts:
        head = hosts[0]
        with cluster(folder, dict(zip(hosts, cores, strict=True)), guarded=False) as environ:
            words = [*TRAIN, "--ray", f"{head.address}:6379", "--max-iter", str(steps), *more]
            command = submit_command(head, words, guarded=False)
            done = head.run(*command, environ=environ, timeout=LIMIT_S)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        rows = pq.read_table(head.path(f"{HOME}/lenet/updates.parquet")).to_pandas()
    times = np.sort(rows[rows["shard"] == 0]["time"].to_numpy())
    assert len(times) == 2 * steps, len(times)
    first, last = len(times) // 10, 9 * len(times) // 10
    return float((last - first) / (times[last] - times[first]))


if __name__ == "__main__":
    main()
