"""How much memory a shard and a worker take, and whether it grows.

    python tests/bench/bench_memory.py [--floats 4000000] [--updates 10000] [--rule sgd]

One shard and one worker, each a process, over TCP, where every array is the process's own. Resident
memory is read after a tenth of the updates and at the end, each time the most so far, less what the
process took before it had any weights and a megabyte for the code that the first update loads; in
multiples of the weights. A message that a busy machine answers late is repeated, and its copies
take memory too: how many pushes were is printed.
"""

import argparse
import os
import resource
import time

import numpy as np

from ps.admin_client import AdminClient
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.server.server import ShardServer
from ps.transport.transports import Transport
from shards.rules import RULES
from shards.tables import DenseTable, TensorSpec
from tests.bench.report import Goal, goals, save

BUFFERED = 1.0  # what is on its way in, of one message
CODE = 1 << 20


def most_resident() -> float:
    """This process's largest resident memory so far, bytes."""
    return 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def run(floats: int, updates: int, rule: str) -> dict[str, list[float]]:
    """Bytes above the start, after a tenth of the updates and after all: shard's and worker's.

    And the pushes that had been repeated by then.
    """
    table = DenseTable("weights", (TensorSpec("all", (floats,)),))
    specs = shard_specs(table, rule=RULES[rule](), lease_s=60.0)
    to_parent, from_child = os.pipe(), os.pipe()
    child = os.fork()  # before any thread or socket is there
    if child == 0:
        os.close(to_parent[0])
        os.close(from_child[1])  # or it would never see the end
        shard = os.fdopen(to_parent[1], "w", buffering=1)
        asked = os.fdopen(from_child[0])
        with ShardServer(specs[0], boot=1, transport=Transport.TCP) as server:
            start = most_resident()
            print(server.endpoint, file=shard)
            for _ in asked:
                print(most_resident() - start, file=shard)
        os._exit(0)
    os.close(from_child[0])
    os.close(to_parent[1])
    answers, ask = os.fdopen(to_parent[0]), os.fdopen(from_child[1], "w", buffering=1)
    cluster = make_cluster(specs, [answers.readline().strip()])
    with AdminClient(cluster) as console:
        console.install(table.empty())
    found: dict[str, list[float]] = {"shard": [], "worker": [], "repeated": []}
    with Client(cluster, worker="w", in_flight=1, transport=Transport.TCP) as client:
        start = most_resident()
        for number in range(1, updates + 1):
            replica = client.pull()
            gradient = client.new_gradient(zeroed=False)
            np.multiply(replica.weights, 1e-6, out=gradient)
            del replica
            client.push(gradient)
            del gradient
            if number in (updates // 10, updates):
                print(file=ask)
                found["shard"].append(float(answers.readline()))
                found["worker"].append(most_resident() - start)
                found["repeated"].append(client.duplicates)
    ask.close()
    os.waitpid(child, 0)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--floats", type=int, default=4_000_000)
    parser.add_argument("--updates", type=int, default=10_000)
    parser.add_argument("--rule", choices=sorted(RULES), default="sgd")
    given = parser.parse_args()
    started = time.monotonic()
    found = run(given.floats, given.updates, given.rule)
    weights = 4 * given.floats
    rows = []
    allowed = {"shard": 2 + len(RULES[given.rule].slot_names) + BUFFERED, "worker": 3.0}
    for who, most in allowed.items():
        early, late = found[who]
        rows.append(Goal(f"{who}'s memory over the weights", (late - CODE) / weights, most, "x"))
        growth = (late - early) / weights
        rows.append(Goal(f"{who}'s growth in the last nine tenths", growth, 0.05, "x"))
    print(
        f"{given.updates} updates of {given.floats} floats, {time.monotonic() - started:.0f} s,"
        f" {found['repeated'][-1]:.0f} pushes repeated"
    )
    save("memory", {"floats": given.floats, "updates": given.updates, "bytes": found})
    goals(rows)


if __name__ == "__main__":
    main()
