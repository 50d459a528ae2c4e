"""Torn reads: every one of many pulls is looked at, while others push as fast as they can.

    python tests/bench/bench_torn.py [--pulls 100000] [--floats 524288] [--pushers 1]
        [--transport tcp]

Every gradient is constant, so a shard's part of the weights is of one value in each version. A pull
in which it is not holds pieces of two. Two shards, the reader and each pusher are a process of
their own; over each transport in turn. Takes an hour on two cores; what it shows does not depend on
what else they do. How many versions were seen is printed: they are to change as the reader looks.
"""

import argparse
import multiprocessing
import time
from contextlib import ExitStack

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from ps.transport.transports import Transport
from tests.bench.report import Goal, goals, save

_SHARDS = 2
CARRIED = [Transport.SHM, Transport.IPC, Transport.TCP]


def push_on(cluster: bytes, name: str, transport: Transport) -> None:
    """Push ones without end."""
    with Client(ps.Cluster.decode(cluster), worker=name, transport=transport) as client:
        versions = client.pull().versions
        while True:
            gradient = client.new_gradient(zeroed=False)
            gradient[:] = 1
            client.push(gradient, read_versions=versions)


def torn(transport: Transport, pulls: int, floats: int, pushers: int) -> tuple[int, int]:
    """In how many of so many pulls a shard's part of the weights was not of one value; and of how
    many versions they were."""
    table = ps.DenseTable("torn", (ps.TensorSpec("all", (floats,)),))
    context, found = multiprocessing.get_context("spawn"), 0
    with ExitStack() as stack:
        hosts = stack.enter_context(process_shards(shard_specs(table, shards=_SHARDS)))
        cluster = hosts.cluster
        with ps.AdminClient(cluster) as console:
            console.install(table.empty())
        others = [
            context.Process(target=push_on, args=(cluster.encode(), f"pusher {n}", transport))
            for n in range(pushers)
        ]
        for other in others:
            other.start()
            stack.callback(other.join)
            stack.callback(other.kill)
        client = stack.enter_context(Client(cluster, worker="reader", transport=transport))
        first = client.pull().versions
        while client.pull().versions == first:  # a process takes a while to begin
            time.sleep(0.01)
        seen = set()
        for _ in range(pulls):
            pulled = client.pull()
            seen.add(pulled.versions)
            parts = [cluster.map.cut(pulled.weights, shard)[0] for shard in range(_SHARDS)]
            found += any(part.min() != part.max() for part in parts)
        assert all(other.is_alive() for other in others), "a pusher gave up"
    return found, len(seen)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pulls", type=int, default=100_000)
    parser.add_argument("--floats", type=int, default=1 << 19)
    parser.add_argument("--pushers", type=int, default=1)
    parser.add_argument("--transport", action="append", choices=CARRIED, help="default: each")
    given = parser.parse_args()
    counted: dict[str, int] = {}
    for kind in given.transport or CARRIED:
        began = time.monotonic()
        found, versions = torn(kind, given.pulls, given.floats, given.pushers)
        counted[str(kind)] = found
        took = time.monotonic() - began
        told = f"{kind}: {found} of {given.pulls} pulls were torn, of {versions} versions"
        print(f"{told}, in {took:.0f} s", flush=True)
    print(save("torn", {"pulls": given.pulls, "floats": given.floats, "torn": counted}))
    goals(Goal(f"torn of {given.pulls} pulls over {k}", n, 0) for k, n in counted.items())


if __name__ == "__main__":
    main()
