"""The TCP connections that a bound socket has accepted, and what an unfinished message may cost.

ZeroMQ hands a message over when its last frame has come, and keeps the others until then, however
many they are: its high-water mark counts whole messages, and ZMQ_MAXMSGSIZE single frames. So a
peer that never ends a message would fill the memory of this process, unseen by whoever reads.

The kernel counts the bytes that each connection has received. What came since the last whole
message of a connection, at a moment at which no whole message waits, is part of an unfinished one.
A connection of which that is more than any message of ours takes is reset, and what had come is
freed; a good peer connects again and repeats what was lost.

An empty frame takes 2 bytes on the wire and 64 in ZeroMQ. So a connection that nobody has vouched
for is also reset when this process grows by far more than all unfinished messages have brought.
Where the process does not grow, no connection is looked at.

A message itself costs next to nothing here: only its first frame is kept, one for each sender. At
the next look ZeroMQ says over which connection it came. What came over a Unix socket belongs to no
connection that is counted.

Only Linux counts bytes as this needs them; elsewhere nothing is bounded here.
"""

import ctypes
import os
import socket as sockets
import struct
import time
from contextlib import suppress

import zmq

from ps.transport import multipart
from ps.transport.malloc_tuning import resident_bytes

LOOK_S = 0.02  # in which a link of 1 GB/s brings 20 MB
_CALM_LOOK_S = 0.2  # between two looks while only peers that know the job are connected
_BUSY = 10  # times as long as a look takes, nothing is looked at after it
_SPARE_BYTES = 16 << 20  # beside the arrays of a message: state that travels in a frame of its own
_GROWN_BYTES = 4 << 20
_UNEXPLAINED_BYTES = 8 << 20
_LITTLE_BYTES = 64 << 10
_HANDSHAKE_BYTES = 4 << 10  # and more than that
_EVENT = struct.Struct("=HI")
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED = struct.Struct("=Q"), 128  # in struct tcp_info, from <linux/tcp.h>
_READABLE = int(zmq.POLLIN)
_GONE = int(zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)


class _Connection:
    """One that was accepted; `whole_at` is what it had received by its last whole message."""

    def __init__(self, fd: int, peer: object) -> None:
        self.fd, self.peer = fd, peer
        self.whole_at = self.received = 0
        self.heard = self.vouched = False

    @property
    def unfinished(self) -> int:
        return self.received - self.whole_at


