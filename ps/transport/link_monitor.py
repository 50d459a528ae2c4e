"""A watch over the connection to one shard: what its system says of it, and dials on the side.

What is concluded is decided in link_failure.py. ZeroMQ tells by a monitor which descriptor a
connection has, and TCP_INFO what the system knows of it. Where there is no such thing (a Unix
socket, another system than Linux) nothing is watched, and ZeroMQ is left to its own devices.
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

LOOK_S = 0.1
_LINUX = sys.platform == "linux"
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
_DIALS = 8  # under way at once: the oldest is dropped for a new one

# struct tcp_info of Linux's include/uapi/linux/tcp.h, up to 4.1: state, and what `TcpInfo` has.
# Where the system itself refuses to send, nothing is retransmitted for want of anything sent: it
# probes, as it does a peer whose window is closed; but that one answers, and the count begins anew.
_TCP_INFO = struct.Struct("=B x B B 64x I 48x Q Q")
_ESTABLISHED = 1
_AT_ONCE = struct.pack("ii", 1, 0)  # struct linger: on, for no time


class _Peer(NamedTuple):
    """Whom a connection leads to: an address family and an address of it."""

    family: int
    address: Any


class LinkMonitor:
    """Over one ZeroMQ socket at a time. Not for use by two threads."""

    def __init__(self, watched: "zmq.Socket[bytes]") -> None:
        self._doubt = LinkFailureDetector()
        self._dials: list[socket.socket] = []
        self._peer: _Peer | None = None
        self._looked_at = 0.0
        self.watch(watched)

    def watch(self, watched: "zmq.Socket[bytes]") -> None:
        """Watch this socket, which is about to connect, in place of the former one."""
        self._descriptor: int | None = None
        self._greeted = False
        self._watched = watched
        self.monitor = watched.get_monitor_socket(_EVENTS)

    def greeted(self) -> bool:
        """Whether a connection has been made since this was asked last: it takes messages now."""
        self._read_events()
        greeted, self._greeted = self._greeted, False
        return greeted

    def is_dead(self, now: float) -> bool:
        """Whether the connection is to be closed for another; looks, and dials as need be."""
        self._read_events()
        if self._peer is None:
            return False  # never reached so far: that is ZeroMQ's affair
        if now - self._looked_at > AWAY_S:
            self._hang_up()
        self._looked_at = now
        move = self._doubt.look(self._line(self._peer), self._through(), now)
        if move is LinkAction.DIAL:
            self._dial(self._peer)
        if not self._doubt.lasts:
            self._hang_up()
        if move is LinkAction.RENEW:
            self._cut_short()
        return move is LinkAction.RENEW

    def unwatch(self) -> None:
        """Let go of the socket, before it is closed."""
        self._watched.disable_monitor()
        self.monitor.close(linger=0)

    def close(self) -> None:
        """Let go of everything."""
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
                    self._greeted = True
                case _:
                    self._descriptor, self._greeted = None, False

    def _line(self, peer: "_Peer") -> TcpInfo | None:
        """What the system says; None where the connection has ended."""
        if self._descriptor is None:
            return None
        with contextlib.suppress(OSError), _borrowed(self._descriptor) as connection:
            if connection.getpeername() == peer.address:  # or the descriptor is another's by now
                return _line_of(connection)
        return None

    def _cut_short(self) -> None:
        """Have the system forget what the connection still holds, when it is closed.

        It would go on trying to get that across, and answers would follow where nobody is.
        """
        if self._descriptor is not None:
            with contextlib.suppress(OSError), _borrowed(self._descriptor) as connection:
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
        """The round trip of a dial that is through by now; those that failed are dropped."""
        for dial in list(self._dials):
            if _done(dial):
                line = _line_of(dial)
                self._dials.remove(dial)
                dial.close()
                if line is not None:
                    return line.rtt_s
        return None

    def _hang_up(self) -> None:
        for dial in self._dials:
            dial.close()
        self._dials.clear()


def link_monitor_for(watched: "zmq.Socket[bytes]", plain: str) -> LinkMonitor | None:
    """A watch over a socket that is about to connect to `plain`, where one can be kept."""
    return LinkMonitor(watched) if _LINUX and plain.startswith("tcp:") else None


@contextlib.contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """The socket behind a descriptor that is ZeroMQ's; raises OSError where none is."""
    own = os.dup(descriptor)
    try:
        borrowed = socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
    with borrowed:
        yield borrowed


def _line_of(connection: socket.socket) -> TcpInfo | None:
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    state, again, probes, rtt_us, taken, heard = _TCP_INFO.unpack(raw)
    if state != _ESTABLISHED:
        return None
    return TcpInfo(max(again, probes), heard, taken, rtt_us / 1e6)


def _peer_of(descriptor: int) -> _Peer | None:
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        return _Peer(connection.family, connection.getpeername())
    return None


def _done(dial: socket.socket) -> bool:
    waiting = poll()
    waiting.register(dial, POLLOUT)
    return bool(waiting.poll(0))
