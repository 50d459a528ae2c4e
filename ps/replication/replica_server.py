"""The loop of one copy of a shard: carries messages between clients, its peer and the coordinator.

It decides nothing (shards/replica.py does) and only sets the order of reading: first the
coordinator, then the peer, then clients. A copy that is to become the primary does not read from
clients until its configuration is confirmed: their requests often arrive a moment too early.
"""

import time
from functools import partial

import zmq

from ps.logs import logger
from ps.replication.heartbeat import HeartbeatSender
from ps.replication.peer_link import PeerLink
from ps.security.authorization import Admission
from ps.security.keys import KeyPair, address_of
from ps.server.frontend import ShardFrontend
from ps.socket_context import SocketContext
from ps.transport.addresses import HOST_NAME
from ps.transport.advertised_address import Advertised, advertise
from ps.transport.coordinator_messages import Heartbeat
from ps.transport.server_thread import ServerThread
from ps.transport.socket_options import drop_with
from ps.transport.transports import Transport
from ps.transport.unfinished_messages import POLL_S
from shards.buffer_pool import heap_allocator
from shards.replica import Effects, ShardReplica
from shards.replication_messages import Beat
from shards.shard import Shard
from shards.spec import ShardSpec
from shards.transition_io import Outgoing

_TICK_S = 0.1


class ReplicaServer(ServerThread):
    """One copy of a shard, reached by TCP. Its loop ends when the copy is retired."""

    def __init__(
        self,
        spec: ShardSpec,
        boot: int,
        coordinator: str,
        bind: str,
        admission: Admission | None = None,
        *,
        plaintext: bool = False,
        advertised: Advertised = Advertised(),  # noqa: B008  # frozen
        node: str | None = None,
    ) -> None:
        """Bind two ports at `bind`, for clients and for the peer; raises BadInput.

        If other hosts can reach the ports, `admission` says which keys may connect as clients, and
        the copy makes its own key here; or `plaintext` admits anybody. `advertised` and
        `node` decide which addresses it publishes.
        """
        context = SocketContext()
        keys = KeyPair.new() if admission is not None else None
        self._shard_endpoint = ShardFrontend(
            spec,
            context,
            bind,
            Transport.TCP,
            heap_allocator,
            admission,
            plaintext=plaintext,
            keys=keys,
        )
        drop_with(self, context, self._shard_endpoint.all_sockets)
        floats = spec.frame_floats
        pinned = address_of(coordinator).key
        self._peers = PeerLink(spec.job, boot, floats, bind, keys, pinned, spec.workers)
        super().__init__(f"copy-{boot}", context, logger(__name__, job=spec.job, shard=spec.shard))
        self.endpoint = advertise(self._shard_endpoint.endpoint, advertised, node)
        first = Beat(spec.shard, boot, 0)
        peer = advertise(self._peers.endpoint, advertised, node)
        self._report = Heartbeat(spec.job, first, self.endpoint, peer)
        self.replica = ShardReplica(spec.shard, boot, partial(_empty_shard, spec, boot))
        self._reporter = HeartbeatSender(context, coordinator, str(boot), self._report, keys)
        self._spec = spec
        self._answers: list[Outgoing] = []
        spec.prepare()

    def _let_go(self) -> None:
        self._shard_endpoint.close()
        self._peers.close()

    def _loop(self) -> None:
        self._reporter.start()
        try:
            self._serve()
        finally:
            self._reporter.stop()

    def _serve(self) -> None:
        internal = (self._wake_in, self._reporter.socket, *self._peers.sockets)
        events = (self._peers.events, *self._shard_endpoint.events)
        among_themselves, with_clients = zmq.Poller(), zmq.Poller()
        for socket in (*internal, *events):
            among_themselves.register(socket, zmq.POLLIN)
        for socket in (*internal, *events, *self._shard_endpoint.sockets):
            with_clients.register(socket, zmq.POLLIN)
        tick_at, poll_s = time.monotonic(), POLL_S
        forget_at = tick_at + self._spec.lease_s / 4  # the tick period of ShardServer
        while not self.replica.retired:
            poller = among_themselves if self.replica.awaits_confirmation else with_clients
            left_s = min(poll_s, max(0.0, tick_at - time.monotonic()))
            ready = dict(
                poller.poll(int(left_s * 1000) + 1 if self.replica.shard.is_prepared else 0)
            )
            if self._wake_in in ready:
                return
            poll_s = self._take_turn(ready)
            if not (ready or self.replica.shard.is_prepared):
                self.replica.shard.prepare()
            now = self._reporter.moved_at = time.monotonic()
            if now >= forget_at:
                self.replica.shard.forgive_silence(now - forget_at)
                self._shard_endpoint.tick()
                forget_at = now + self._spec.lease_s / 4
            if now >= tick_at:
                self._perform(self.replica.tick(now))
                tick_at = now + _TICK_S
            self._shard_endpoint.send(self._answers)
            self._answers.clear()

    def _take_turn(self, ready: "dict[zmq.Socket[bytes], int]") -> float:
        """Pass what has come to the replica; send posts at once, and collect the answers.

        Returns the longest time, in seconds, until the connections must be checked again.
        """
        if self._reporter.socket in ready:
            self._shard_endpoint.note_operator()  # alive, because the coordinator ends with it
            for notice in self._reporter.take_notices():
                configuration = notice.assignment.configuration
                if configuration.holds(self.replica.boot):
                    self._peers.set_members(configuration.members, notice.peers)
                self._perform(self.replica.assign(notice.assignment, time.monotonic()))
        if not ready.keys().isdisjoint(self._peers.sockets):
            for origin, message, frames in self._peers.arrivals():
                now = self._reporter.moved_at = time.monotonic()
                self._perform(self.replica.receive(origin, message, frames, now))
        poll_s = self._peers.check_connections()
        if not ready.keys().isdisjoint(self._shard_endpoint.sockets):
            shard, metrics = self.replica.shard, self.replica.shard.metrics
            arrivals, before = self._shard_endpoint.arrivals(shard), metrics.pushes
            began = time.monotonic()
            for arrival in arrivals:
                now = self._reporter.moved_at = time.monotonic()
                effects = self.replica.handle(arrival.sender, arrival.message, arrival.frames, now)
                self._perform(effects)
            parked, spent_s = len(shard.gate.parked), time.monotonic() - began
            metrics.turn(len(arrivals), metrics.pushes - before, parked, spent_s)
            if ready.keys().isdisjoint(self._shard_endpoint.events):
                return POLL_S
        return min(poll_s, self._shard_endpoint.check_connections())

    def _perform(self, effects: Effects) -> None:
        for post in effects.posts:
            self._peers.send(post)
        if effects.beat is not None:
            self._reporter.report(
                Heartbeat(self._report.job, effects.beat, self._report.endpoint, self._report.peer)
            )
        self._answers += effects.answers


def _empty_shard(spec: ShardSpec, boot: int) -> Shard:
    shard = Shard(spec, boot)
    shard.metrics.host = HOST_NAME
    return shard
