"""A copy's connection to the coordinator: a thread that sends beats even while the loop is busy.

Loading a large state takes longer than a living process may be silent. So the beats come from a
thread of their own, which repeats the last report of the server's loop. It stops when the loop has
made no progress for `_STUCK_S` seconds. Suspending the process stops both.
"""

import contextlib
import threading
import time

import msgspec
import zmq

from ps.security.keys import KeyPair, address_of, expect
from ps.transport import coordinator_messages
from ps.transport.coordinator_messages import AssignmentNotice, Heartbeat
from ps.transport.socket_options import NOTICE_THE_DEAD
from shards.errors import BadMessage

BEAT_S = 0.05
_STUCK_S = 10.0


class HeartbeatSender:
    """Sends a loop's beats; only the loop's thread may call `report`, `take_notices` and `stop`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        coordinator: str,
        name: str,
        first: Heartbeat,
        keys: KeyPair | None = None,
    ) -> None:
        """`first` is the first report, repeated until the next call of `report`.

        `keys` are this copy's, for a coordinator with an address that pins a key.
        """
        self._coordinator, self._keys = address_of(coordinator), keys
        self._report = first
        self._context = context
        self.socket = context.socket(zmq.PAIR)
        self._inner = context.socket(zmq.PAIR)
        address = f"inproc://reporter-{name}"
        self._inner.bind(address)
        self.socket.connect(address)
        self.moved_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=f"reporter-{name}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self.socket.send(b"")
        self._thread.join()

    def report(self, report: Heartbeat) -> None:
        """Send this report now, and repeat it from now on."""
        self.socket.send(msgspec.msgpack.encode(report))

    def take_notices(self) -> list[AssignmentNotice]:
        """The assignments that have come from the coordinator since the last call."""
        notices = []
        with contextlib.suppress(zmq.Again):
            while True:
                with contextlib.suppress(BadMessage):
                    notices.append(
                        coordinator_messages.decode_assignment(self.socket.recv(zmq.NOBLOCK))
                    )
        return notices

    def _run(self) -> None:
        report = msgspec.msgpack.encode(self._report)
        try:
            while report:
                report = self._beat(report)
        finally:
            self._inner.close()

    def _beat(self, report: bytes) -> bytes:
        """Beat until stopped or refused; returns the report to send next, empty to end.

        A refused socket does not reconnect by itself, so the caller opens another. The coordinator
        may not know our key yet: the process that started this one registers it.
        """
        link = self._link()
        refused = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        link.connect(self._coordinator.plain)  # after the monitor, or it could miss the refusal
        poller = zmq.Poller()
        for socket in (link, self._inner, refused):
            poller.register(socket, zmq.POLLIN)
        beat_at = 0.0
        try:
            while True:
                left_s = max(0.0, beat_at - time.monotonic())
                ready = dict(poller.poll(int(left_s * 1000) + 1))
                if self._inner in ready:
                    report, beat_at = self._inner.recv(), 0.0
                    if not report:
                        return b""
                if link in ready:
                    self._inner.send(link.recv())
                if refused in ready:
                    time.sleep(BEAT_S)
                    return report
                now = time.monotonic()
                if now >= beat_at and now - self.moved_at < _STUCK_S:
                    with contextlib.suppress(zmq.Again):
                        link.send(report, zmq.NOBLOCK)
                    beat_at = now + BEAT_S
        finally:
            link.disable_monitor()
            link.close()

    def _link(self) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),  # a restarted coordinator has no use for old beats
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 200),
            *NOTICE_THE_DEAD,
        ):
            link.setsockopt(option, value)
        if self._keys is not None:
            expect(link, self._coordinator.key, self._keys)
        return link
