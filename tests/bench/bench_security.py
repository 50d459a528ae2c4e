"""What keeping strangers out costs: CURVE's CPU time, a connection's memory, those who don't read.

    python tests/bench/bench_security.py [--floats 4000000] [--updates 24] [--connections 10000]

One shard in a process of its own, over TCP on loopback. Plain text and CURVE take turns, and what
either costs is the CPU time of both processes for a GB carried. Connections are as many as asked
for, or as the descriptors of two processes allow; each has shown a worker's key. The stuck readers
ask for a megabyte of weights again and again and never read, while a worker makes new versions.
Memory is the shard's resident one.
"""

import argparse
import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from ps.launch.single_copies import SingleCopies
from ps.security.enrolment import join
from ps.security.keys import KeyPair, address_of, expect
from ps.transport.transports import Transport
from shards import wire_format
from shards.messages import Read
from tests.bench.report import Goal, goals, save

_SPARE_DESCRIPTORS = 400
_A_SOCKET = 500  # connections of one DEALER
_BATCH = 50
_MEGABYTE = (1 << 20) // 4
_READERS = 8
_ASKED = 64  # times each
_CONNECTED_S = 60.0
Socket = zmq.Socket[bytes]


@contextlib.contextmanager
def a_shard(floats: int, secure: bool) -> Iterator[tuple[SingleCopies, psutil.Process]]:
    """One that has weights."""
    table = ps.DenseTable("weights", (ps.TensorSpec("all", (floats,)),))
    specs = shard_specs(table, lease_s=60.0)
    with process_shards(specs, transport=Transport.TCP, secure=secure) as hosts:
        with ps.AdminClient(hosts.cluster) as console:
            console.install(table.empty())
        yield hosts, psutil.Process(hosts.pids[0])


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def cost(floats: int, updates: int, rounds: int = 4) -> dict[str, float]:
    """CPU seconds a GB, ours and the shard's, in plain text and over CURVE: the median round's."""
    found: dict[str, list[float]] = {"plain": [], "curve": []}
    own = psutil.Process()
    with a_shard(floats, False) as plain, a_shard(floats, True) as curve:
        for _ in range(rounds):
            for name, (hosts, shard) in (("plain", plain), ("curve", curve)):
                with Client(hosts.cluster, worker="w", transport="tcp") as client:
                    _update(client)
                    before = cpu_s(own) + cpu_s(shard)
                    for _ in range(updates // rounds):
                        _update(client)
                    used = cpu_s(own) + cpu_s(shard) - before
                found[name].append(used / (8e-9 * floats * (updates // rounds)))
    return {name: float(np.median(each)) for name, each in found.items()}


def _update(client: Client) -> None:
    client.pull()
    gradient = client.new_gradient(zeroed=False)
    gradient[:] = 0
    client.push(gradient)
    client.flush()


def connections(wanted: int) -> tuple[int, float]:
    """How many connections were authenticated, and what each takes of the shard, bytes."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # the shard's process inherits it
    wanted = min(wanted, hard - _SPARE_DESCRIPTORS)
    context: zmq.Context[Socket] = zmq.Context()
    with a_shard(256, True) as (hosts, shard):
        (endpoint,) = hosts.cluster.endpoints
        own = join(hosts.cluster, "w", [endpoint], 30)
        assert own is not None
        before = shard.memory_info().rss
        made, kept = 0, []
        while made < wanted:
            count = min(_A_SOCKET, wanted - made)
            kept.append(_connected(context, endpoint, own, count))
            made += count
        established = sum(one.status == psutil.CONN_ESTABLISHED for one in shard.net_connections())
        assert established >= made, f"expected {made} connections, got {established}"
        grown = shard.memory_info().rss - before
    context.destroy(linger=0)
    return made, grown / made


def _connected(context: "zmq.Context[Socket]", endpoint: str, own: KeyPair, count: int) -> Socket:
    """A socket with so many connections, each of whose handshakes has succeeded.

    A ROUTER: no other kind connects twice to one place.
    """
    plain, key = address_of(endpoint)
    socket = context.socket(zmq.ROUTER)
    expect(socket, key, own)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    shaken = 0
    for start in range(0, count, _BATCH):
        until = min(count, start + _BATCH)
        for _ in range(start, until):
            socket.connect(plain)
        while shaken < until:
            assert monitor.poll(int(1000 * _CONNECTED_S)), "a handshake did not end"
            recv_monitor_message(monitor)
            shaken += 1
    socket.disable_monitor()
    return socket


def stuck(secure: bool) -> float:
    """By how much the shard grows, bytes, from readers that don't read."""
    context: zmq.Context[Socket] = zmq.Context()
    with a_shard(_MEGABYTE, secure) as (hosts, shard):
        (endpoint,) = hosts.cluster.endpoints
        plain, key = address_of(endpoint)
        access = hosts.cluster.access
        readers = []
        for _ in range(_READERS):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.RCVHWM, 1)
            socket.setsockopt(zmq.RCVBUF, 1 << 16)
            if access is not None:
                expect(socket, key, KeyPair.of(access.operator))
            socket.connect(plain)
            readers.append(socket)
        with Client(hosts.cluster, worker="w", transport="tcp") as client:
            for _ in range(20):
                _update(client)
            before = most = shard.memory_info().rss
            for asked in range(1, _ASKED + 1):
                read = Read(asked, hosts.cluster.job)
                for socket in readers:
                    socket.send_multipart(wire_format.enclose([(read, ())]))
                _update(client)
                most = max(most, shard.memory_info().rss)
    context.destroy(linger=0)
    return float(most - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--floats", type=int, default=4_000_000)
    parser.add_argument("--updates", type=int, default=24)
    parser.add_argument("--connections", type=int, default=10_000)
    given = parser.parse_args()
    started = time.monotonic()
    per_gb = cost(given.floats, given.updates)
    ratio = per_gb["curve"] / per_gb["plain"]
    print(f"CPU s/GB: plain {per_gb['plain']:.2f}, CURVE {per_gb['curve']:.2f}, {ratio:.1f} times")
    made, each = connections(given.connections)
    print(f"{made} authenticated connections, {each / 1024:.1f} KB each")
    held = {name: stuck(name == "curve") for name in ("plain", "curve")}
    for name, grown in held.items():
        print(f"{_READERS} stuck readers of 1 MB, {name}: {grown / 2**20:+.1f} MB")
    load = Path("/proc/loadavg").read_text().split()[0]
    print(f"{time.monotonic() - started:.0f} s, load {load}")
    figures = {"cpu_s_per_gb": per_gb, "connections": made, "bytes_each": each, "stuck": held}
    save("security", figures | {"load": load})
    goals(
        [
            Goal("CURVE's CPU time over plain text's", ratio, 6.0, "x"),
            Goal("authenticated connections", made, 10_000, at_least=True),
            Goal("memory of an authenticated connection", each / 1024, 50.0, "KB"),
            *(
                Goal(f"{_READERS} stuck readers of 1 MB, {name}", grown / 2**20, 64.0, "MB")
                for name, grown in held.items()
            ),
        ]
    )


if __name__ == "__main__":
    main()
