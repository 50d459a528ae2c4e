"""A copy's line to the coordinator: a thread that beats, however long the server's loop is busy.

A large state takes longer to be taken in than a living process may be silent. So the beats come
from a thread of their own, which repeats what the loop said last; it stops when the loop has not
moved for so long that something must be wrong with it. A process that is stopped stops both.
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
    """Speaks for a loop: `say`, `words` and `stop` are called from its thread alone."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        coordinator: str,
        name: str,
        first: Heartbeat,
        own: KeyPair | None = None,
    ) -> None:
        """`first` is the first report, repeated until another is said.

        `own` is shown to a coordinator whose address pins a key.
        """
        self._coordinator, self._own = address_of(coordinator), own
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
        """Send this now, and from now on."""
        self.socket.send(msgspec.msgpack.encode(report))

    def take_notices(self) -> list[AssignmentNotice]:
        """What the coordinator has said since."""
        words = []
        with contextlib.suppress(zmq.Again):
            while True:
                with contextlib.suppress(BadMessage):
                    words.append(
                        coordinator_messages.decode_assignment(self.socket.recv(zmq.NOBLOCK))
                    )
        return words

    def _run(self) -> None:
        said = msgspec.msgpack.encode(self._report)
        try:
            while said:
                said = self._beat(said)
        finally:
            self._inner.close()

    def _beat(self, said: bytes) -> bytes:
        """Beat until told to end, or turned away; returns what is to be said then, if anything.

        Who was turned away does not come again by itself. The coordinator may not have known our
        key yet, which whoever started this process tells it.
        """
        link = self._link()
        turned_away = link.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        link.connect(self._coordinator.plain)  # only now, or that might be over unheard
        poller = zmq.Poller()
        for socket in (link, self._inner, turned_away):
            poller.register(socket, zmq.POLLIN)
        beat_at = 0.0
        try:
            while True:
                left_s = max(0.0, beat_at - time.monotonic())
                ready = dict(poller.poll(int(left_s * 1000) + 1))
                if self._inner in ready:
                    said, beat_at = self._inner.recv(), 0.0
                    if not said:
                        return b""
                if link in ready:
                    self._inner.send(link.recv())
                if turned_away in ready:
                    time.sleep(BEAT_S)
                    return said
                now = time.monotonic()
                if now >= beat_at and now - self.moved_at < _STUCK_S:
                    with contextlib.suppress(zmq.Again):
                        link.send(said, zmq.NOBLOCK)
                    beat_at = now + BEAT_S
        finally:
            link.disable_monitor()
            link.close()

    def _link(self) -> zmq.Socket[bytes]:
        link = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),  # old beats are of no use to a coordinator that comes back
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 200),
            *NOTICE_THE_DEAD,
        ):
            link.setsockopt(option, value)
        if self._own is not None:
            expect(link, self._coordinator.key, self._own)
        return link
