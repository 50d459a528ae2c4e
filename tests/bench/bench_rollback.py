"""What the saves of a shard at `memory` cost, and what its death takes back.

    python tests/bench/bench_rollback.py [--rounds 2] [--seconds 40] [--floats 25000000] [--kills 3]

An *update* is a worker pushing N float32 and pulling N float32 over TCP, plain SGD, one shard; a GB
counts both ways. Rounds visit a shard that saves its state every ten seconds and one that saves
none in a freshly shuffled order; CPU seconds are those of both processes. Then a shard that saves
is killed by signal 9 while a worker pushes, at a random moment of the time between two saves: what
that takes back is the time from the newest update that is left to the kill.
"""

import argparse
import os
import random
import signal
import statistics
import time
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from ps import AdminClient
from ps.client import Client
from ps.launch.processes import process_shards
from ps.wal.autosave import ROLLBACK_S
from tests.bench.bench_durability import PATIENCE_S, for_s, measured, specs_of
from tests.bench.report import Goal, goals, save


class Death(NamedTuple):
    """What one has cost: seconds of updates, and seconds until the worker is acknowledged again."""

    back_s: float
    again_s: float


def cpu_s_per_gb(floats: int, seconds: float, rollback_s: float) -> float:
    with process_shards(specs_of(floats), rollback_s=rollback_s) as hosts:
        return measured(hosts, seconds).cpu_s_per_gb


def deaths(floats: int, kills: int, dice: random.Random) -> list[Death]:
    found = []
    with process_shards(specs_of(floats), rollback_s=ROLLBACK_S) as hosts:
        with AdminClient(hosts.cluster, patience_s=PATIENCE_S) as console:
            console.install(hosts.cluster.layout.empty())
        with Client(hosts.cluster, worker="w", transport="tcp", patience_s=PATIENCE_S) as client:
            gradient = np.ones(hosts.cluster.layout.size, np.float32)
            made = {0: time.monotonic()}  # when each version was acknowledged

            def once() -> None:
                version = client.pull().versions[0]
                client.push(gradient)
                client.flush()
                made[version + 1] = time.monotonic()

            for _ in range(kills):
                for_s(dice.uniform(ROLLBACK_S, 2 * ROLLBACK_S), once)
                os.kill(hosts.pids[0], signal.SIGKILL)
                killed_at = time.monotonic()
                client.push(gradient)
                client.flush()
                again_s = time.monotonic() - killed_at
                left = client.rolled_back[0].version
                found.append(Death(killed_at - made[left], again_s))
                print(f"back to version {left}: {found[-1].back_s:.1f} s; again in {again_s:.1f} s")
                made = {client.pull().versions[0]: time.monotonic()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--floats", type=int, default=25_000_000)
    parser.add_argument("--kills", type=int, default=3)
    given = parser.parse_args()
    dice = random.Random(7)
    spent: dict[float, list[float]] = defaultdict(list)
    for _ in range(given.rounds):
        for rollback_s in dice.sample([0.0, ROLLBACK_S], 2):
            spent[rollback_s].append(cpu_s_per_gb(given.floats, given.seconds, rollback_s))
            print(f"saves each {rollback_s:g} s: {spent[rollback_s][-1]:.3f} CPU s/GB")
    without, saving = (statistics.median(spent[each]) for each in (0.0, ROLLBACK_S))
    died = deaths(given.floats, given.kills, dice)
    figures = {"cpu_s_per_gb": {str(each): told for each, told in spent.items()}, "deaths": died}
    print(f"figures: {save('rollback', figures)}")
    goals(
        [
            Goal("CPU a GB with saves over none", saving / without, 1.02),
            Goal("taken back, the longest", max(one.back_s for one in died), ROLLBACK_S, "s"),
        ]
    )


if __name__ == "__main__":
    main()
