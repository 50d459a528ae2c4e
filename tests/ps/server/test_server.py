"""The server loop: it survives whatever a peer sends, or fails to send."""

import contextlib
import gc
import os
import random
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
import zmq

import ps
from cupy_kernels.backends import HOST
from ps import AdminClient
from ps.client import Client
from ps.job_spec import expect_compression, make_cluster, shard_specs
from ps.server import server as server_module
from ps.server.server import ShardServer
from ps.transport import unfinished_messages
from shards import wire_format
from shards.errors import BadInput
from shards.messages import (
    PROTOCOL,
    AskStatus,
    Hello,
    Install,
    Kind,
    Message,
    Read,
    Refusal,
    Remedy,
    Reply,
)
from shards.rules import Adam
from shards.schedules import Fixed
from shards.shard_status import Standing
from shards.spec import ShardSpec
from tests.fuzz.hostile import spoken_to
from tests.support.eventually import eventually
from tests.support.shard_dsl import blank
from tests.support.slow_clock import held_up, standings

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (512,)),))
SEED = 20


def spec_of(**options: Any) -> ShardSpec:
    (spec,) = shard_specs(TABLE, schedule=Fixed(base_rate=1.0), **options)
    return spec


@pytest.fixture
def server() -> Iterator[ShardServer]:
    """One shard with zeros installed."""
    with ShardServer(spec_of(), boot=1) as running:
        with AdminClient(make_cluster([running.shard.spec], [running.endpoint])) as console:
            console.install(TABLE.empty())
        yield running


def alone(message: Message, *frames: bytes) -> list[bytes]:
    """An envelope that holds one message."""
    return [bytes(part) for part in wire_format.enclose([(message, frames)])]


class Peer:
    """A DEALER that sends arbitrary frames."""

    def __init__(self, server: ShardServer) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, 60_000)
        self.socket.connect(server.endpoint)

    def ask(self, *frames: bytes) -> Reply:
        """Send a message, and read the next answer."""
        self.socket.send_multipart(frames)
        first, *rest = self.socket.recv_multipart()
        ((header, _),) = wire_format.disclose(first, rest)
        return wire_format.decode_reply(header)

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exc: object) -> None:
        self._context.destroy(linger=0)


def serves(server: ShardServer) -> bool:
    """Whether a worker can still join, pull, push and leave."""
    server.check()
    cluster = make_cluster([server.shard.spec], [server.endpoint])
    with Client(cluster, worker="probe", patience_s=60) as client:
        before = client.pull().versions[0]
        client.push(np.ones(512, np.float32))
        return client.pull().versions == (before + 1,)


def test_a_shard_is_prepared_before_it_is_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """It prepares for the expected work, on the backend that holds its weights."""
    prepared: list[Any] = []
    monkeypatch.setattr(ShardSpec, "prepare", lambda *told: prepared.append(told))
    compression = ps.Compression.parse("topk:0.1", "int8")
    (spec,) = expect_compression([spec_of()], compression)
    assert (spec.tables[0].pushed, spec.tables[0].pulled) == (Kind.SPARSE, Kind.INT8)
    with ShardServer(spec, boot=1):
        assert prepared == [(spec, HOST)]


def test_a_stall_is_nobodys_silence() -> None:
    """A push takes many leases, and no worker is expired before its waiting messages are read."""
    with ShardServer(spec_of(lease_s=60.0, bound=0), boot=1) as running:
        cluster = make_cluster([running.shard.spec], [running.endpoint])
        with AdminClient(cluster) as console:
            console.install(TABLE.empty())
            with Client(cluster, worker="a") as client, Client(cluster, worker="b") as other:
                client.pull()
                other.pull()
                with held_up(server_module, 1000.0) as spent:
                    client.push(np.ones(512, np.float32))
                    client.flush()
                    found = standings(console)
                    other.push(np.ones(512, np.float32))
                    other.flush()
                assert (spent, found) == ([1000.0] * 2, dict.fromkeys("ab", Standing.ACTIVE))
                assert standings(console) == found


def mangled(server: ShardServer) -> Iterator[Sequence[bytes]]:
    """Malformed messages, each of another kind."""
    job = server.shard.spec.job
    (hello,) = alone(Hello(1, job, "w", 0, PROTOCOL, "b"))
    yield [b""]
    yield [b"", b""]
    yield [b""] * 1000
    yield [hello[:-1]]
    yield [b"", hello]
    yield [os.urandom(4096)]
    yield [bytes(5000)]
    yield [bytes(10_000_000)]
    yield [b"\x91" * 4096]
    yield [b"\xdf\xff\xff\xff\xff"]
    yield [b"\xc1", *[bytes(100_000)] * 50]
    dice = random.Random(SEED)
    for _ in range(200):
        yield [dice.randbytes(dice.randrange(100)) for _ in range(dice.randrange(1, 5))]
    for _ in range(200):
        at = dice.randrange(len(hello))
        yield [hello[:at] + dice.randbytes(1) + hello[at + 1 + dice.randrange(3) :]]


