"""A large message on a slow link is sent once, however short the sender's timeout."""

from typing import Any

import numpy as np
import pytest

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.transport import multipart
from ps.transport.link_model import parse_link
from ps.transport.send_tracker import LARGE_BYTES, SendTracker
from shards.wire_format import Buffer


class Socket:
    """A socket that keeps each frame that it sends without a copy until it has `left`."""

    def __init__(self) -> None:
        self.leaving: list[Buffer] = []

    def send(self, frame: Buffer, flags: int, copy: bool) -> None:
        if not copy:
            self.leaving.append(frame)


@pytest.fixture
def socket(monkeypatch: pytest.MonkeyPatch) -> Socket:
    """A stand-in for a socket; messages are handed to it while it is in use."""
    monkeypatch.setattr(multipart, "_send", Socket.send)
    return Socket()


def test_only_what_is_large_is_looked_at(socket: Socket) -> None:
    """A small message may be repeated at once."""
    outgoing = SendTracker()
    given: Any = socket
    outgoing.send([(given, [b"x" * 100])], "shard", [1])
    assert not outgoing.in_progress("shard", 1)
    outgoing.send([(given, [b"x"]), (given, [bytes(LARGE_BYTES)])], "shard", [2, 3])
    assert list(map(len, socket.leaving)) == [1, LARGE_BYTES]
    assert [outgoing.in_progress("shard", request) for request in (1, 2, 3, 4)] == [
        False, True, True, False,
    ]  # fmt: skip
    assert not outgoing.in_progress("another", 2)


def test_it_has_left_a_while_after_the_system_took_it(
    socket: Socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The extra time is a quarter of the time in which ZeroMQ handed it over."""
    now = 100.0
    monkeypatch.setattr("ps.transport.send_tracker.time.monotonic", lambda: now)
    outgoing = SendTracker()
    given: Any = socket
    outgoing.send([(given, [bytes(LARGE_BYTES)])], "shard", [1])
    now = 108.0
    assert outgoing.in_progress("shard", 1)
    socket.leaving.clear()
    assert outgoing.in_progress("shard", 1)
    now = 109.9
    assert outgoing.in_progress("shard", 1)
    now = 110.1
    assert not outgoing.in_progress("shard", 1)


def test_a_slow_link_carries_each_array_once() -> None:
    """40 MB at 200 Mbit/s take 1.6 s each way, and the timeout is 0.1 s: the line is filled neither
    with copies of pushes nor of pulled weights.
    """
    table = ps.DenseTable("weights", (ps.TensorSpec("all", (10_000_000,)),))
    with local_shards(shard_specs(table)) as cluster:
        link = parse_link("rtt=10ms,rate=200Mbit")
        with Client(cluster, worker="w", link=link, retry_s=0.1, in_flight=1) as client:
            gradient = np.zeros(table.size, np.float32)
            client.pull()
            client.push(gradient)
            client.flush()
        with ps.AdminClient(cluster) as console:
            (status,) = console.status()
    assert (status.pushes, status.pulls) == (1, 1)
    assert status.duplicates <= 1
