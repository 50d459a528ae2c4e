"""Bounds the memory that unfinished messages on the accepted TCP connections of a socket can take.

ZeroMQ hands a message over when its last frame has arrived, and keeps the others until then,
without limit: its high-water mark counts whole messages, and ZMQ_MAXMSGSIZE single frames. So a
peer that never ends a message would fill the memory of this process, invisibly to the receiver.

The kernel counts the bytes that each connection has received. Bytes since the last whole message of
a connection, at a moment when no whole message waits, belong to an unfinished one. A connection
with more of them than any legitimate message takes is reset, and its memory is freed; a legitimate
peer connects again and repeats what was lost.

An empty frame takes 2 bytes on the wire and 64 in ZeroMQ. So a connection that has not been trusted
for (`vouch`) is also reset when this process grows by far more than the bytes of all unfinished
messages. While the process does not grow, no connection is checked.

A message costs next to nothing here: only its first frame is kept, one for each sender. The next
look asks ZeroMQ over which connection that frame came. Unix sockets are not counted.

Only Linux provides these byte counts; elsewhere nothing is bounded here.
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

POLL_S = 0.02  # in which a link of 1 GB/s brings 20 MB
_CALM_POLL_S = 0.2  # between two checks while only peers that know the job are connected
_BUSY = 10  # after a look, pause for this multiple of its duration
_SPARE_BYTES = 16 << 20  # besides a message's arrays: state that travels in a frame of its own
_GROWN_BYTES = 4 << 20  # growth of the process after which its connections are checked
_UNEXPLAINED_BYTES = 8 << 20  # growth beyond the unfinished bytes that strangers are reset for
_LITTLE_BYTES = 64 << 10  # unfinished bytes of all connections that do not explain any growth
_HANDSHAKE_BYTES = 4 << 10  # a handshake needs less than this
_EVENT = struct.Struct("=HI")
_TCP_INFO_BYTES = 136
_BYTES_RECEIVED = struct.Struct("=Q"), 128  # in struct tcp_info, from <linux/tcp.h>
_READABLE = int(zmq.POLLIN)
_GONE = int(zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)


class _Connection:
    """An accepted connection; `whole_at` is its byte count at its last whole message."""

    def __init__(self, fd: int, peer: object) -> None:
        self.fd, self.peer = fd, peer
        self.whole_at = self.received = 0
        self.heard = self.trusted = False

    @property
    def partial_bytes(self) -> int:
        return self.received - self.whole_at


class Accepted:
    """The connections of one bound ROUTER.

    Its loop calls `check_connections` when nothing has come for POLL_S, then after the time that it
    returns, and when `events` can be read, so that a new connection wakes the loop.
    """

    def __init__(
        self,
        socket: "zmq.Socket[bytes]",
        arrays_bytes: int,
        *,
        peers: int = 1,
        max_frames: int = multipart.MAX_FRAMES,
    ) -> None:
        """Messages hold arrays of up to `arrays_bytes`; each of `peers` may send one at a time."""
        self._socket = socket
        self._inbox = multipart.Inbox(socket, max_frames, self._drop_sender)
        self._max_bytes = arrays_bytes + _SPARE_BYTES
        self._most_together = arrays_bytes * peers + 2 * _SPARE_BYTES
        self._connections: dict[int, _Connection] = {}
        self._calm_bytes = 0
        self._look_at = 0.0
        # Since the last look, by sender: its last whole message, and its last one that was trusted.
        self._heard: dict[bytes, zmq.Frame] = {}
        self._trusted: dict[bytes, zmq.Frame] = {}
        self.reset = 0
        where = f"inproc://accepted-{id(self)}"
        socket.monitor(where, int(zmq.EVENT_ACCEPTED) | _GONE)
        self.events: zmq.Socket[bytes] = socket.context.socket(zmq.PAIR)
        self.events.setsockopt(zmq.RCVHWM, 0)  # with a limit, ZeroMQ's thread would wait for us
        self.events.setsockopt(zmq.LINGER, 0)
        self.events.connect(where)

    def take_messages(self, most: int) -> list[list[zmq.Frame]]:
        """Up to `most` waiting messages, as their frames; each marks its connection as heard."""
        came = self._inbox.take_messages(most)
        for message in came:
            self._heard[message[0].bytes] = message[0]
        if len(came) < most and time.monotonic() >= self._look_at:
            self.check_connections()
        return came

    def trust(self, frame: zmq.Frame) -> None:
        """The sender of `frame`, a message's first, knows the job, so its messages may be large.

        This takes effect at the next look. An earlier look does no harm: `take_messages` has just
        recorded a whole message of this sender, so it has no unfinished one.
        """
        self._trusted[frame.bytes] = frame

    def check_connections(self) -> float:
        """Reset the connections with unfinished messages that cost too much.

        Call it when no whole message waits: the bytes of a waiting message are not unfinished.
        Returns after how many seconds to call it again if nothing arrives.
        """
        now = time.monotonic()
        self._hear_events()  # or they would wake the loop again at once
        if now < self._look_at or int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            return max(POLL_S, self._look_at - now)
        self._settle()
        resident = resident_bytes()
        if resident > self._calm_bytes + _GROWN_BYTES:
            self._weigh(resident)
        # An unfinished message wakes no loop, so an unknown peer is watched closely from the moment
        # at which it connects. Peers that know the job are its members, and their messages have no
        # bound on the rate: they are watched closely once the process grows.
        calm = resident <= self._calm_bytes + _GROWN_BYTES and all(
            connection.trusted for connection in self._connections.values()
        )
        after = time.monotonic()
        period_s = _CALM_POLL_S if calm else POLL_S
        wait_s = max(period_s, _BUSY * (after - now))
        self._look_at = after + wait_s
        return wait_s

    def _weigh(self, resident: int) -> None:
        self._count()
        unfinished = sorted(
            (
                connection
                for connection in self._connections.values()
                if connection.partial_bytes > 0
            ),
            key=lambda connection: connection.partial_bytes,
        )
        total = sum(connection.partial_bytes for connection in unfinished)
        if total <= _LITTLE_BYTES:
            self._calm_bytes = max(self._calm_bytes, resident)
            return
        if self._reset_worst(unfinished, total, resident - self._calm_bytes):
            # Freed memory is given back later, and must not count against others meanwhile.
            self._calm_bytes = max(self._calm_bytes, resident - _UNEXPLAINED_BYTES)

    def _reset_worst(self, unfinished: list[_Connection], total: int, grown: int) -> int:
        """Reset connections of `unfinished`, which is sorted, largest last; returns how many."""
        before = self.reset
        while unfinished and unfinished[-1].partial_bytes > self._max_bytes:
            total -= self._reset(unfinished.pop())
        strangers = [connection for connection in unfinished if not connection.trusted]
        while strangers and total > self._most_together:
            total -= self._reset(strangers.pop())
        if self.reset == before and grown > _UNEXPLAINED_BYTES + 2 * total:
            for stranger in strangers:
                if stranger.partial_bytes > _HANDSHAKE_BYTES:
                    self._reset(stranger)
        return self.reset - before

    def _count(self) -> None:
        self._settle()
        for connection in list(self._connections.values()):
            received = _count_received(connection.fd)
            if received is None:
                del self._connections[connection.fd]
                continue
            connection.received = received
            if connection.heard:
                connection.whole_at, connection.heard = received, False

    def _settle(self) -> None:
        """Record over which connections the messages since the last look came."""
        self._hear_events()
        heard, self._heard = self._heard, {}
        trusted, self._trusted = self._trusted, {}
        if self._connections:
            for frame in heard.values():
                if (connection := self._connections.get(_fd(frame))) is not None:
                    connection.heard = True
            for frame in trusted.values():
                if (connection := self._connections.get(_fd(frame))) is not None:
                    connection.trusted = True

    def _hear_events(self) -> None:
        while zmq.zmq_poll([(self.events, _READABLE)], 0):
            packed, _ = self.events.recv_multipart(zmq.NOBLOCK)
            event, fd = _EVENT.unpack(packed)
            if self._connections.pop(fd, None) is not None:
                # By the next look this descriptor may belong to another connection.
                self._heard = _not_over(fd, self._heard)
                self._trusted = _not_over(fd, self._trusted)
            if event == zmq.EVENT_ACCEPTED and (peer := _peer(fd)) is not None:
                self._connections[fd] = _Connection(fd, peer)
                self._look_at = min(self._look_at, time.monotonic() + POLL_S)

    def _drop_sender(self, frame: zmq.Frame) -> None:
        """Reset the connection that `frame` came over, if it is a TCP connection and still open."""
        self._hear_events()
        if (connection := self._connections.get(_fd(frame))) is not None:
            self._reset(connection)

    def _reset(self, connection: _Connection) -> int:
        """Have the kernel drop the connection and its buffers; returns its unfinished bytes."""
        self._connections.pop(connection.fd, None)
        with suppress(OSError):
            # A duplicate descriptor, because ZeroMQ may close its own and the number may be reused.
            copy = os.dup(connection.fd)
            try:
                if _peer(copy) == connection.peer:
                    _disconnect(copy)
                    self.reset += 1
            finally:
                os.close(copy)
        return connection.partial_bytes


def _fd(frame: zmq.Frame) -> int:
    with suppress(zmq.ZMQError):
        return int(frame.get(zmq.SRCFD))
    return -1


def _not_over(fd: int, frames: dict[bytes, zmq.Frame]) -> dict[bytes, zmq.Frame]:
    return {sender: frame for sender, frame in frames.items() if _fd(frame) != fd}


def _count_received(fd: int) -> int | None:
    """The bytes that have come over the connection in all; None if it is no TCP connection any
    more.
    """
    field, at = _BYTES_RECEIVED
    size = ctypes.c_uint32(_TCP_INFO_BYTES)
    info = ctypes.create_string_buffer(_TCP_INFO_BYTES)
    failed = _libc.getsockopt(fd, sockets.IPPROTO_TCP, sockets.TCP_INFO, info, ctypes.byref(size))
    if failed or size.value < _TCP_INFO_BYTES:
        return None
    return int(field.unpack_from(info, at)[0])


def _peer(fd: int) -> tuple[bytes, int] | None:
    """The address of the other end; None if the connection is not TCP, or its bytes cannot be
    counted.
    """
    name = ctypes.create_string_buffer(128)
    size = ctypes.c_uint32(len(name))
    if _libc.getpeername(fd, name, ctypes.byref(size)) or _count_received(fd) is None:
        return None
    return name.raw[: size.value], size.value


def _disconnect(fd: int) -> None:
    """Reset a TCP connection: ZeroMQ does not read what it has not read of it yet.

    Shutting it down would leave up to some megabytes to be read.
    """
    nobody = struct.pack("=H14x", sockets.AF_UNSPEC)
    if _libc.connect(fd, nobody, len(nobody)):
        with sockets.socket(fileno=os.dup(fd)) as copy, suppress(OSError):
            copy.shutdown(sockets.SHUT_RDWR)


_libc = ctypes.CDLL(None)
