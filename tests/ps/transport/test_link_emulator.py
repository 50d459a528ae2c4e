"""The emulator carries real bytes as the model computes, and ends when it is closed."""

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import parse_link
from shards.errors import BadInput

_TABLE = ps.DenseTable("far", (ps.TensorSpec("w", (3000,)),))


@contextmanager
def echo(server: socket.socket) -> Iterator[None]:
    """Returns to each connection what it sends, until its end."""

    def serve() -> None:
        while True:
            try:
                end, _ = server.accept()
            except OSError:
                return
            with end:
                while read := end.recv(1 << 16):
                    end.sendall(read)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()


def connect(endpoint: str) -> socket.socket:
    host, _, port = endpoint.removeprefix("tcp://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def read_all(end: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        parts.append(end.recv(size))
        assert parts[-1], "the connection was cut"
        size -= len(parts[-1])
    return b"".join(parts)


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_bytes_come_back_as_they_were(kind: str, tmp_path: Path) -> None:
    """Whatever the link does to their timing, no byte is lost, added, changed or reordered."""
    if kind == "tcp":
        server = socket.create_server(("127.0.0.1", 0))
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    else:
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(tmp_path / "s"))
        server.listen()
        endpoint = f"ipc://{tmp_path}/s"
    model = parse_link("rtt=20ms,jitter=5ms,loss=0.1%,rate=400Mbit,window=1MB")
    sent = np.random.default_rng(3).bytes(3_000_000)
    with (
        echo(server),
        closing(LinkEmulator([endpoint], model)) as slow,
        connect(slow.endpoints[0]) as end,
    ):
        sender = threading.Thread(target=end.sendall, args=(sent,))
        started = time.monotonic()
        sender.start()
        assert read_all(end, len(sent)) == sent
        sender.join()
    assert time.monotonic() - started >= len(sent) / model.rate, "no faster than the line"


def pour(end: socket.socket, size: int) -> None:
    with suppress(OSError):  # enough has been seen, and it is cut
        end.sendall(bytes(size))


def test_connections_share_the_line_evenly() -> None:
    """While all four have more to send, each has its share of the output."""
    each, counted = 4_000_000, 800_000
    with socket.create_server(("127.0.0.1", 0)) as server, ExitStack() as stack:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        slow = stack.enter_context(closing(LinkEmulator([endpoint], parse_link("rate=40Mbit"))))
        near = [stack.enter_context(connect(slow.endpoints[0])) for _ in range(4)]
        far = [stack.enter_context(server.accept()[0]) for _ in near]
        senders = [threading.Thread(target=pour, args=(end, each)) for end in near]
        for sender in senders:
            sender.start()
        # Until the last has begun too, and nothing waits at the far ends.
        begun: set[socket.socket] = set()
        while len(begun) < len(far) or select.select(far, [], [], 0)[0]:
            for end in select.select(far, [], [], 60)[0]:
                begun.add(end)
                end.recv(1 << 16)
        come = dict.fromkeys(far, 0)
        while sum(come.values()) < counted:
            for end in select.select(far, [], [], 60)[0]:
                come[end] += len(end.recv(1 << 16))
        for end in (*near, *far):
            end.shutdown(socket.SHUT_RDWR)
        for sender in senders:
            sender.join()
    assert min(come.values()) > counted / 8, come


def test_an_end_is_passed_on() -> None:
    """When one side closes, the other sees it after everything that was sent before."""
    server = socket.create_server(("127.0.0.1", 0))
    endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with server, closing(LinkEmulator([endpoint], parse_link("rtt=20ms"))) as slow:
        near = connect(slow.endpoints[0])
        far, _ = server.accept()
        with far:
            far.settimeout(30)
            near.sendall(b"last words")
            near.close()
            assert read_all(far, 10) == b"last words"
            assert far.recv(1) == b""


def test_a_shard_that_is_not_there_refuses() -> None:
    """A connection to an address without a listener ends at once; the next is tried again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        endpoint = f"tcp://127.0.0.1:{server.getsockname()[1]}"
    with closing(LinkEmulator([endpoint], parse_link("rtt=10ms"))) as slow:
        for _ in range(2):
            with connect(slow.endpoints[0]) as end:
                assert end.recv(1) == b""


@pytest.mark.parametrize("endpoint", ["tcp://nowhere", "udp://h:1", "ipc://", "h:1"])
def test_what_is_no_endpoint_is_named(endpoint: str) -> None:
    """An address that cannot be forwarded to is refused before anything is opened."""
    with pytest.raises(BadInput, match="expected tcp://HOST:PORT or ipc://PATH"):
        LinkEmulator([endpoint], parse_link(""))


def test_a_client_behind_a_link_learns_the_same() -> None:
    """A client behind a link pays the round trip and computes exactly the same weights."""
    specs = shard_specs(_TABLE, shards=2)
    model = parse_link("rtt=30ms,jitter=2ms,rate=100Mbit")
    gradient = np.zeros(_TABLE.size, np.float32)
    gradient[:3000] = np.arange(3000)
    with local_shards(specs) as cluster:
        with Client(cluster, worker="w0", link=model) as shards:
            for _ in range(3):
                shards.pull()
                shards.push(gradient)
            shards.flush()
            assert shards.rtt_s >= 0.02
            learned = shards.pull().weights
        with ps.AdminClient(cluster) as console:
            np.testing.assert_array_equal(console.read(), learned)
    np.testing.assert_allclose(learned, -0.03 * gradient, rtol=1e-5)
    assert not [thread for thread in threading.enumerate() if thread.name == "slow-link"]


def test_weights_are_asked_for_as_early_as_the_link_needs() -> None:
    """With a round trip of many steps, pulls are requested several steps ahead, up to the bound;
    each is answered for its own clock, none with an older version than the one before.
    """
    bound, steps, versions, ahead = 3, 30, [0], 0
    gradient = np.zeros(_TABLE.size, np.float32)
    gradient[:3000] = 1
    with local_shards(shard_specs(_TABLE, bound=bound)) as cluster:
        with Client(cluster, worker="w0", link=parse_link("rtt=120ms")) as shards:
            for step in range(steps):
                ahead = max(
                    ahead, shards.best_prefetch
                )  # a busy machine's steps may be long now and then
                (version,) = shards.pull().versions
                assert step - bound <= version <= step, "no staler than the bound"
                assert version >= versions[-1]
                versions.append(version)
                for further in range(1, min(shards.best_prefetch, bound) + 1):
                    shards.prefetch(step + further)
                shards.push(gradient)
            assert ahead > bound
        with ps.AdminClient(cluster) as console:
            np.testing.assert_allclose(console.read()[:3000], -0.01 * steps, rtol=1e-4)