def test_mangled_messages_are_refused(server: ShardServer) -> None:
    """Each gets a refusal, and the shard continues; the same peer can still be served."""
    refused = 0
    with Peer(server) as peer:
        for frames in mangled(server):
            answer = peer.ask(*frames)
            assert isinstance(answer, Refusal), (frames, answer)
            refused += 1
        status = AskStatus(7, server.shard.spec.job)
        assert peer.ask(*alone(status)).request == 7
    assert server.shard.status().refused == refused
    assert serves(server)


def test_frames_too_many_or_too_large_for_what_they_come_with(server: ShardServer) -> None:
    """A request without frames ignores extra ones; an install and a read check theirs; others' are
    bad."""
    job = server.shard.spec.job
    with Peer(server) as peer:
        reply = peer.ask(*alone(AskStatus(3, job), *[b"x"] * 1000))
        assert (reply.request, type(reply).__name__) == (3, "Status")
        refusal = peer.ask(*alone(Read(3, job), *[b"x"] * 1000))
        assert isinstance(refusal, Refusal)
        assert (refusal.request, refusal.remedy) == (3, Remedy.BAD_MESSAGE)
        reply = peer.ask(*alone(Read(3, job)))
        assert (reply.request, type(reply).__name__) == (3, "Weights")
        refusal = peer.ask(*alone(Read(3, job)), b"x")
        assert isinstance(refusal, Refusal)
        assert refusal.text.startswith("envelope: its headers take")
        assert refusal.text.endswith("and 1")
        for frames in ([], [b""] * 1000, [bytes(1), bytes(2048)]):
            refusal = peer.ask(*alone(Install(4, job), *frames))
            assert isinstance(refusal, Refusal)
            assert refusal.remedy is Remedy.BAD_MESSAGE
    assert serves(server)


def test_an_oversized_frame_ends_its_own_connection(server: ShardServer) -> None:
    """It is dropped before it is stored: the server does not answer, and does not grow."""
    before = psutil.Process().memory_info().rss
    with Peer(server) as peer:
        peer.socket.setsockopt(zmq.RCVTIMEO, 500)
        peer.socket.send(bytes(wire_format.MAX_STATE_BYTES + 1), copy=False)
        with pytest.raises(zmq.Again):
            peer.socket.recv()
    assert serves(server)
    assert psutil.Process().memory_info().rss - before < 200 << 20


def test_a_stranger_wakes_an_idle_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    """However rarely an idle shard looks at its connections: a new one makes it look at once, and
    soon again, so that a message without an end is noticed.

    The process pretends to grow by what was sent: memory that earlier tests have freed could hold
    it all.
    """
    sent = 0
    monkeypatch.setattr(unfinished_messages, "_CALM_POLL_S", 3600.0)
    monkeypatch.setattr(unfinished_messages, "resident_bytes", lambda: (100 << 20) + sent)
    piece = b"\x03" + (1 << 20).to_bytes(8, "big") + bytes(1 << 20)  # of 1 MB, and not the last
    with ShardServer(spec_of(lease_s=14400.0), boot=1) as server:
        (own,) = server._shard_endpoint._sockets._accepted
        eventually(
            lambda: own._look_at >= time.monotonic() + 1800,
            because="an idle shard looks at its connections rarely",
        )
        with spoken_to(server.endpoint) as stranger:
            stranger.settimeout(60)  # and a time-out is a failure
            with contextlib.suppress(ConnectionError):
                for _ in range(64):
                    stranger.sendall(piece)
                    sent += len(piece)
                while stranger.recv(1 << 16):
                    pass
        eventually(lambda: own.reset == 1, because="the connection has been reset")


def test_strangers_and_peers_that_vanish(server: ShardServer) -> None:
    """Other protocols, half a handshake, half a message, a peer that is gone before its answer."""
    host, port = server.endpoint.removeprefix("tcp://").split(":")
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\x00NULL" + bytes(48)
    for noise in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(5000), greeting, greeting[:20]):
        for _ in range(10):
            with socket.create_connection((host, int(port))) as stranger:
                stranger.sendall(noise)
    for _ in range(20):
        with Peer(server) as peer:
            peer.socket.send_multipart(alone(Read(1, server.shard.spec.job)))
            peer.socket.send(b"half", zmq.SNDMORE)
    assert serves(server)


def test_a_parked_worker_that_vanishes(server: ShardServer) -> None:
    """Its answer has no receiver, which is not an error."""
    with ShardServer(spec_of(bound=0, lease_s=2.0), boot=1) as strict:
        cluster = make_cluster([strict.shard.spec], [strict.endpoint])
        with AdminClient(cluster) as console:
            console.install(TABLE.empty())
        slow, fast = Client(cluster, worker="slow"), Client(cluster, worker="fast")
        fast.pull()
        fast.push(np.ones(512, np.float32))
        fast.prefetch(1)
        fast.flush()
        fast.abort()
        slow.pull()
        slow.push(np.ones(512, np.float32))
        slow.close()
        assert serves(strict)


