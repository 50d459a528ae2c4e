"""The coordinator's loop: receives beats, saves decisions, then sends them to copies and clients.

It decides nothing (coordinator.py does). It also holds a connection to each copy over which nothing
is ever sent: when a process is killed, the kernel closes the connection within a moment, long
before silence could prove the death. A client that has asked for the primaries is sent every change
at once, until it has not asked for a while. If the operator reports that a shard has lost every
copy, that is sent to clients in the same way.
"""

import contextlib
import hmac
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from ps.logs import logger
from ps.replication.coordinator import Coordinator, Decision
from ps.replication.coordinator_store import CoordinatorStore
from ps.security.authorization import Admission
from ps.security.keys import KeyPair, address_of, expect, pin_key, serve_with
from ps.security.zap import ZapAuthenticator
from ps.server.frontend import HANDSHAKE_MS
from ps.socket_context import SocketContext
from ps.transport import coordinator_messages
from ps.transport.addresses import bind_socket, is_private
from ps.transport.coordinator_messages import (
    AdmitCopies,
    AssignmentNotice,
    CoordinatorRequest,
    EndJob,
    Heartbeat,
    LocatePrimaries,
    PrimaryInfo,
    PrimaryList,
)
from ps.transport.server_thread import ServerThread
from ps.transport.socket_options import NOTICE_THE_DEAD, drop_with
from ps.transport.unfinished_messages import POLL_S, Accepted
from shards import wire_format
from shards.errors import BadInput, BadMessage

SILENCE_S = 0.5
_TICKS_A_SILENCE = 5
_ASKER_S = 10.0  # how long a client that has asked is sent changes
_MAX_FRAMES = 16  # in a message; ours have two: the sender and the content
_AT_ONCE = 64  # messages handled before the loop checks the clock
_BROKEN = zmq.Event.DISCONNECTED | zmq.Event.CLOSED


class _Watch:
    """A connection to a copy; if it breaks, the copy has died.

    Before the handshake has succeeded, a break proves nothing: a busy copy may be slow to admit the
    connection. Then the copy's next beat opens another one.
    """

    def __init__(
        self, context: "zmq.Context[zmq.Socket[bytes]]", peer: str, keys: KeyPair | None
    ) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RECONNECT_IVL, -1)  # never: the first break is the proof
        self.events = self._socket.get_monitor_socket(_BROKEN | zmq.Event.HANDSHAKE_SUCCEEDED)
        self.taken_up = False
        plain, key = address_of(peer)
        if key and keys is not None:
            expect(self._socket, key, keys)
        self._socket.connect(plain)

    def has_broken(self) -> bool:
        """Return whether the connection has broken; call it when `events` can be read."""
        with contextlib.suppress(zmq.Again):
            event = recv_monitor_message(self.events, zmq.NOBLOCK)["event"]
            self.taken_up |= event == zmq.Event.HANDSHAKE_SUCCEEDED
            return bool(event & _BROKEN)
        return False

    def close(self) -> None:
        self._socket.disable_monitor()
        self._socket.close(linger=0)


