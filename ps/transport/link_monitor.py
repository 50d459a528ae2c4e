"""Monitors the connection to one shard: reads what the system reports about it, and opens dials.

The decisions are in link_failure.py. A ZeroMQ monitor reports the descriptor of a connection, and
TCP_INFO what the system knows about it. Where these do not exist (a Unix socket, another system
than Linux) nothing is monitored, and reconnecting is left to ZeroMQ.
"""

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from errno import EINPROGRESS
from select import POLLOUT, poll
from typing import Any, NamedTuple

import zmq
from zmq.utils.monitor import recv_monitor_message

from ps.session.link_failure import AWAY_S, LinkAction, LinkFailureDetector, TcpInfo

POLL_S = 0.1
_LINUX = sys.platform == "linux"
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_DIALS = 8  # in progress at once: the oldest is dropped for a new one

# struct tcp_info of Linux's include/uapi/linux/tcp.h, up to 4.1: state, and what `TcpInfo` has.
# Where the system itself cannot send, nothing was sent that it could retransmit: it probes instead,
# as it probes a peer with a closed window. Such a peer answers, though, which resets the count.
_TCP_INFO = struct.Struct("=B x B B 64x I 48x Q Q")
_ESTABLISHED = 1
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: on, for no time


class _Peer(NamedTuple):
    """The other end of a connection: an address family and an address in that family."""

    family: int
    address: Any


class LinkMonitor:
    """Monitors one ZeroMQ socket at a time. Not for use by two threads."""

    def __init__(self, watched: "zmq.Socket[bytes]") -> None:
        self._detector = LinkFailureDetector()
        self._dials: list[socket.socket] = []
        self._peer: _Peer | None = None
        self._looked_at = 0.0
        self.watch(watched)

    def watch(self, watched: "zmq.Socket[bytes]") -> None:
        """Monitor this socket, which is about to connect, in place of the former one."""
        self._descriptor: int | None = None
        self._connected = False
        self._watched = watched
        self.monitor = watched.get_monitor_socket(_EVENTS)

    def has_connected(self) -> bool:
        """Return whether a connection was made since the last call and now accepts messages."""
        self._read_events()
        connected, self._connected = self._connected, False
        return connected

    def is_dead(self, now: float) -> bool:
        """Return whether to replace the connection; checks it, and dials if needed."""
        self._read_events()
        if self._peer is None:
            return False  # never connected so far: ZeroMQ keeps trying
        if now - self._looked_at > AWAY_S:
            self._hang_up()
        self._looked_at = now
        move = self._detector.decide(self._info(self._peer), self._through(), now)
        if move is LinkAction.DIAL:
            self._dial(self._peer)
        if not self._detector.in_doubt:
            self._hang_up()
        if move is LinkAction.RENEW:
            self._cut_short()
        return move is LinkAction.RENEW

    @property
    def rtt_s(self) -> float:
        """The round trip that the system has measured, in seconds; 0 if it is not known."""
        self._read_events()
        info = None if self._peer is None else self._info(self._peer)
        return 0.0 if info is None else info.rtt_s

    def unwatch(self) -> None:
        """Release the socket, before it is closed."""
        self._watched.disable_monitor()
        self.monitor.close(linger=0)

    def close(self) -> None:
        """Release the socket and all dials."""
        self.unwatch()
        self._hang_up()

    def _read_events(self) -> None:
        while self.monitor.poll(0):
            said = recv_monitor_message(self.monitor)
            match said["event"]:
                case zmq.EVENT_CONNECTED:
                    self._descriptor = said["value"]
                    self._peer = _peer_of(said["value"]) or self._peer
                case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                    self._connected = True
                case _:
                    self._descriptor, self._connected = None, False

    def _info(self, peer: "_Peer") -> TcpInfo | None:
        """The system's report about the connection; None where it has ended."""
        if self._descriptor is None:
            return None
        with contextlib.suppress(OSError), _borrow(self._descriptor) as connection:
            if connection.getpeername() == peer.address:  # the descriptor may have been reused
                return _info_of(connection)
        return None

    def _cut_short(self) -> None:
        """Have the system discard the connection's unsent data when it is closed.

        Otherwise the system would keep retransmitting it, and the shard would answer over a dead
        link.
        """
        if self._descriptor is not None:
            with contextlib.suppress(OSError), _borrow(self._descriptor) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _AT_ONCE)

    def _dial(self, peer: "_Peer") -> None:
        if len(self._dials) == _DIALS:
            self._dials.pop(0).close()
        dial = socket.socket(peer.family, socket.SOCK_STREAM)
        dial.setblocking(False)
        if dial.connect_ex(peer.address) in {0, EINPROGRESS}:
            self._dials.append(dial)
        else:
            dial.close()

    def _through(self) -> float | None:
        """The round trip of a dial that is through by now, in seconds; failed dials are dropped."""
        for dial in list(self._dials):
            if _is_connected(dial):
                info = _info_of(dial)
                self._dials.remove(dial)
                dial.close()
                if info is not None:
                    return info.rtt_s
        return None

    def _hang_up(self) -> None:
        for dial in self._dials:
            dial.close()
        self._dials.clear()


def link_monitor_for(watched: "zmq.Socket[bytes]", plain: str) -> LinkMonitor | None:
    """A monitor of a socket that is about to connect to `plain`; None where that cannot be
    monitored.
    """
    return LinkMonitor(watched) if _LINUX and plain.startswith("tcp:") else None


@contextlib.contextmanager
def _borrow(descriptor: int) -> Iterator[socket.socket]:
    """The socket behind one of ZeroMQ's descriptors; raises OSError where there is none."""
    duplicate = os.dup(descriptor)
    try:
        borrowed = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        raise
    with borrowed:
        yield borrowed


def _info_of(connection: socket.socket) -> TcpInfo | None:
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    state, again, probes, rtt_us, bytes_acked, bytes_received = _TCP_INFO.unpack(raw)
    if state != _ESTABLISHED:
        return None
    return TcpInfo(max(again, probes), bytes_received, bytes_acked, rtt_us / 1e6)


def _peer_of(descriptor: int) -> _Peer | None:
    with contextlib.suppress(OSError), _borrow(descriptor) as connection:
        return _Peer(connection.family, connection.getpeername())
    return None


def _is_connected(dial: socket.socket) -> bool:
    waiting = poll()
    waiting.register(dial, POLLOUT)
    return bool(waiting.poll(0))
