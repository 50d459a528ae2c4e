"""A worker's connection to the shards of one cluster; a reshard replaces it as a whole.

The session, its connections and the thread that renews the lease concern the same shards: they
begin and end together. A client has one cluster connection after another (ps/client.py), and keeps
what outlives each: its clock, its flow control, and which weights it has requested.

This is a thin driver: it sends what the session returns, feeds it what arrives, and passes its
events on. Not for use by two threads.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ps.cluster import Cluster
from ps.session.compression import Compression
from ps.session.events import AnswerLate, Event, Ready, Relocated, Send, Unreachable
from ps.session.flow_control import Times
from ps.session.session import Session
from ps.transport.addresses import HOST_NAME
from ps.transport.link_model import LinkModel
from ps.transport.shard_connections import ShardConnections
from ps.transport.transports import Transport
from shards.errors import DownpourError
from shards.messages import Message, Refusal, Remedy, Renew
from shards.refusals import error_of
from shards.wire_format import Frames

_RENEWALS_A_LEASE = 4
_POLL_S = 1.0  # the longest time for which a waiting owner does not check the lease renewals

Note = Callable[[Event, float], None]
"""The client's handler for an event, with the time of the event."""
_ANSWER_S = 0.25  # the time for answers to a renewal; later ones are read after the next renewal


