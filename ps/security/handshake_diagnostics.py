"""Explains why a connection fails: what libzmq has noticed of its handshake, in one line.

A refused peer learns little, by design; this file reports what it can learn.
"""

import contextlib
import time
from collections.abc import Iterator

import zmq
from zmq.utils.monitor import recv_monitor_message

from ps.closing_context import ClosingContext
from ps.security.keys import KeyPair, address_of, expect
from ps.socket_context import SocketContext
from shards.errors import GiveUp

_POLL_S = 1.0  # time to connect
_WORD_S = 5.0  # time for the other side's part of the handshake, once connected
_STEP_S = 0.1
_BROKEN_OFF = 3  # times: a single one may be a link that was cut just then


class HandshakeFault(GiveUp):
    """A handshake fails, so no message is exchanged: waiting does not help."""


class HandshakeProbe(ClosingContext):
    """A DEALER to `endpoint` with a monitored handshake; a context manager."""

    def __init__(self, endpoint: str, keys: KeyPair | None) -> None:
        self.endpoint = endpoint
        self._plain, key = address_of(endpoint)
        self._curve = bool(key)
        self._context = SocketContext()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        if key and keys is not None:
            expect(self._socket, key, keys)
        self._socket.setsockopt(zmq.RECONNECT_IVL, 50)
        self._monitor = self._socket.get_monitor_socket()
        self._fault = ""
        self._broken_off = 0
        self.connected = self.shaken = False
        self._socket.connect(self._plain)

    def register(self, poller: zmq.Poller) -> None:
        """Make `poller` wake for events of this connection."""
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._monitor, zmq.POLLIN)

    def unregister(self, poller: zmq.Poller) -> None:
        """Undo `register`."""
        poller.unregister(self._socket)
        poller.unregister(self._monitor)

    def send(self, frame: bytes) -> None:
        """Send `frame` as soon as there is a connection."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(frame, zmq.NOBLOCK)

    def take_messages(self) -> Iterator[list[bytes]]:
        """The messages that have come."""
        with contextlib.suppress(zmq.Again):
            while True:
                yield self._socket.recv_multipart(zmq.NOBLOCK)

    def fault(self) -> str:
        """The fault of the handshake; empty if there is none."""
        while self._monitor.poll(0):
            notice = recv_monitor_message(self._monitor)
            event = notice["event"]
            self.connected |= event == zmq.EVENT_CONNECTED
            self.shaken |= event == zmq.EVENT_HANDSHAKE_SUCCEEDED
            self._broken_off += event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            if event != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or self._broken_off == _BROKEN_OFF:
                self._fault = self._fault or _fault(event, notice["value"], self._curve)
        return self._fault

    def close(self) -> None:
        self._socket.disable_monitor()
        self._context.destroy(linger=0)


def fault_at(endpoint: str, keys: KeyPair | None) -> str:
    """The fault of one handshake at `endpoint`; empty if it works or nothing answers.

    At most one step a poll counts towards the timeout: a process that was suspended meanwhile could
    not receive anything, and the server may have been suspended, too.
    """
    with HandshakeProbe(endpoint, keys) as link:
        poller = zmq.Poller()
        link.register(poller)
        spent_s, before = 0.0, time.monotonic()
        while not (link.fault() or link.shaken) and (
            spent_s < (_WORD_S if link.connected else _POLL_S)
        ):
            poller.poll(int(_STEP_S * 1000))
            now = time.monotonic()
            spent_s, before = spent_s + min(_STEP_S, now - before), now
        return link.fault()


def _fault(event: int, value: int, curve: bool) -> str:
    match event:
        case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            return (
                "turned away: it does not know our key; check that the cluster's description is of"
                " this very job, and that the job has not been restarted since"
            )
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL if (
            value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
        ):
            expected, actual = ("CURVE", "plain text") if curve else ("plain text", "CURVE")
            return f"expected {expected}, as the endpoint says, got a server that speaks {actual}"
        case zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
            return f"expected a CURVE handshake, got something else (ZeroMQ's error {value:#x})"
        case zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL if curve:
            return (
                "it broke off the handshake: the server key does not match the endpoint, or this is"
                " not a shard"
            )
        case _:
            return ""
