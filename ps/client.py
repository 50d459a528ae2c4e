"""The blocking client of one worker: flat weights are pulled, flat gradients pushed.

    with Client(cluster, worker="w0") as shards:
        weights = shards.pull()
        shards.push(gradient(weights))

The SDK's workers (ps/worker.py) and the training loop (worker/training/training_loop.py) use it.
They check what a user passes; here only the options of a client are checked. The client is a thin
driver: the session of its cluster connection (ps/transport/cluster_connection.py) decides what to
send, and the client waits. It has no receiving thread: a call to pull or push processes what has
arrived, and sleeps at the sockets themselves. While the caller computes, ZeroMQ's thread sends and
receives, so a prefetched pull and an unacknowledged push cost the caller no time. A small thread
renews the lease, so that a long computation is not mistaken for a crash. When the job is resharded,
the client opens another cluster connection to the new shards. A call while another thread is inside
one raises BadInput: each thread needs a client of its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from os import getpid
from pathlib import Path
from threading import RLock
from typing import Concatenate, ParamSpec, TypeVar

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ps import path_checks
from ps.client_context import ClientContext
from ps.cluster import Cluster, cluster_of
from ps.process_owner import SECOND_THREAD
from ps.session import events, reshard_client
from ps.session.compression import Compression, by_table
from ps.session.flow_control import MIN_IN_FLIGHT, FlowControl, PrefetchTable, PullKey, Times
from ps.session.payload_encoder import Gradients
from ps.session.row_requests import Gather
from ps.session.session import Session
from ps.shared_memory.client_buffers import ClientBuffers, PulledWeights
from ps.snapshots import residuals
from ps.snapshots.residual_writer import LOOK_S, ResidualWriter
from ps.snapshots.worker_state import NO_STATE, Arrays, OwnState, WorkerState
from ps.storage import Place
from ps.transport.cluster_connection import ClusterConnection, connect_successor, establish
from ps.transport.link_model import LinkModel, link_of
from ps.transport.shard_sockets import Links
from ps.transport.striping import MAX_STRIPES
from ps.transport.transports import Transport, transport_named
from shards import argument_checks
from shards.buffer_pool import Allocator, heap_allocator
from shards.errors import BadInput, DownpourError, Fenced
from shards.messages import MAX_IN_FLIGHT, MAX_STEPS, Pull, Push

_BRIEF_S = 1e-4  # after a shorter absence, arrivals have not waited long enough to matter
_SPARE = 6  # gradients besides those in flight: being computed, accumulated, unacknowledged

Params = ParamSpec("Params")
Returned = TypeVar("Returned")


def _by_one_thread(
    method: "Callable[Concatenate[Client, Params], Returned]",
) -> "Callable[Concatenate[Client, Params], Returned]":
    """The method, refused while another thread is in a call: the two would mix up answers.

    Its errors name the worker.
    """

    @wraps(method)
    def call_guarded(client: "Client", /, *args: Params.args, **options: Params.kwargs) -> Returned:
        if getpid() != client.opener.pid:  # `check_process` would take two calls more at each push
            client.check_process()
        if not client._user.acquire(blocking=False):
            raise client._misuse_error(SECOND_THREAD)
        try:
            return method(client, *args, **options)
        except DownpourError as error:
            error.worker = error.worker or client.worker
            raise
        finally:
            client._user.release()

    return call_guarded


class Client(ClientContext):
    """One worker's connection to every shard of a job.

    `cluster` is the description of the shards, or the path of a file that `Cluster.save` wrote.
    The options are those of `ps.Job.worker`. With `keep`, the residual and the result of
    `own_state` are written there for each snapshot of the job (ps/snapshots/residual_writer.py).
    `in_flight` (ps/session/flow_control.py) and `stripes` (ps/transport/striping.py) follow from
    the measured link unless they are given.

    `rolled_back` holds the last rollback of each shard that died and was restored from its
    autosave; `lost` counts this worker's acknowledged pushes that were lost in rollbacks, and
    `dropped` those that came too late, the last of them by `late_s` seconds.
    `on_pushed` is called with each push that every shard has acknowledged. `own_state` is called
    when a snapshot wants this worker's state: it returns what the caller keeps between pushes, or
    None to be called again later. `check` is called when an answer is late: it may raise the reason
    why none will come.
    """

    def __init__(
        self,
        cluster: Cluster | str | Path,
        *,
        worker: str,
        incarnation: int = 0,
        retry_s: float = 1.0,
        patience_s: float = 30.0,
        in_flight: int | None = None,
        compression: Compression | str | Mapping[str, Compression | str] | None = None,
        keep: Place | None = None,
        link: LinkModel | str | None = None,
        allocate: Allocator = heap_allocator,
        transport: str = Transport.AUTO,
        stripes: int | None = None,
    ) -> None:
        cluster, worker = cluster_of(cluster), argument_checks.name("worker", worker)
        incarnation = argument_checks.whole("incarnation", incarnation, 0)
        retry_s = argument_checks.seconds("retry_s", retry_s)
        patience_s = argument_checks.seconds("patience_s", patience_s, endless=True)
        if in_flight is not None:
            in_flight = argument_checks.whole("in_flight", in_flight, 1, MAX_IN_FLIGHT)
        if keep is not None:
            keep = path_checks.place("keep", keep)
        if stripes is not None:
            stripes = argument_checks.whole("stripes", stripes, 1, MAX_STRIPES)
        argument_checks.function(
            "allocate", allocate, "a function from a number of floats to an array"
        )
        super().__init__(worker)
        self.incarnation = incarnation
        self._user = RLock()  # held by the thread that is in a call
        self.layout, self.times = cluster.layout, Times()
        self._tables = cluster.layout.names
        self._size = cluster.layout.size  # kept, because `size` sums over the tensors
        self.duplicates = self.staleness = self.clock = self.step = self.lost = self.dropped = 0
        self.rolled_back: dict[int, events.RolledBack] = {}
        self.rtt_s = self._wait_s = self.late_s = 0.0
        self._pushed_at = Times()  # the times at the last push
        self._pacing, self._prefetched = FlowControl(in_flight, time.monotonic()), PrefetchTable()
        self._arenas = ClientBuffers(cluster.layout, allocate)
        self._pulled: PulledWeights | None = None
        self._first_epoch = cluster.map.epoch
        self._leaving = self._departed = False
        self.on_pushed: Callable[[events.Pushed], None] | None = None
        self.own_state: Callable[[], OwnState | None] = lambda: NO_STATE
        self.check: Callable[[], None] = lambda: None
        self._connect = partial(
            ClusterConnection,
            worker=worker,
            incarnation=incarnation,
            retry_s=retry_s,
            patience_s=patience_s,
            compression=by_table(compression, cluster.layout),
            transport=transport_named(transport),
            link=link_of(link),
            gradients=(in_flight or MIN_IN_FLIGHT) + _SPARE,
            stripes=stripes,
            times=self.times,
        )
        self._switch_to(self._connect(cluster))
        self._compresses = self._current.session.encoder.feedback is not None
        self.residual_writer = (
            ResidualWriter(keep, cluster.job, worker, incarnation) if keep is not None else None
        )
        try:
            self._switch_to(establish(self._current, self._connect, self._note))
            ready = self._current.session.ready
            assert ready is not None, "every shard has registered the worker"
            self.clock, self.step = ready.clock, ready.step
        except BaseException:
            self.abort()
            raise

    @property
    def cluster(self) -> Cluster:
        """The job's cluster as last reported to this client."""
        return self._current.cluster

    @property
    def session(self) -> Session:
        """The session with the present shards; a reshard replaces it."""
        return self._current.session

    # --- pull and push ----------------------------------------------------------------------------

    @_by_one_thread
    def pull(
        self,
        clock: int | None = None,
        *,
        tables: Sequence[str] | None = None,
        gather: Gather | None = None,
        copy: bool = False,
        timeout_s: float | None = None,
    ) -> PulledWeights:
        """The weights for the step at `clock` (default: the next one); waits at the staleness
        bound. After `timeout_s` seconds it raises ClockTimeout; the call may then be repeated.

        With `tables`, the weights of these tables alone, one after another in the job's order; with
        `gather`, also the `rows` of these ids, of the same version. A call that is repeated has to
        pass the same `gather`. The array is read-only, and not overwritten while it is referred to;
        drop it when done. With `copy` it is the caller's own, and writable.
        """
        at = self.clock if clock is None else clock
        names = self._tables if tables is None else self.layout.select(tables).names
        key = PullKey(at, names, gather)
        started, before = self._enter(Pull), self.times.serialise_s
        if not self._prefetched.holds_next(key):
            self._current.send(self._ask(key, time.monotonic()))
        return self._receive(key, started, before, copy=copy, timeout_s=timeout_s)

    @_by_one_thread
    def take(self, clock: int, tables: Sequence[str], *, wait: bool) -> PulledWeights | None:
        """The weights of some tables that were requested for `clock`, once they have arrived.

        Without `wait` None stands for weights under way. What was not requested is requested now,
        as after a restart. Unlike `pull`, it cancels no request for an earlier clock: each table
        has its own.
        """
        key = PullKey(clock, self.layout.select(tables).names)
        started, before = self._enter(None), self.times.serialise_s
        if key not in self._prefetched:
            self._current.send(self._ask(key, time.monotonic()))
        if not wait and not self._prefetched.has(key):
            self.poll()
            if not self._prefetched.has(key):
                return None
        return self._receive(key, started, before)

    def _receive(
        self,
        key: PullKey,
        started: float,
        before: float,
        *,
        copy: bool = False,
        timeout_s: float | None = None,
    ) -> PulledWeights:
        """Wait for requested weights; the call `started` when `serialise_s` was `before`."""
        while (pulled := self._prefetched.take(key)) is None:
            if timeout_s is None:
                self._turn()
            elif (left_s := started + timeout_s - time.monotonic()) > 0:
                self._turn(left_s)
            else:
                raise self.session.make_clock_timeout(key.clock, timeout_s)
        took = time.monotonic() - started - (self.times.serialise_s - before)
        self._wait_s = min(took, pulled.waited_s)
        self.times.waited_s += self._wait_s
        self.times.network_s += took - self._wait_s
        assembling = time.monotonic()
        self._pulled = pulled_weights = self._arenas.assemble(pulled)
        if copy:
            pulled_weights = structs.replace(pulled_weights, weights=pulled_weights.weights.copy())
        now = time.monotonic()
        self.times.serialise_s += now - assembling
        self._pacing.leave(now)
        return pulled_weights

    @_by_one_thread
    def prefetch(
        self, clock: int, tables: Sequence[str] | None = None, gather: Gather | None = None
    ) -> None:
        """Request what `pull` will return; the answer travels while the caller computes.

        Several may be requested: `best_prefetch` is how many steps early each has to be.
        """
        self._check_open()
        names = self._tables if tables is None else self.layout.select(tables).names
        if (key := PullKey(clock, names, gather)) not in self._prefetched:
            self._current.send(self._ask(key, time.monotonic()))

    @property
    def best_prefetch(self) -> int:
        """By how many of the caller's steps to prefetch weights early, given the measured link."""
        return self._pacing.ahead

    @_by_one_thread
    def push(
        self,
        gradient: NDArray[np.float32] | Gradients,
        *,
        read_versions: Sequence[int] | None = None,
        steps: int = 1,
        ticks: int | None = None,
        samples: int = 0,
        loss: float = 0.0,
        prefetch: int | None = None,
        prefetch_tables: Sequence[str] | None = None,
        tokens: int = 0,
        window: int = 0,
    ) -> None:
        """Send the gradient of `steps` steps. Waits while `in_flight` pushes are unacknowledged.

        The gradient is one float32 array of all dense tables, of shape (layout.size,), or a mapping
        from names to arrays of shape (table.size,), and rows of sparse tables. Tables that it omits
        do not change. All are applied as one. The array must not change until the push is
        acknowledged: take it from `new_gradient()`, then drop it.

        `read_versions`, one per shard, are the versions of the weights that the gradient was
        computed from (default: the last pull's). The worker's clock rises by `ticks` (default: by
        `steps`), which is 1 for a clock that counts windows of steps. `prefetch` is a clock: the
        weights for it, which include this push, are requested in the same message, so both cost one
        round trip; `prefetch_tables` are the tables to request (default: all). `tokens` and
        `window` are those of a report to a quorum (shards/messages.py).

        Raises BadInput when the array does not fit, or when a shard has refused the content of an
        earlier push. That shard applies nothing of the earlier push; the next push may follow.
        """
        if read_versions is None:
            if self._pulled is None:
                raise BadInput("push", expected="a pull before the first push", got="none")
            read_versions = self._pulled.versions
        ticks = steps if ticks is None else ticks
        # Of several reports at the end of a plan the first counts all its steps.
        assert ticks >= 1, f"a push of {ticks} ticks"
        assert 0 <= steps <= MAX_STEPS, f"a push of {steps} steps"
        started, before = self._enter(Push), self.times.serialise_s
        if self._current.session.pending_pushes:
            self._await_room(self._pacing.room)
        now = time.monotonic()
        self.times.network_s += now - started - (self.times.serialise_s - before)
        request, sends = self._current.session.push(
            self._arenas.place_in_memory(gradient) if self._places else gradient,
            reshard_client.versions(read_versions, self.cluster.map.shards)
            if self._resharded and read_versions
            else read_versions,
            clock=self.clock + ticks,
            step=self.step + steps,
            steps=steps,
            samples=samples,
            loss=loss,
            times=self.times.since(self._pushed_at, self.rtt_s, self._wait_s),
            now=now,
            tokens=tokens,
            window=window,
        )
        self._pushed_at = structs.replace(self.times)
        self._pacing.pushes.record_send(request, now)
        self.clock += ticks
        self.step += steps
        if prefetch is not None:
            key = PullKey(prefetch, tuple(prefetch_tables or self._tables))
            if key not in self._prefetched:
                sends += self._ask(key, now)
        self._current.send(sends)
        self._pacing.leave(time.monotonic())

    @_by_one_thread
    def flush(self) -> None:
        """Wait until every push is acknowledged by every shard."""
        started, before = self._enter(None), self.times.serialise_s
        self._await_room(0)
        now = time.monotonic()
        self.times.network_s += now - started - (self.times.serialise_s - before)
        self._pacing.leave(now)

    @_by_one_thread
    def wait(self, until: Callable[[], bool], timeout_s: float) -> bool:
        """Handle what arrives until `until()`, or for `timeout_s` seconds; returns `until()`."""
        started, before = self._enter(None), self.times.serialise_s
        end_by = started + timeout_s
        while not (reached := until()) and (left_s := end_by - time.monotonic()) > 0:
            self._turn(left_s)
        now = time.monotonic()
        self.times.network_s += now - started - (self.times.serialise_s - before)
        self._pacing.leave(now)
        return reached

    # --- for a caller that waits elsewhere: an event loop ----------------------------------------

    @_by_one_thread
    def poll(self) -> None:
        """Handle what has arrived and what is due, without waiting."""
        self._enter(None)
        self._turn(0.0)
        while self._current.links.waiting:
            self._turn(0.0)
        self._pacing.leave(time.monotonic())

    def has_pulled(self, gather: Gather | None = None) -> bool:
        """Return whether what the next `pull(gather=gather)` returns has arrived."""
        return self._prefetched.has(PullKey(self.clock, self._tables, gather))

    @property
    def pending_pushes(self) -> int:
        """The number of pushes that not every shard has acknowledged."""
        return self._current.session.pending_pushes

    def has_room(self) -> bool:
        """Return whether `push` would send at once."""
        return self.pending_pushes <= self._pacing.room

    @property
    def next_deadline(self) -> float | None:
        """When to call `poll` although nothing has arrived, by the monotonic clock in seconds."""
        return self._current.session.next_deadline

    @property
    def links(self) -> Links:
        """The links to the present shards; a reshard replaces them."""
        return self._current.links

    def new_gradient(self, *, zeroed: bool = True) -> NDArray[np.float32]:
        """A zeroed float32 array of all tables, for a gradient; dropping it recycles it.

        `layout.split` gives the part of each table. Where a shard shares memory with this client,
        the array is in that memory and is pushed without a copy. Zeroing costs time; without
        `zeroed` the content is arbitrary, so write every float of it, padding included.
        """
        # A fork would write into the memory that its parent shares.
        if getpid() != self.opener.pid:
            self.check_process()
        array = self._arenas.take()
        if zeroed:
            array.fill(0)
        return array

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport of the arrays to and from each shard: shm, ipc or tcp."""
        return self._current.connection.transports

    def write_requested_state(self) -> None:
        """Write this worker's state if a snapshot wants it; what waits for an answer does, too."""
        self.check_process()
        if self.residual_writer is not None and self.residual_writer.requested:
            self._write_residual()

    @property
    def compresses(self) -> bool:
        """True if pushes are compressed, and so leave a residual."""
        return self._compresses

    @property
    def versions(self) -> tuple[int, ...]:
        """Each shard's version when it registered this worker."""
        return self._current.session.versions

    @property
    def seq(self) -> int:
        """The number of this worker's last push; at first, the last applied push of its former
        incarnation.
        """
        return self._current.session.seq

    def close(self) -> None:
        """Wait for the last acknowledgements, leave the job and drop the connections; final.

        In a process forked off the one that made the client it does nothing, as `abort`.
        """
        if self.opener.is_this_process and not self._closed:
            self._leave()

    @_by_one_thread
    def _leave(self) -> None:
        try:
            self.flush()
            if self.residual_writer is not None and self.seq:
                self._write_residual()
            self._leaving = True
            self._current.send(self._current.session.leave(time.monotonic()))
            while not self._departed:
                self._turn()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the connections as a crash would; the others wait until the lease expires."""
        if not self.opener.is_this_process:
            return
        self._closed = True
        self._current.close()
        if self.residual_writer is not None:
            self.residual_writer.close()

    def copy_state(self) -> tuple[WorkerState, Arrays] | None:
        """This worker's state, copied, for a file; None while `own_state` has none."""
        return residuals.copy_state(self.session, self.step, self.clock, self.own_state())

    def _write_residual(self) -> None:
        """Write this worker's state for a snapshot of the shards, in the background."""
        if self.residual_writer is not None and (state := self.copy_state()) is not None:
            self.residual_writer.write(*state)
            self.residual_writer.await_end(self._turn)

    # --- resharding -------------------------------------------------------------------------------

    def _switch_to(self, connection: ClusterConnection) -> None:
        """Send all further requests through this cluster connection."""
        sharing = connection.connection.sharing
        self._resharded = connection.cluster.map.epoch > self._first_epoch
        self._pacing.begin(self._size, shared=sharing is not None)
        # A compressed gradient is encoded into arrays of the session's own.
        self._places = sharing is not None and connection.session.encoder.feedback is None
        self._arenas.turn_to(connection.cluster.map, sharing)
        self._current = connection

    def _follow_reshard(self) -> None:
        """Connect to the new shards, and repeat the pushes that the former have not applied.

        Ctrl-C here leaves the client on the former connection with everything outstanding; the next
        call tries again.
        """
        former = self._current
        former.close()
        connection = establish(connect_successor(former, self._connect), self._connect, self._note)
        now = time.monotonic()
        try:
            joins, owed = reshard_client.resume_at(former.session, connection.session, now)
            keys = self._prefetched.restart()
            self._switch_to(connection)
        except BaseException:
            connection.close()
            raise
        self._current.send(joins)
        for request, sends in owed:
            self._pacing.pushes.record_send(request, now)
            self._current.send(sends)
        for key in keys:
            self._current.send(self._ask(key, now))
        if self._leaving:
            self._current.send(self._current.session.leave(time.monotonic()))

    # --- requests and answers ---------------------------------------------------------------------

    def _ask(self, key: PullKey, now: float) -> list[events.Send]:
        request, sends = self._current.session.pull(key.clock, now, key.tables, key.gather)
        self._pacing.pulls.record_send(request, now)
        self._prefetched.record_request(key, request)
        return sends

    def _await_room(self, unacknowledged: int) -> None:
        while self._current.session.pending_pushes > unacknowledged:
            self._turn()

    def _enter(self, kind: type[Pull | Push] | None) -> float:
        """A call begins: record how long the caller was busy, and process what arrived meanwhile.

        After a brief absence, arrivals are left to be processed with later ones. Returns the time.
        """
        if self._closed:  # tested here, because a function call costs time at each push
            self._check_open()
        now = time.monotonic()
        away_s = self._pacing.enter(kind, now)
        if self._pacing.in_flight is None and away_s > _BRIEF_S:
            deadline = self._current.session.next_deadline
            if deadline is not None and (deadline <= now or self._current.links.waiting):
                self._turn(0.0)
        self._pacing.listens = True
        return now

    def _turn(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds for the next arrival or deadline, and handle it."""
        if (writer := self.residual_writer) is not None:
            if writer.requested:  # also while it waits: the last snapshot's makes all workers wait
                self._write_residual()
            timeout = LOOK_S if timeout is None else min(timeout, LOOK_S)
        connection = self._current
        if connection.successors is None:  # it is set if Ctrl-C interrupted an earlier reshard
            if connection.torn:
                connection.ask_again()
                for key in self._prefetched.cancel_all():
                    self._current.send(self._ask(key, time.monotonic()))
                connection.torn = False
            connection.turn(self._note, timeout)
        if connection.successors is not None and connection.session.ready is not None:
            self._follow_reshard()

    def _note(self, event: events.Event, now: float) -> None:
        listening = self._pacing.listens
        match event:
            case events.Pulled(waited_s=waited_s):
                self._prefetched.record_pulled(event)
                self._pacing.pulls.record_answer(
                    event.request, now, listening=listening, waited_s=waited_s
                )
            case events.Pushed():
                if self.on_pushed is not None:
                    self.on_pushed(event)
                self.duplicates += event.duplicates > 0
                if event.dropped:
                    self.dropped += 1
                    self.late_s = event.late_s
                self.staleness = event.staleness
                self.rtt_s = event.rtt_s
                self._pacing.pushes.record_answer(event.request, now, listening=listening)
            case events.RolledBack():
                self.rolled_back[event.shard] = event
                self.lost += event.lost
            case events.Usurped():
                raise Fenced(event.text)
            case events.Departed():
                self._departed = True
            case events.AnswerLate():
                self.check()