class Accepted:
    """Those of one bound ROUTER.

    Its loop calls `look` when nothing has come for LOOK_S, then as often as `look` says, and when
    `events` can be read: a new connection wakes the loop.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        arrays_bytes: int,
        *,
        peers: int = 1,
        most_frames: int = multipart.MOST_FRAMES,
    ) -> None:
        """A message holds arrays of up to `arrays_bytes`, and `peers` may send one at a time."""
        self._socket, self._most_frames = socket, most_frames
        self._most_bytes = arrays_bytes + _SPARE_BYTES
        self._most_together = arrays_bytes * peers + 2 * _SPARE_BYTES
        self._connections: dict[int, _Connection] = {}
        self._calm_bytes = 0
        self._look_at = 0.0
        # Since the last look, by sender: its last whole message, and the last one vouched for.
        self._heard: dict[bytes, zmq.Frame] = {}
        self._vouched: dict[bytes, zmq.Frame] = {}
        self.reset = 0
        where = f"inproc://accepted-{id(self)}"
        socket.monitor(where, int(zmq.EVENT_ACCEPTED) | _GONE)
        self.events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # or ZeroMQ's thread would wait for us
        self.events.setsockopt(zmq.LINGER, 0)
        self.events.connect(where)

    def arrived(self, most: int) -> list[list[zmq.Frame]]:
        """Up to `most` messages that wait, as their frames; each proves its connection alive."""
        came = multipart.arrived(self._socket, most, self._most_frames, self._drop_sender)
        for message in came:
            self._heard[message[0].bytes] = message[0]
        if len(came) < most and time.monotonic() >= self._look_at:
            self.look()
        return came

    def vouch(self, frame: zmq.Frame) -> None:
        """The sender of `frame`, a message's first, knows the job: it may have grown for a reason.

        This counts from the next look on. A look before it does no harm: `arrived` has heard a
        whole message of this sender, so nothing of it is unfinished then.
        """
        self._vouched[frame.bytes] = frame

    def look(self) -> float:
        """Reset the connections whose unfinished messages cost too much.

        Call it when no whole message waits: what one that waits has brought is not unfinished.
        Returns in how many seconds to call it next, if nothing comes meanwhile.
        """
        now = time.monotonic()
        self._hear_events()  # or they would wake the loop again at once
        if now < self._look_at or int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return max(LOOK_S, self._look_at - now)
        self._settle()
        resident = resident_bytes()
        if resident > self._calm_bytes + _GROWN_BYTES:
            self._weigh(resident)
        # Nobody is woken by an unfinished message, so an unknown peer is watched closely from the
        # moment at which it connects. Peers that know the job are members of it, whose messages
        # have no bound on the rate: they are watched closely once the process grows.
        calm = resident <= self._calm_bytes + _GROWN_BYTES and all(
            connection.vouched for connection in self._connections.values()
        )
        after = time.monotonic()
        period_s = _CALM_LOOK_S if calm else LOOK_S
        wait_s = max(period_s, _BUSY * (after - now))
        self._look_at = after + wait_s
        return wait_s

    def _weigh(self, resident: int) -> None:
        self._count()
        unfinished = sorted(
            (one for one in self._connections.values() if one.unfinished > 0),
            key=lambda one: one.unfinished,
        )
        total = sum(one.unfinished for one in unfinished)
        if total <= _LITTLE_BYTES:
            self._calm_bytes = max(self._calm_bytes, resident)
            return
        if self._reset_worst(unfinished, total, resident - self._calm_bytes):
            # What is freed is given back later, and must not be blamed on others meanwhile.
            self._calm_bytes = max(self._calm_bytes, resident - _UNEXPLAINED_BYTES)

    def _reset_worst(self, unfinished: list[_Connection], total: int, grown: int) -> int:
        """How many were reset of those that have `unfinished` messages, the largest last."""
        before = self.reset
        while unfinished and unfinished[-1].unfinished > self._most_bytes:
            total -= self._reset(unfinished.pop())
        strangers = [one for one in unfinished if not one.vouched]
        while strangers and total > self._most_together:
            total -= self._reset(strangers.pop())
        if self.reset == before and grown > _UNEXPLAINED_BYTES + 2 * total:
            for one in strangers:
                if one.unfinished > _HANDSHAKE_BYTES:
                    self._reset(one)
        return self.reset - before

    def _count(self) -> None:
        self._settle()
        for connection in list(self._connections.values()):
            received = _received(connection.fd)
            if received is None:
                del self._connections[connection.fd]
                continue
            connection.received = received
            if connection.heard:
                connection.whole_at, connection.heard = received, False

    def _settle(self) -> None:
        """Note which connections the messages since the last look came over."""
        self._hear_events()
        heard, self._heard = self._heard, {}
        vouched, self._vouched = self._vouched, {}
        if self._connections:
            for frame in heard.values():
                if (connection := self._connections.get(_fd(frame))) is not None:
                    connection.heard = True
            for frame in vouched.values():
                if (connection := self._connections.get(_fd(frame))) is not None:
                    connection.vouched = True

    def _hear_events(self) -> None:
        while zmq.zmq_poll([(self.events, _READABLE)], 0):
            packed, _ = self.events.recv_multipart(zmq.NOBLOCK)
            event, fd = _EVENT.unpack(packed)
            if self._connections.pop(fd, None) is not None:
                # Its number may be another's by the next look.
                self._heard = _not_over(fd, self._heard)
                self._vouched = _not_over(fd, self._vouched)
            if event == zmq.EVENT_ACCEPTED and (peer := _peer(fd)) is not None:
                self._connections[fd] = _Connection(fd, peer)
                self._look_at = min(self._look_at, time.monotonic() + LOOK_S)

    def _drop_sender(self, frame: zmq.Frame) -> None:
        """Reset the connection that it came over, if that is a TCP connection and still there."""
        self._hear_events()
        if (connection := self._connections.get(_fd(frame))) is not None:
            self._reset(connection)

    def _reset(self, connection: _Connection) -> int:
        """Have the kernel forget it and what it holds of it; how much was unfinished."""
        self._connections.pop(connection.fd, None)
        with suppress(OSError):
            # A copy, so that this is the same connection throughout, whatever ZeroMQ does.
            copy = os.dup(connection.fd)
            try:
                if _peer(copy) == connection.peer:
                    _disconnect(copy)
                    self.reset += 1
            finally:
                os.close(copy)
        return connection.unfinished


def _fd(frame: zmq.Frame) -> int:
    with suppress(zmq.ZMQError):
        return int(frame.get(zmq.SRCFD))
    return -1


def _not_over(fd: int, kept: dict[bytes, zmq.Frame]) -> dict[bytes, zmq.Frame]:
    return {sender: frame for sender, frame in kept.items() if _fd(frame) != fd}


def _received(fd: int) -> int | None:
    """How many bytes have come over it in all; None where it is no TCP connection any more."""
    field, at = _BYTES_RECEIVED
    size = ctypes.c_uint32(_TCP_INFO_BYTES)
    info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
    failed = _libc.getsockopt(fd, sockets.IPPROTO_TCP, sockets.TCP_INFO, info, ctypes.byref(size))
    if failed or size.value < _TCP_INFO_BYTES:
        return None
    return int(field.unpack_from(info, at)[0])


def _peer(fd: int) -> tuple[bytes, int] | None:
    """Who is at the other end; None where it is no TCP connection that can be counted."""
    name = ctypes.create_string_buffer(128)
    size = ctypes.c_uint32(len(name))
    if _libc.getpeername(fd, name, ctypes.byref(size)) or _received(fd) is None:
        return None
    return name.raw[: size.value], size.value


def _disconnect(fd: int) -> None:
    """Reset a TCP connection: what ZeroMQ has not read of it yet, it will not read.

    Shutting it down would leave up to some megabytes to be read.
    """
    nobody = struct.pack("=H14x", sockets.AF_UNSPEC)
    if _libc.connect(fd, nobody, len(nobody)):
        with sockets.socket(fileno=os.dup(fd)) as copy, suppress(OSError):
            copy.shutdown(sockets.SHUT_RDWR)


_libc = ctypes.CDLL(None)