class CoordinatorServer(ServerThread):
    """The coordinator of one job with `shards` shards; its record is the file `record`."""

    def __init__(
        self,
        job: str,
        shards: int,
        record: Path,
        *,
        bind: str = "tcp://127.0.0.1:*",
        silence_s: float = SILENCE_S,
        admission: Admission | None = None,
        plaintext: bool = False,
    ) -> None:
        """Raises BadInput when the address is taken, or the record is not this job's.

        With `admission` it admits the keys in its registry, and `endpoint` pins its own key. An
        address that other hosts can reach needs `admission`, or else `plaintext`, which admits
        anybody.
        """
        self._job = job
        self._record = CoordinatorStore(record, job)
        self._coordinator = Coordinator(shards, silence_s=silence_s, record=self._record.load())
        self._registry = CopyRegistry(admission) if admission is not None else None
        self._keys = self._record.keys() if admission is not None else None
        context = SocketContext()
        self._authenticator = (
            ZapAuthenticator(context, self._registry) if self._registry is not None else None
        )
        self._socket = context.socket(zmq.ROUTER)
        if self._keys is not None:
            serve_with(self._socket, self._keys)
        for option, value in (
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.MAXMSGSIZE, wire_format.MAX_HEADER_BYTES),
            (zmq.HANDSHAKE_IVL, HANDSHAKE_MS),
            (zmq.LINGER, 0),
            *NOTICE_THE_DEAD,
        ):
            self._socket.setsockopt(option, value)
        self._accepted = Accepted(
            self._socket, wire_format.MAX_HEADER_BYTES, max_frames=_MAX_FRAMES
        )
        drop_with(self, context, (self._socket, self._accepted.events))
        try:
            self.endpoint: str = bind_socket(self._socket, bind)
        except zmq.ZMQError as error:
            context.destroy(linger=0)
            self._record.close()
            reason = f"cannot listen on {bind!r}: {zmq.strerror(error.errno or 0)}"
            raise BadInput(f"coordinator {reason}") from None
        if not (admission or plaintext or is_private(self.endpoint)):
            context.destroy(linger=0)
            self._record.close()
            raise BadInput(
                f"coordinator on {bind}: other hosts can reach it",
                expected="keys to admit, or `plaintext`",
                got="neither",
            )
        if self._keys is not None:
            self.endpoint = pin_key(self.endpoint, self._keys.public)
        super().__init__("coordinator", context, logger(__name__, job=job))
        self._period_s = silence_s / _TICKS_A_SILENCE
        self._poller = zmq.Poller()
        self._reports: dict[int, tuple[bytes, Heartbeat]] = {}
        self._watches: dict[int, _Watch] = {}
        self._askers: dict[bytes, float] = {}
        self._published: list[PrimaryInfo] = []
        self._ended = ""  # why the job has ended, as the operator reports it

    def _let_go(self) -> None:
        self._record.close()

    def _loop(self) -> None:
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_in, zmq.POLLIN)
        self._poller.register(self._accepted.events, zmq.POLLIN)
        if self._authenticator is not None:
            self._poller.register(self._authenticator.socket, zmq.POLLIN)
        tick_at, poll_s = time.monotonic(), POLL_S
        try:
            while True:
                left_s = min(poll_s, max(0.0, tick_at - time.monotonic()))
                ready = dict(self._poller.poll(int(left_s * 1000) + 1))
                if self._wake_in in ready:
                    return
                self._look_at_watches(ready)
                if self._authenticator is not None and self._authenticator.socket in ready:
                    self._authenticator.answer()
                if self._socket in ready:
                    self._listen()
                    poll_s = POLL_S
                if self._socket not in ready or self._accepted.events in ready:
                    poll_s = self._accepted.check_connections()
                if time.monotonic() >= tick_at:
                    self._tick()
                    tick_at = time.monotonic() + self._period_s
        finally:
            for boot in list(self._watches):
                self._unwatch(boot)

    def _tick(self) -> None:
        now = time.monotonic()
        self._carry_out(self._coordinator.tick(now))
        self._askers = {asker: until for asker, until in self._askers.items() if until > now}

    def _listen(self) -> None:
        # One time for all that wait: saving the record for one beat may take long, and must not
        # count as silence of the copies with beats that wait behind it.
        now = time.monotonic()
        for sender, *frames in self._accepted.take_messages(_AT_ONCE):
            with contextlib.suppress(BadMessage):  # a stranger's: dropped; ours are sent again
                self._take(sender.bytes, frames, now)
                self._accepted.trust(sender)

    def _take(self, sender: bytes, frames: list[zmq.Frame], now: float) -> None:
        message = coordinator_messages.decode_coordinator_request(
            frames[0].buffer if frames else b""
        )
        if self._registry is not None:
            self._registry.check(str(frames[0].get("User-Id")), message)
        if not hmac.compare_digest(message.job.encode(), self._job.encode()):
            raise BadMessage("coordinator: a message for another job")
        if isinstance(message, AdmitCopies):
            if self._registry is not None:
                self._registry.enter(message.copies)
        elif isinstance(message, EndJob):
            if message.reason != self._ended:
                self._ended = message.reason
                self._publish(self._primaries())
        elif isinstance(message, LocatePrimaries):
            self._askers[sender] = now + _ASKER_S
            self._send(sender, PrimaryList(self._primaries(), self._ended))
        elif message.beat.shard in self._coordinator.groups:
            boot = message.beat.boot
            self._reports[boot] = sender, message
            if boot not in self._watches:
                self._watch(boot, message.peer)
            self._carry_out(self._coordinator.receive_beat(message.beat, now))

    def _carry_out(self, decision: Decision) -> None:
        """Save the record, then send assignments to copies and changed primaries to clients."""
        if decision.record is not None:
            self._record.save(decision.record)
        for boot, assignment in decision.assignments:
            if boot in self._reports:
                heard = assignment.configuration.members & self._reports.keys()
                peers = {member: self._reports[member][1].peer for member in heard}
                self._send(self._reports[boot][0], AssignmentNotice(assignment, peers))
        primaries = self._primaries()
        if primaries != self._published:
            self._publish(primaries)

    def _publish(self, primaries: list[PrimaryInfo]) -> None:
        self._published = primaries
        for asker in self._askers:
            self._send(asker, PrimaryList(primaries, self._ended))

    def _primaries(self) -> list[PrimaryInfo]:
        # Computed now, not at the last tick: a backup may have been found since, and the operator
        # would start a process that is not needed.
        under_replicated = self._coordinator.under_replicated(time.monotonic())
        primaries = []
        for shard, group in self._coordinator.groups.items():
            settled = group.settled
            if settled is not None and settled.primary in self._reports:
                primaries.append(
                    PrimaryInfo(
                        shard,
                        settled.epoch,
                        settled.primary,
                        settled.backup,
                        list(group.promotable),
                        self._reports[settled.primary][1].endpoint,
                        shard in under_replicated,
                    )
                )
        return primaries

    def _send(self, to: bytes, message: AssignmentNotice | PrimaryList) -> None:
        # The peer is gone or stuck: a copy will beat again, a client will ask again.
        with contextlib.suppress(zmq.ZMQError):
            self._socket.send_multipart([to, msgspec.msgpack.encode(message)], zmq.NOBLOCK)

    # --- watched connections ----------------------------------------------------------------------

    def _watch(self, boot: int, peer: str) -> None:
        with contextlib.suppress(zmq.ZMQError):  # bad address: only silence can show this death
            self._watches[boot] = watch = _Watch(self._context, peer, self._keys)
            self._poller.register(watch.events, zmq.POLLIN)

    def _unwatch(self, boot: int) -> None:
        watch = self._watches.pop(boot)
        self._poller.unregister(watch.events)
        watch.close()

    def _look_at_watches(self, ready: "dict[zmq.Socket[bytes], int]") -> None:
        broken = [
            (boot, watch)
            for boot, watch in self._watches.items()
            if watch.events in ready and watch.has_broken()
        ]
        for boot, watch in broken:
            self._unwatch(boot)
            if watch.taken_up:
                self._carry_out(self._coordinator.report_death(boot, time.monotonic()))


