"""Links: one or more DEALER sockets to each shard, typed messages out, typed answers in.

The workers' client and the admin client build on this. `ZMQ_IMMEDIATE` keeps a message from being
queued for a shard that is down and then delivered to its next incarnation. Where several sockets
lead to a shard, each message travels in parts (striping.py). Links to replicated shards follow the
primary (primary_resolver.py). Where shards require keys, a worker enrols with each process to which
it is directed, before its links lead there. Links that were cut are closed and opened again as soon
as possible (link_monitor.py). `changes` reports both redirected and reopened links to their owner.
"""

import math
import time
from collections.abc import Collection, Iterator, Sequence
from secrets import token_bytes

import zmq

from ps.cluster import Cluster
from ps.security.enrolment import EnrolmentRequest, WorkerCredentials
from ps.security.handshake_diagnostics import HandshakeFault, fault_at
from ps.security.keys import KeyPair, address_of, expect
from ps.shared_memory.worker_side import WorkerSide
from ps.socket_context import SocketContext
from ps.transport import multipart
from ps.transport.link_monitor import POLL_S, LinkMonitor, link_monitor_for
from ps.transport.malloc_tuning import HeapTrimmer, tune_malloc
from ps.transport.primary_resolver import ASK_S, PrimaryResolver
from ps.transport.send_tracker import SendTracker, request_of
from ps.transport.socket_options import NOTICE_THE_DEAD, drop_with
from ps.transport.striping import TOKEN_BYTES, Cutter, Gatherer
from shards import wire_format
from shards.errors import BadInput, BadMessage, GiveUp
from shards.messages import Message, Reply
from shards.wire_format import Buffer, Frames

_LOOK_AFTER_S = 1.0
_AT_ONCE = 256  # messages of one connection that are taken in a turn, at most
_FIRST_WORD_S = 0.5  # wait for a coordinator; afterwards the cluster's own endpoints are used
_NEW_LINK_S = 0.5
_JOINING_POLL_S = 0.1
_UNFINISHED_BYTES = 1 << 30  # the most that partly arrived answers may take,
_ANSWERS = 4  # or the size of this number of the largest answers, if that is more


