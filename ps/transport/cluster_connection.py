"""A worker's stay with the shards of one cluster: what is made anew when its job moves to others.

The session, its connection and the thread that renews the lease speak of the same shards: they
begin together and end together. A client has one stay after another (ps/client.py), and keeps what
outlives each: its clock, its pace, which weights it has asked for.

This, too, is a dull driver: it carries what the session says and hears, and hands on what has come
to pass. Not for use by two threads.
"""

import time
import weakref
from collections.abc import Callable, Sequence

from ps.cluster import Cluster
from ps.session.compression import Compression
from ps.session.events import Event, Ready, Relocated, Send, Unreachable
from ps.session.flow_control import Times
from ps.session.session import Session
from ps.transport.lease_keepalive import LeaseKeepAlive
from ps.transport.link_model import LinkModel
from ps.transport.local_sockets import Transport
from ps.transport.shard_connections import ShardConnections
from shards.errors import DownpourError
from shards.messages import Message
from shards.wire_format import Frames

_RENEWALS_A_LEASE = 4
_LOOK_S = 1.0  # at least as often as this a waiting owner looks at what the renewals have heard

Note = Callable[[Event, float], None]
"""What a client does about something that has come to pass, and when that was."""


class ClusterConnection:
    """The links to the shards are open on return, and nothing has been said; `close` it.

    `successors` is where the job has moved to, once the shards say so: this stay is over then.
    `torn` says that Ctrl-C came while an answer was dealt with, or a shard was to be greeted. What
    came may then be noted by half, or not at all: see `ask_again`.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        worker: str,
        incarnation: int,
        retry_s: float,
        patience_s: float,
        compression: Compression | None,
        transport: Transport,
        link: LinkModel | None,
        gradients: int,
        stripes: int | None,
        times: Times,
    ) -> None:
        """As `Client` has them; `gradients` are in use at once, and `times` is told of packing.

        Raises what `ShardConnections` does.
        """
        self.cluster = cluster
        self.successors: Cluster | None = None
        self.torn = False
        self.session = Session(
            job=cluster.job,
            worker=worker,
            incarnation=incarnation,
            build=cluster.build,
            table=cluster.table,
            shard_map=cluster.map,
            retry_s=retry_s,
            patience_s=patience_s,
            compression=compression,
        )
        self.connection = ShardConnections(
            cluster,
            worker=worker,
            incarnation=incarnation,
            transport=transport,
            link=link,
            gradients=gradients,
            patience_s=patience_s,
        )
        weakref.finalize(self, self.connection.close_slow)
        self.links = self.connection.links
        self._faults: list[DownpourError] = []  # that have not been raised
        self._renewal: LeaseKeepAlive | None = None
        self._stripes, self._times = stripes, times

    def begin(self, note: Note) -> Ready | None:
        """Introduce the worker, and renew its lease from then on; where it goes on.

        None if these shards have no job any more: it is at `successors`.
        """
        self.links.await_connections(self.session.retry_s)
        self.send(self.session.hello(time.monotonic()))
        while self.session.ready is None:
            self.turn(note)
            if self.successors is not None:
                return None
        ready = self.session.ready
        self._renewal = LeaseKeepAlive(
            self.connection, self.session, ready.lease_s / _RENEWALS_A_LEASE
        )
        # Or a client that was dropped without a word would hold back the others for ever.
        weakref.finalize(self, self._renewal.end)
        self._renewal.begin()
        self.connection.check_transport()
        self.connection.stripe(self._stripes, self.session.retry_s)
        return ready

    def send(self, sends: Sequence[Send]) -> None:
        """Hand it to the network; what goes to one shard leaves as one."""
        if not sends:
            return
        started = time.monotonic()
        to_each: dict[int, list[tuple[Message, Frames]]] = {}
        for send in sends:
            to_each.setdefault(send.shard, []).append((send.message, send.frames))
        for shard, messages in to_each.items():
            self.links.send_together(shard, messages)
        self._times.serialise_s += time.monotonic() - started

    def turn(self, note: Note, timeout: float | None = None) -> None:
        """Wait for the next thing to happen, up to `timeout`, and deal with it.

        Raises Unreachable when a shard stays silent, and the error that a final refusal stands for,
        once all that came with it is noted; of several, each at a turn of its own.
        """
        if self._faults:
            raise self._faults.pop(0)
        if self._renewal is not None and self._renewal.failure is not None:
            raise self._renewal.failure
        deadline = self.session.next_deadline
        if timeout is None:
            timeout = 1.0 if deadline is None else deadline - time.monotonic()
        timeout = min(timeout, _LOOK_S)
        for shard, reply, frames in self.links.receive(timeout):
            now = time.monotonic()
            self.torn = True
            try:
                sends, events = self.session.receive(shard, reply, frames, now)
                if sends:
                    self.send(sends)
                for event in events:
                    if isinstance(event, Relocated):
                        self.successors = Cluster.decode(event.cluster)
                    else:
                        note(event, now)
            except DownpourError as error:
                self._faults.append(error)
            self.torn = False
        if self._faults:
            raise self._faults.pop(0)
        if self.successors is not None:
            return
        self.torn = True  # until whoever the links lead to by now has been greeted
        for shard in self.links.moved():
            self.send(self.session.moved(shard, time.monotonic()))
        for shard in self.links.renewed():
            self.send(self.session.renewed(shard, time.monotonic()))
        while self._renewal is not None and self._renewal.refusals:
            shard, refusal = self._renewal.refusals.popleft()
            self.send(self.session.receive(shard, refusal, (), time.monotonic())[0])
        self.torn = False
        if deadline is not None and deadline <= time.monotonic():
            self._tick()

    def ask_again(self) -> None:
        """Greet every shard anew; all that is owed follows, addressed to the life that answers.

        Repeating what is owed would not do: it may have been the answer to a greeting that was
        noted by half, and then nothing is outstanding that would complete it. Whoever asked for
        weights asks for those anew, too, and this is no longer `torn` then.
        """
        self.send(self.session.hello(time.monotonic()))

    def close(self) -> None:
        """Drop the connections as a crash would, and let the lease run out; may be called twice.

        The session lives on: what it owes can be taken along.
        """
        if self._renewal is not None:
            self._renewal.stop()
        self.connection.close()

    def _tick(self) -> None:
        try:
            self.send(self.session.tick(time.monotonic()))
        except Unreachable as error:
            text = f"{error} at {self.links.where(error.shard)}"
            raise Unreachable(text, error.shard) from None