class ClusterConnection:
    """Links and session of one cluster; the links are open on return, nothing is sent yet. `close`
    it.

    `successors` is the cluster to which the job was resharded, once a shard has reported it: this
    connection is then over. `torn` means that Ctrl-C interrupted the handling of an answer, or a
    greeting that was due. The answer may then be recorded in part or not at all: see `ask_again`.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        worker: str,
        incarnation: int,
        retry_s: float,
        patience_s: float,
        compression: Mapping[str, Compression],
        transport: Transport,
        link: LinkModel | None,
        gradients: int,
        stripes: int | None,
        times: Times,
    ) -> None:
        """The options are as in `Client`. `gradients` is the number in use at once; the time to
        pack messages is added to `times`.

        Raises what `ShardConnections` does.
        """
        self.cluster = cluster
        self.successors: Cluster | None = None
        self.torn = False
        self.session = Session(
            job=cluster.job,
            worker=worker,
            incarnation=incarnation,
            layout=cluster.layout,
            shard_map=cluster.map,
            retry_s=retry_s,
            patience_s=patience_s,
            compression=compression,
            max_norms=cluster.max_norms,
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
        if self.connection.sharing is not None:
            self.session.encoder.take_rows = self.connection.sharing.take_rows
        weakref.finalize(self, self.connection.close_slow)
        self.links = self.connection.links
        self._faults: list[DownpourError] = []  # not raised yet
        self._renewal: LeaseKeepAlive | None = None
        self._stripes, self._times = stripes, times

    def begin(self, note: Note) -> Ready | None:
        """Register the worker, and renew its lease from then on; returns where it continues.

        Returns None if these shards have handed the job over: it is at `successors`.
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
        # Without this, a client that is dropped without `close` would renew its lease for ever, and
        # the other workers would wait for it.
        weakref.finalize(self, self._renewal.end)
        self._renewal.begin()
        self.connection.check_transport()
        self.connection.stripe(self._stripes, self.session.retry_s)
        return ready

    def send(self, sends: Sequence[Send]) -> None:
        """Hand messages to the network; those to one shard leave together."""
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
        """Wait up to `timeout` seconds for something to arrive or fall due, and handle it.

        Raises Unreachable when a shard stays silent, and the error that a final refusal stands for,
        after all that arrived with it is recorded; several errors are raised one per call.
        """
        if self._faults:
            raise self._faults.pop(0)
        if self._renewal is not None and self._renewal.failure is not None:
            raise self._renewal.failure
        deadline = self.session.next_deadline
        if timeout is None:
            timeout = 1.0 if deadline is None else deadline - time.monotonic()
        timeout = min(timeout, _POLL_S)
        for shard, reply, frames in self.links.receive(timeout, at_once=1):
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
        if self.links.changed:
            self.torn = True  # until the shards that the links now lead to have been greeted
            moved, renewed = self.links.changes()
            for shard in moved:
                self.send(self.session.greet_new_primary(shard, time.monotonic()))
            for shard in renewed:
                self.send(self.session.resume_link(shard, time.monotonic()))
            self.torn = False
        while self._renewal is not None and self._renewal.refusals:
            self.torn = True
            shard, refusal = self._renewal.refusals.popleft()
            self.send(self.session.receive(shard, refusal, (), time.monotonic())[0])
            self.torn = False
        if deadline is not None and (now := time.monotonic()) >= deadline:
            note(AnswerLate(), now)
            self._tick()

    def ask_again(self) -> None:
        """Greet every shard again; everything outstanding follows, addressed to the incarnation
        that answers.

        Repeating the outstanding messages would not suffice: if the interrupted answer was to a
        greeting and is recorded in part, nothing outstanding would complete the greeting. The
        caller also requests its weights again, and then resets `torn`.
        """
        self.send(self.session.hello(time.monotonic()))

    def close(self) -> None:
        """Drop the connections as a crash would, and let the lease run out; may be called twice.

        The session stays usable: its outstanding messages can be carried over.
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


def establish(
    connection: ClusterConnection, connect: Callable[[Cluster], ClusterConnection], note: Note
) -> ClusterConnection:
    """This connection, or its last successor, once its shards have registered the worker."""
    try:
        while not connection.begin(note):
            connection.close()
            connection = connect_successor(connection, connect)
    except BaseException:
        connection.close()
        raise
    return connection


def connect_successor(
    connection: ClusterConnection, connect: Callable[[Cluster], ClusterConnection]
) -> ClusterConnection:
    """A connection to the shards that have taken over from those of `connection`."""
    assert connection.successors is not None, "the shards have handed the job over"
    return connect(connection.successors)


class LeaseKeepAlive:
    """A thread with links of its own that renews the lease every `period_s` seconds.

    So the worker may compute for longer than its lease. The thread also notices when another
    incarnation has taken over the worker's name, and ends then. A shard refuses a renewal if it has
    forgotten this worker, for example after a rollback, and has to be greeted: the owner does that,
    because only the owner may use the session.

    `failure` is the exception that ended the thread, if any. `refusals` are the shards that have to
    be greeted, each with its answer; the owner reads both and removes the refusals.
    """

    def __init__(self, connection: ShardConnections, session: Session, period_s: float) -> None:
        self._session = session
        self._connection = connection
        self._period_s = period_s
        self._ended = threading.Event()
        self.failure: Exception | None = None
        self.refusals: deque[tuple[int, Refusal]] = deque()
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)

    def begin(self) -> None:
        self._thread.start()

    def end(self) -> None:
        self._ended.set()

    def stop(self) -> None:
        self.end()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        try:
            self._renew_until_ended()
        except Exception as error:  # noqa: BLE001 - the owner raises it, whatever it is
            self.failure = error

    def _renew_until_ended(self) -> None:
        links = self._connection.more_links()
        answer_s = min(_ANSWER_S, self._period_s / 2)
        try:
            while not self._ended.wait(self._period_s - answer_s):
                links.follow(self._connection.links.endpoints)
                for shard, boot in enumerate(self._session.boots):
                    links.send(shard, self._renew(boot, links.rtt_s(shard)))
                if self._ended.wait(answer_s):
                    return
                for shard, answer, _ in links.receive(0.0):
                    if isinstance(answer, Refusal):
                        self._note(shard, answer)
        finally:
            links.close()

    def _note(self, shard: int, answer: Refusal) -> None:
        if answer.remedy is Remedy.FENCED:
            raise error_of(answer)
        # Every other refusal is also an answer to the owner's own messages.
        if answer.remedy is Remedy.RESYNCHRONISE:
            self.refusals.append((shard, answer))

    def _renew(self, boot: int, rtt_s: float) -> Renew:
        session = self._session
        sender = session.job, session.worker, session.incarnation
        return Renew(0, *sender, boot, HOST_NAME, rtt_s)