def test_leases_run_out_while_messages_pour_in(server: ShardServer) -> None:
    """A flood from one peer does not keep the loop from checking its clock."""
    with ShardServer(spec_of(lease_s=0.4), boot=1) as quick:
        cluster = make_cluster([quick.shard.spec], [quick.endpoint])
        with AdminClient(cluster) as console:
            console.install(TABLE.empty())
        Client(cluster, worker="gone").abort()
        (read,) = alone(Read(1, quick.shard.spec.job))
        with Peer(quick) as peer:

            def flood() -> bool:
                for _ in range(100):
                    peer.ask(read)
                return not quick.shard.ledger.active

            eventually(flood, because="the lease of the worker that is gone runs out")


# --- beginning and end ----------------------------------------------------------------------------


def test_a_port_in_use() -> None:
    """The error names the shard and the address, and leaves nothing open."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        bind = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(BadInput) as caught:
            ShardServer(spec_of(), boot=1, bind=bind)
        assert str(caught.value) == f"shard 0 cannot listen on {bind!r}: Address already in use"
    with ShardServer(spec_of(), boot=1, bind=bind) as server:
        assert server.endpoint == bind


@pytest.mark.parametrize(
    "bind", ["", "tcp://", "tcp://999.1.1.1:5", "tcp://127.0.0.1:x", "udp://a"]
)
def test_an_address_that_is_none(bind: str) -> None:
    """The error names it as it was given."""
    with pytest.raises(BadInput, match="shard 0 cannot listen on") as caught:
        ShardServer(spec_of(), boot=1, bind=bind)
    assert bind in str(caught.value)


def test_stopping_frees_the_port_and_the_thread() -> None:
    """Stopping twice is harmless, and a server that was never started can be stopped."""
    server = ShardServer(spec_of(), boot=1)
    before = set(threading.enumerate())  # of which some may end meanwhile
    server.start()
    assert len(set(threading.enumerate()) - before) == 1
    server.stop()
    server.stop()
    assert not set(threading.enumerate()) - before
    again = ShardServer(spec_of(), boot=2, bind=server.endpoint)
    again.stop()


def test_one_that_is_dropped_lets_go() -> None:
    """A server that is dropped without start or stop frees its port when collected."""
    server = ShardServer(spec_of(), boot=1)
    endpoint = server.endpoint
    del server
    gc.collect()
    ShardServer(spec_of(), boot=2, bind=endpoint).stop()


def test_a_failure_of_the_loop_is_told(
    server: ShardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in our own code is not swallowed: `check` and `stop` raise it."""
    with ShardServer(spec_of(), boot=1) as broken:
        monkeypatch.setattr(broken.shard, "handle_together", lambda *_: 1 // 0)
        with Peer(broken) as peer:
            peer.socket.send_multipart(alone(Read(1, broken.shard.spec.job)))
            broken._thread.join(60)
        with pytest.raises(ZeroDivisionError):
            broken.check()
        with pytest.raises(ZeroDivisionError):
            broken.stop()
        broken._failure = None
    assert serves(server)


def test_a_shard_that_comes_back_is_gone_on_with() -> None:
    """A worker survives a restart on the same port: every push counts once in the new shard."""
    first = ShardServer(spec_of(), boot=1).start()
    cluster = make_cluster([first.shard.spec], [first.endpoint])
    with AdminClient(cluster) as console:
        console.install(TABLE.empty())
        client = Client(cluster, worker="w", retry_s=0.2)
        for _ in range(5):
            client.pull()
            client.push(np.ones(512, np.float32))
        client.flush()
        (state,) = console.export()
        first.stop()
        with ShardServer(first.shard.spec, boot=2, bind=first.endpoint) as second:
            with AdminClient(cluster) as fresh:
                fresh.restore(0, state)
                for _ in range(5):
                    client.pull()
                    client.push(np.ones(512, np.float32))
                client.close()
                assert set(fresh.read()) == {-10.0}
            (worker,) = second.shard.status().workers
            assert msgspec.structs.asdict(worker)["seq"] == 10


def test_free_moments_are_used() -> None:
    """Slots that are being read are copied while no message comes, before the next push does."""
    server = ShardServer(spec_of(rule=Adam()), boot=1)
    server.shard.restore(blank(spec=server.shard.spec))
    held = server.shard.copy()
    with server:
        eventually(lambda: server.shard.is_prepared, because="the slots are copied")
    assert server.shard.parameters.parts["net"]._moved == TABLE.size  # type: ignore[attr-defined]
    del held