class Links:
    """Connections to `endpoints`; shard numbers are positions in it. Not for use by two threads."""

    def __init__(
        self,
        endpoints: Sequence[str],
        sharing: WorkerSide | None = None,
        keys: KeyPair | None = None,
        cluster: Cluster | None = None,
        credentials: WorkerCredentials | None = None,
    ) -> None:
        """Open one link to each of `endpoints`, without waiting for the connections.

        `sharing` lets arrays in shared memory travel as references; its owner closes it. `keys` are
        for shards with endpoints that pin a key. The coordinator of `cluster`, if it has one,
        reports where its shards are now; a worker enrols there with its `credentials`. Raises
        GiveUp if the coordinator rejects this process or fails its own authentication.
        """
        tune_malloc()
        self._sharing = sharing
        self._surplus = HeapTrimmer()
        self._leaving = SendTracker()
        self._key_pair = keys
        self._context = SocketContext()
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket[bytes]] = []
        self._shard_of: dict[zmq.Socket[bytes], int] = {}
        self._inboxes: dict[zmq.Socket[bytes], multipart.Inbox] = {}
        self.changed = False  # whether `changes` returns any
        self._moved: set[int] = set()
        self._watches: dict[int, LinkMonitor] = {}
        self._monitors: set[zmq.Socket[bytes]] = set()
        self._look_at = 0.0
        self._renewing: set[int] = set()  # links that are being renewed
        self._renewed: set[int] = set()
        self._credentials = credentials
        self._joining: dict[int, EnrolmentRequest] = {}
        self._deferred_stripes: dict[int, int] = {}  # connections to open after an enrolment
        self._resolver = self._resolver_for(cluster)
        self.endpoints = tuple(self._first_endpoints(endpoints))
        self._stripes: list[list[zmq.Socket[bytes]]] = [[] for _ in self.endpoints]
        for shard, endpoint in enumerate(self.endpoints):
            self._open_links(shard, endpoint, 1)
        self._cutter = Cutter(token_bytes(TOKEN_BYTES))
        # A restarted shard is a new sender: the limit evicts its former incarnation.
        self._gatherer = Gatherer(_UNFINISHED_BYTES, max(1, len(endpoints)))
        drop_with(self, self._context, self._sockets)

    def _connect(self, shard: int, endpoint: str, *, watched: bool = False) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.DEALER)
        for option, value in (
            (zmq.IMMEDIATE, 1),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 250),
            *NOTICE_THE_DEAD,
            # A cut shows in failed transmissions (link_failure.py), so an idle link must send.
            (zmq.TCP_KEEPALIVE_IDLE, 1),
            (zmq.TCP_KEEPALIVE_INTVL, 1),
        ):
            socket.setsockopt(option, value)
        plain, key = address_of(endpoint)
        if key:
            assert self._key_pair is not None, "the owner of links has a key where one is required"
            expect(socket, key, self._key_pair)
        if watched:
            self._watch(shard, socket, plain)
        try:
            socket.connect(plain)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise BadInput(
                "shard endpoint",
                expected="tcp://HOST:PORT, curve://KEY@HOST:PORT or ipc://PATH",
                got=f"{endpoint!r} ({zmq.strerror(error.errno or 0)})",
            ) from None
        self._poller.register(socket, zmq.POLLIN)
        self._sockets.append(socket)
        self._shard_of[socket] = shard
        self._inboxes[socket] = multipart.Inbox(socket)
        return socket

    def _watch(self, shard: int, socket: zmq.Socket[bytes], plain: str) -> None:
        """Monitor the first connection to a shard: the others take the same route."""
        watch = self._watches.get(shard)
        if watch is not None:
            watch.watch(socket)
        elif (watch := link_monitor_for(socket, plain)) is None:
            return
        self._watches[shard] = watch
        self._poller.register(watch.monitor, zmq.POLLIN)
        self._sockets.append(watch.monitor)
        self._monitors.add(watch.monitor)

    def where(self, shard: int) -> str:
        """The address that the shard's links lead to, for messages to users."""
        return address_of(self.endpoints[shard]).plain

    def _resolver_for(self, cluster: Cluster | None) -> PrimaryResolver | None:
        if cluster is None or cluster.coordinator is None:
            return None
        resolver = PrimaryResolver(
            cluster, self._context, self._credentials.token if self._credentials else self._key_pair
        )
        self._poller.register(resolver.socket, zmq.POLLIN)
        return resolver

    def _first_endpoints(self, endpoints: Sequence[str]) -> Sequence[str]:
        """Where the coordinator says that the shards are; `endpoints` if it does not answer."""
        if self._resolver is None:
            return endpoints
        try:
            if self._resolver.poll(_FIRST_WORD_S):
                self._resolver.check_running()
            else:
                self._resolver.check()
        except GiveUp:
            self._context.destroy(linger=0)
            raise
        return self._resolver.replace_endpoints(endpoints)

    def follow(self, endpoints: Sequence[str]) -> None:
        """Direct the links of shards that have moved to their new `endpoints`; see `changes`."""
        fresh: list[zmq.Socket[bytes]] = []
        for shard, endpoint in enumerate(endpoints):
            joining = self._joining.get(shard)
            if endpoint == (self.endpoints[shard] if joining is None else joining.endpoint):
                continue
            stripes = (
                len(self._stripes[shard]) if joining is None else self._deferred_stripes[shard]
            )
            self._drop(shard, for_good=True)
            fresh += self._open_links(shard, endpoint, stripes)
        self._list_unconnected(fresh, _NEW_LINK_S)
        self._take_greetings()

    def _open_links(self, shard: int, endpoint: str, stripes: int) -> list[zmq.Socket[bytes]]:
        """Open `stripes` connections there, at once or after the shard accepts our enrolment."""
        former = self._joining.pop(shard, None)
        if former is not None:
            former.close()
        if self._credentials is not None and address_of(endpoint).key:
            self._joining[shard] = EnrolmentRequest(
                shard, endpoint, self._credentials, self._poller
            )
            self._joining[shard].ask(time.monotonic())
            self._deferred_stripes[shard] = stripes
            return []
        return self._redirect(shard, endpoint, stripes)

    def _redirect(self, shard: int, endpoint: str, stripes: int) -> list[zmq.Socket[bytes]]:
        if endpoint != self.endpoints[shard]:
            self._moved.add(shard)
            self.changed = True
        self.endpoints = (*self.endpoints[:shard], endpoint, *self.endpoints[shard + 1 :])
        return self._begin(shard, stripes)

    def _finish_enrolments(self) -> None:
        """Connect to the shards that have accepted our enrolment; raises GiveUp where one rejects
        it.
        """
        for shard, request in list(self._joining.items()):
            request.ask(time.monotonic())
            if request.let_in():
                request.close()
                del self._joining[shard]
                self._list_unconnected(
                    self._redirect(shard, request.endpoint, self._deferred_stripes[shard]),
                    _NEW_LINK_S,
                )
                self._take_greetings()

    def _renew(self, shard: int) -> None:
        """Close the connections to a shard, and open as many again."""
        stripes = len(self._stripes[shard])
        self._drop(shard, for_good=False)
        self._begin(shard, stripes)

    def _drop(self, shard: int, *, for_good: bool) -> None:
        if shard in self._watches:
            self._unwatch(shard, for_good=for_good)
        for socket in self._stripes[shard]:
            self._poller.unregister(socket)
            self._sockets.remove(socket)
            del self._shard_of[socket], self._inboxes[socket]
            socket.close(linger=0)
        self._stripes[shard] = []
        self._leaving.forget(shard)

    def _begin(self, shard: int, stripes: int) -> list[zmq.Socket[bytes]]:
        self._stripes[shard] = [
            self._connect(shard, self.endpoints[shard], watched=not number)
            for number in range(stripes)
        ]
        return self._stripes[shard]

    def _unwatch(self, shard: int, *, for_good: bool) -> None:
        watch = self._watches[shard]
        self._poller.unregister(watch.monitor)
        self._sockets.remove(watch.monitor)
        self._monitors.remove(watch.monitor)
        if for_good:
            self._watches.pop(shard).close()
            self._renewing.discard(shard)
        else:
            watch.unwatch()

    def rtt_s(self, shard: int) -> float:
        """The round trip to a shard that the system has measured, in seconds; 0 if not known."""
        watch = self._watches.get(shard)
        return 0.0 if watch is None else watch.rtt_s

    @property
    def by_socket(self) -> int:
        """The large messages to and from shards with shared memory that found no room in it."""
        return self._sharing.by_socket if self._sharing is not None else 0

    def changes(self) -> tuple[set[int], set[int]]:
        """The shards with links that were directed elsewhere since the last call, and those with
        links that were cut and restored: what was in flight on these is lost, or late.
        """
        changes = self._moved, self._renewed
        self._moved, self._renewed, self.changed = set(), set(), False
        return changes

    def stripe(self, shard: int, stripes: int, answer_bytes: int) -> None:
        """Spread messages to `shard` over `stripes` connections; never fewer than there are.

        Its answers take up to `answer_bytes` each. Call `await_connections` afterwards: a message
        needs all of them.
        """
        self._gatherer.allow(_ANSWERS * answer_bytes)
        if shard in self._joining:
            self._deferred_stripes[shard] = max(stripes, self._deferred_stripes[shard])
            return
        sockets = self._stripes[shard]
        sockets += [
            self._connect(shard, self.endpoints[shard]) for _ in range(stripes - len(sockets))
        ]

    def await_connections(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds until all shards are connected; messages sent before are
        lost.

        Raises GiveUp when an unconnected shard rejects this process, or fails its own
        authentication.
        """
        self._await_joining(timeout_s)
        unreached = self._list_unconnected(self._shard_of, min(timeout_s, _LOOK_AFTER_S))
        if unreached:
            self._diagnose(unreached)
        self._list_unconnected(unreached, timeout_s - _LOOK_AFTER_S)
        self._take_greetings()

    def _await_joining(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` until all shards accept our enrolment; raises GiveUp when one
        rejects it.

        Where a coordinator directs the links, it may direct them elsewhere soon, so a fault there
        is not final.
        """
        until = time.monotonic() + timeout_s
        while self._joining and (left_s := until - time.monotonic()) > 0:
            list(self.receive(min(_JOINING_POLL_S, left_s)))
            for shard, request in self._joining.items():
                if self._resolver is None or shard not in self._resolver.primaries:
                    request.check()

    def _take_greetings(self) -> None:
        """Discard the handshakes so far: a connection made before anything was sent is not a
        renewal.
        """
        for watch in self._watches.values():
            watch.has_connected()

    def _list_unconnected(
        self, sockets: Collection[zmq.Socket[bytes]], timeout_s: float
    ) -> set[zmq.Socket[bytes]]:
        """The sockets that are not connected after `timeout_s` seconds."""
        waiting = zmq.Poller()
        for socket in sockets:
            waiting.register(socket, zmq.POLLOUT)
        until = time.monotonic() + timeout_s
        while waiting.sockets and (reached := waiting.poll(_ms(until - time.monotonic()))):
            for socket, _ in reached:
                waiting.unregister(socket)
        return {socket for socket, _ in waiting.sockets}

    def _diagnose(self, unreached: set[zmq.Socket[bytes]]) -> None:
        """Raise GiveUp where the handshake itself fails, because waiting does not help."""
        for shard, stripes in enumerate(self._stripes):
            missing = unreached.intersection(stripes)
            if missing and (fault := fault_at(self.endpoints[shard], self._key_pair)):
                where = address_of(self.endpoints[shard]).plain
                raise HandshakeFault(f"shard {shard} at {where}: {fault}")

    def round_trip_s(self, shard: int, message: Message, timeout_s: float) -> float:
        """The time until `message` is answered, at most `timeout_s`; other answers are dropped.

        Call it only while nothing else is outstanding.
        """
        started = time.monotonic()
        self.send(shard, message)
        while (taken_s := time.monotonic() - started) < timeout_s:
            if shard in {answerer for answerer, _, _ in self.receive(timeout_s - taken_s)}:
                break
        return time.monotonic() - started

    def send(self, shard: int, message: Message, multipart: Frames = ()) -> None:
        """Hand a message to the network; arrays are sent without a copy and must not change.

        While the shard cannot be reached nothing is sent: the caller keeps the message and repeats
        it.
        """
        self.send_together(shard, [(message, multipart)])

    def send_together(self, shard: int, messages: Sequence[tuple[Message, Frames]]) -> None:
        """Send several messages to one shard; they arrive together, in order.

        A large message that is still leaving since it was last sent is not sent again.
        """
        fresh, sent = messages, self._leaving.sent
        if sent:
            # The lookup here saves a call for each message, and few are repetitions.
            fresh = [
                addressed
                for addressed in messages
                if (shard, addressed[0].request) not in sent
                or not self._leaving.in_progress(shard, addressed[0].request)
            ]
        for start in range(0, len(fresh), wire_format.MAX_TOGETHER):
            together = fresh[start : start + wire_format.MAX_TOGETHER]
            sharing = self._sharing
            parts = sharing.seal(shard, together) if sharing else wire_format.enclose(together)
            stripes = self._stripes[shard]
            if not stripes:
                return  # the shard has not accepted our enrolment yet
            outgoing = [(stripes[0], parts)]
            if len(stripes) > 1:
                outgoing = list(zip(stripes, self._cutter.cut(parts, len(stripes)), strict=True))
            try:
                self._leaving.send(outgoing, shard, map(request_of, together))
            except zmq.Again:
                return  # the messages behind it would fail as well

    def receive(
        self, timeout_s: float, at_once: int = _AT_ONCE
    ) -> Iterator[tuple[int, Reply, Sequence[Buffer]]]:
        """The messages that arrive within `timeout_s`: waits for at least one, then takes all that
        wait, up to `at_once` of each connection.

        It may return early with nothing, because a link has moved. Raises GiveUp with the reason
        if the coordinator reports that the job has ended.
        """
        if self._resolver is not None:
            self._resolver.ask()
            timeout_s = min(timeout_s, ASK_S)
        ready = self._await(timeout_s)
        if self._resolver is not None and self._resolver.listen():
            self._resolver.check_running()
            self.follow(self._resolver.replace_endpoints(self.endpoints))
        if self._joining:
            self._finish_enrolments()
        for socket, _ in ready:
            shard = self._shard_of.get(socket)
            if shard is None:  # the resolver, a monitor, or a link that has just been redirected
                continue
            for came in self._inboxes[socket].take_messages(at_once):
                self._surplus.count_message(sum(map(len, came)))
                for reply, payload in self._read(shard, multipart.views(came)):
                    yield shard, reply, payload

    def _await(self, timeout_s: float) -> list[tuple[zmq.Socket[bytes], int]]:
        """The sockets that can be read within `timeout_s`; perhaps none, if a link was renewed."""
        polled = self._poller.sockets  # the poller's own `poll` would cost one more call
        if not self._watches:
            return zmq.zmq_poll(polled, _ms(timeout_s))
        until = time.monotonic() + timeout_s
        while True:
            left_s = until - time.monotonic()
            ready, noted = zmq.zmq_poll(polled, _ms(min(left_s, POLL_S))), 0
            for socket, _ in ready:
                noted += socket in self._monitors
            now = time.monotonic()
            renewed = (noted or now >= self._look_at) and self._look(now)
            if renewed or left_s <= 0 or len(ready) > noted:
                return ready

    def _look(self, now: float) -> bool:
        """Replace links that were cut; returns whether all connections of one are open again."""
        self._look_at = now + POLL_S
        for shard, watch in self._watches.items():
            if watch.is_dead(now):
                self._renew(shard)
                self._renewing.add(shard)
            elif watch.has_connected():
                self._renewing.add(shard)
        reached = {
            shard_number
            for shard_number in self._renewing
            if not self._list_unconnected(self._stripes[shard_number], 0.0)
        }
        self._renewing -= reached
        self._renewed |= reached
        self.changed = self.changed or bool(reached)
        return bool(reached)

    @property
    def waiting(self) -> bool:
        """True if `receive` would return something at once."""
        return bool(zmq.zmq_poll(self._poller.sockets, 0))  # as in `_await`

    @property
    def descriptors(self) -> list[int]:
        """The file descriptors that become readable when something arrives, for an event loop."""
        return [socket.getsockopt(zmq.FD) for socket, _ in self._poller.sockets]

    def _read(self, shard: int, came: list[Buffer]) -> list[tuple[Reply, Sequence[Buffer]]]:
        """The messages that are complete with what came; raises BadMessage naming the sender."""
        replies: list[tuple[Reply, Sequence[Buffer]]] = []
        try:
            parts: list[Buffer] | None = came
            if len(came[0]) < 2 or came[0][1] > wire_format.MARKED:
                whole = self._gatherer.take(b"", came)
                parts = whole and whole[1]  # None while parts of it are missing
            if self._sharing is not None and parts is not None:
                parts = self._sharing.open(shard, parts)
            if parts:
                # A loop, because a comprehension is a call.
                for header, payload in wire_format.disclose(parts[0], parts[1:]):
                    replies.append((wire_format.decode_reply(header), payload))
        except BadMessage as error:
            raise BadMessage(f"{address_of(self.endpoints[shard]).plain}: {error}") from None
        return replies

    def close(self, linger_s: float = 0.0) -> None:
        """Drop the connections, after giving outgoing messages up to `linger_s` seconds to leave.

        Nothing is sent or received any more; what was outstanding must be repeated over other
        links.
        """
        self._poller, self._stripes = zmq.Poller(), [[] for _ in self.endpoints]
        for request in self._joining.values():
            request.close()
        self._joining.clear()
        for watch in self._watches.values():
            watch.close()
        self._watches.clear()
        self._context.destroy(linger=int(linger_s * 1000))


def _ms(left_s: float) -> int:
    """A waiting time in ZeroMQ's milliseconds: rounded up, and never the negative that means for
    ever.
    """
    return math.ceil(max(0.0, left_s) * 1000)