class CopyRegistry:
    """Decides which keys a coordinator admits, and what each may send. Pure.

    Besides the operator's key and the invitation, which shards admit too (authorization.py), it
    holds the copies' keys. A copy makes its key pair when it starts, and reports an endpoint with
    the public half to the process that started it. So no secret is sent to a copy or by it, however
    it was started. The operator then registers that key under the copy's boot number.

    - The operator's key may ask for the primaries, register copies, and end the job.
    - The invitation's key may ask for the primaries: workers have it from the job's token.
    - A copy's key may send beats as that copy, with addresses that pin the same key. So no copy can
      speak for another, or lead clients or its peer to another process.
    """

    def __init__(self, admission: Admission) -> None:
        self._operator = admission.operator
        self._invitation = admission.invitation.key
        self._copies: dict[int, str] = {}

    def admits(self, key: str) -> bool:
        """Return whether to admit a connection that has proved to hold `key`."""
        return key in (self._operator, self._invitation) or key in self._copies.values()

    def enter(self, copies: Mapping[int, str]) -> None:
        """Register the keys of copies, by boot number."""
        self._copies |= copies

    def check(self, key: str, message: CoordinatorRequest) -> None:
        """Raise BadMessage unless the holder of `key` may send this message."""
        match message:
            case LocatePrimaries():
                good = key in (self._operator, self._invitation)
            case AdmitCopies() | EndJob():
                good = key == self._operator
            case Heartbeat():
                pinned = {address_of(message.endpoint).key, address_of(message.peer).key}
                good = bool(key) and self._copies.get(message.beat.boot) == key and pinned == {key}
        if not good:
            raise BadMessage(
                f"coordinator: {type(message).__name__.lower()} from a key that may not send it"
            )
