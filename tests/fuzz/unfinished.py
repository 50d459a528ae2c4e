"""Messages of very many frames, and such as never end or come in part: what they cost, and whom
they hold up.

    python -m tests.fuzz.unfinished

attacks a shard, and the coordinator and the copies of a replicated job, in plain text, and a shard
over CURVE as one that has stolen the join token. For each it prints the memory that the attacked
processes took at most beyond what they had before, and the longest that a good worker waited for an
update meanwhile, and whether that meets the goals.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import psutil
import zmq

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_replicas, process_shards
from ps.security.keys import KeyPair, address_of, expect
from ps.transport.striping import TOKEN_BYTES, Cutter
from tests.fuzz.hostile import spoken_to

MOST_BYTES = 64 << 20
MOST_STALL_S = 0.1
_WARM = 200
_AFTER_S = 3.0
_SEND_S = 20.0
_FRAMES = 1_000_000
_ENDLESS_BYTES = 1 << 30
_STRANGERS = 8
_PARTS = 4000
_SMALL_PART, _LARGE_PART = 10_000, 128 << 10  # bytes: the shard refuses large ones of strangers
_PIECE = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)
TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (256,)),))


class Cost(NamedTuple):
    """Of one attack."""

    grown_bytes: int
    stall_s: float


def many_frames(endpoint: str) -> None:
    """One message of a million empty frames, 2 MB on the wire."""
    with contextlib.suppress(OSError), spoken_to(endpoint) as connection:
        for _ in range(10):
            connection.sendall(b"\x01\x00" * (_FRAMES // 10))
        connection.sendall(b"\x00\x00")


def no_end(endpoint: str) -> None:
    """A message of frames of 1 MB each, of which none is the last."""
    with contextlib.suppress(OSError), spoken_to(endpoint) as connection:
        for _ in range(_ENDLESS_BYTES // len(_PIECE)):
            connection.sendall(_PIECE)


def parts_of_strangers(endpoint: str) -> None:
    """First parts of messages that never come whole, from senders that never name the job."""
    with zmq.Context() as context:
        dealers = [context.socket(zmq.DEALER) for _ in range(_STRANGERS)]
        for dealer in dealers:
            dealer.connect(endpoint)
        for number in range(_PARTS):
            size = _LARGE_PART if number % 8 else _SMALL_PART
            part, _ = Cutter(number.to_bytes(TOKEN_BYTES, "big")).cut([bytes(2 * size)], 2)
            with contextlib.suppress(zmq.Again):
                dealers[number % _STRANGERS].send_multipart(part)
        for dealer in dealers:
            dealer.close(linger=1000)


def by_token(endpoint: str, token: str, pieces: Sequence[bytes], times: int) -> None:
    """The same over CURVE: what ZeroMQ sends of a message that is not ended yet."""
    plain, key = address_of(endpoint)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, int(_SEND_S * 1000))
        expect(dealer, key, KeyPair.of(token))
        dealer.connect(plain)
        for number in range(times):
            for piece in pieces:
                last = number == times - 1 and piece is pieces[-1]
                dealer.send(piece, 0 if last else zmq.SNDMORE)
        dealer.setsockopt(zmq.LINGER, 2000)


def cost(pids: Sequence[int], update: Callable[[], None], attack: Callable[[], None]) -> Cost:
    """What an attack costs the processes `pids`, and a worker that updates meanwhile."""
    processes = [psutil.Process(pid) for pid in pids]
    for _ in range(_WARM):
        update()
    before = {one: one.memory_info().rss for one in processes}
    grown, stall_s = 0, 0.0
    attacker = threading.Thread(target=attack)
    attacker.start()
    until = time.monotonic() + _AFTER_S
    while attacker.is_alive() or time.monotonic() < until:
        started = time.monotonic()
        update()
        stall_s = max(stall_s, time.monotonic() - started)
        with contextlib.suppress(psutil.NoSuchProcess):
            grown = max(grown, *(one.memory_info().rss - before[one] for one in processes))
    attacker.join()
    return Cost(grown, stall_s)


def _updates(cluster: ps.Cluster) -> tuple[Client, Callable[[], None]]:
    client = Client(cluster, worker="good", patience_s=60, transport="tcp")

    def update() -> None:
        client.pull()
        client.push(np.ones(TABLE.size, np.float32))
        client.flush()

    return client, update


def one_shard(attack: Callable[[str], None], *, secure: bool = False) -> Cost:
    """Against a shard without copies."""
    specs = shard_specs(TABLE, lease_s=60.0)
    with process_shards(specs, secure=secure) as hosts:
        with ps.AdminClient(hosts.cluster) as console:
            console.install(TABLE.empty())
        client, update = _updates(hosts.cluster)
        with contextlib.closing(client):
            return cost(hosts.pids, update, lambda: attack(hosts.cluster.endpoints[0]))


def a_group(attack: Callable[[str], None]) -> Cost:
    """Against every port of a replicated shard at once: its coordinator's and its copies'."""
    specs = shard_specs(TABLE, lease_s=60.0)
    with process_replicas(specs) as hosts:
        with ps.AdminClient(hosts.cluster) as console:
            console.install(TABLE.empty())
        pids = [one.pid for one in psutil.Process().children()]
        ports = {
            f"tcp://127.0.0.1:{listening.laddr.port}"
            for pid in pids
            for listening in psutil.Process(pid).net_connections("tcp")
            if listening.status == psutil.CONN_LISTEN
        }
        client, update = _updates(hosts.cluster)

        def attack_all() -> None:
            each = [threading.Thread(target=attack, args=(port,)) for port in ports]
            for one in each:
                one.start()
            for one in each:
                one.join()

        with contextlib.closing(client):
            found = cost(pids, update, attack_all)
        assert {one.pid for one in psutil.Process().children()} >= set(pids), "a copy was replaced"
        return found


def _stolen(pieces: Sequence[bytes], times: int) -> Cost:
    specs = shard_specs(TABLE, lease_s=60.0)
    with process_shards(specs, secure=True) as hosts:
        with ps.AdminClient(hosts.cluster) as console:
            console.install(TABLE.empty())
        client, update = _updates(hosts.cluster)
        access = hosts.cluster.access
        assert access is not None
        attack = lambda: by_token(hosts.cluster.endpoints[0], access.token, pieces, times)  # noqa: E731
        with contextlib.closing(client):
            return cost(hosts.pids, update, attack)


def main() -> None:
    attacks: tuple[tuple[str, Callable[[], Cost]], ...] = (
        ("a million empty frames, one shard", lambda: one_shard(many_frames)),
        ("no end, one shard", lambda: one_shard(no_end)),
        ("parts of strangers, one shard", lambda: one_shard(parts_of_strangers)),
        ("a million empty frames, a replicated shard", lambda: a_group(many_frames)),
        ("no end, a replicated shard", lambda: a_group(no_end)),
        ("a million empty frames, by a token's thief", lambda: _stolen([b""], _FRAMES)),
    )
    for what, found in attacks:
        grown, stall_s = found()
        for quantity, text, goal, met in (
            ("memory", f"{grown / 2**20:.0f} MB", "64 MB", grown <= MOST_BYTES),
            ("stall", f"{stall_s * 1000:.0f} ms", "100 ms", stall_s <= MOST_STALL_S),
        ):
            verdict = "met" if met else "short"
            print(f"{what:44} {quantity:7} {text:>8}  goal {goal:>7}  {verdict}", flush=True)


if __name__ == "__main__":
    main()
