"""The blocking client, which is the SDK: pull weights, push gradients.

    with ps.Client(cluster, worker="w0") as shards:
        weights = shards.pull()
        shards.push(gradient(weights))

It is a dull driver: it asks the session of its stay with the shards
(ps/transport/cluster_connection.py) what to say, and waits. It has no thread of its own: who pulls
or pushes takes in what has come, and sleeps at the sockets themselves. While the caller computes,
ZeroMQ's thread goes on sending and receiving, so a prefetched pull and an unacknowledged push cost
the caller no time; a small thread renews the lease now and then, so that a long computation is not
taken for death. When the job moves to other shards, the client begins another stay with those. A
call while another thread is inside one raises BadInput: each thread needs a client of its own.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from threading import RLock
from types import TracebackType
from typing import Concatenate, ParamSpec, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import paths
from ps.cluster import Cluster, cluster_of
from ps.session import events, reshard_client
from ps.session.compression import Compression, compression_of
from ps.session.flow_control import LEAST, FlowControl, Times
from ps.session.prefetch_table import PrefetchTable
from ps.shared_memory.client_buffers import ClientBuffers, PulledWeights
from ps.snapshots import residuals
from ps.snapshots.object_store import Place
from ps.snapshots.residual_writer import ResidualWriter
from ps.snapshots.worker_state import Arrays, WorkerState, save_state
from ps.transport.cluster_connection import ClusterConnection
from ps.transport.link_model import LinkModel, link_of
from ps.transport.local_sockets import Transport, transport_named
from ps.transport.striping import MOST
from shards import arguments
from shards.errors import BadInput, Fenced
from shards.messages import Pull, Push
from shards.versions import Allocator, heap_allocator

_BRIEF_S = 1e-4  # an absence in which what came has not lain for long
_SPARE = 6  # gradients beside those in flight: being made, summed up, owed
_MOST_IN_FLIGHT = 1024
_MOST_COUNTED = 2**32  # steps or samples of one push: shards add them up

Params = ParamSpec("Params")
Returned = TypeVar("Returned")


def _by_one_thread(
    method: "Callable[Concatenate[Client, Params], Returned]",
) -> "Callable[Concatenate[Client, Params], Returned]":
    """The method, refused while another thread is in one: two would take each other's answers."""

    @wraps(method)
    def guarded(client: "Client", /, *args: Params.args, **options: Params.kwargs) -> Returned:
        if not client._user.acquire(blocking=False):
            raise BadInput(
                f"client of worker {client.worker}: it is in use by another thread; make one client"
                " for each thread"
            )
        try:
            return method(client, *args, **options)
        finally:
            client._user.release()

    return guarded


def _read_versions(versions: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(versions, tuple | list | np.ndarray):
        raise arguments.wrong("push: read_versions", "a list of numbers, one a shard", versions)
    for version in versions:
        if type(version) is not int or version < 0:
            break
    else:
        return tuple(versions)  # as `pull` returns them, at every push
    return tuple(arguments.whole("push: read_versions", version, 0) for version in versions)


class Client:
    """One worker's connection to every shard of a job.

    `cluster` is where the shards are, or the path of a file that `Cluster.save` wrote.
    `incarnation` orders the lives of one worker name: give a restarted worker a higher one and it
    goes on where the last one was applied (`seq`, `step`). `patience_s` is how long a silent shard
    is waited for before `Unreachable` is raised; `in_flight` bounds the pushes that may be
    unacknowledged when a further one is sent; where it is not given, there are as many as the link
    needs, within memory (ps/session/window_estimator.py). `compression` is how pushes and pulls
    travel; `restore` a file of `save`'s, with the residual to go on with, which must be of the last
    applied push. `keep` is the path or URI that snapshots of the job go to: what compression leaves
    behind is written there for each (ps/snapshots/residual_writer.py). `link` puts everything
    behind a link that is slow on purpose. `stripes` is over how many TCP connections a shard's
    messages are spread; not given, as many as the round trip wants (ps/transport/striping.py).
    `allocate` makes the arrays that `pull` and `empty` hand out: page-locked ones, where they go to
    a GPU.

    `rolled_back` holds, for each shard that died and went on from what it had saved, the last time;
    `lost` counts this worker's pushes that a shard had acknowledged and lost so.
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
        compression: Compression | str | None = None,
        restore: str | Path | None = None,
        keep: Place | None = None,
        link: LinkModel | str | None = None,
        allocate: Allocator = heap_allocator,
        transport: str = Transport.AUTO,
        stripes: int | None = None,
    ) -> None:
        cluster, worker = cluster_of(cluster), arguments.name("worker", worker)
        incarnation = arguments.whole("incarnation", incarnation, 0)
        retry_s = arguments.seconds("retry_s", retry_s)
        patience_s = arguments.seconds("patience_s", patience_s, endless=True)
        if in_flight is not None:
            in_flight = arguments.whole("in_flight", in_flight, 1, _MOST_IN_FLIGHT)
        if restore is not None:
            restore = paths.path("restore", restore)
        if keep is not None:
            keep = paths.place("keep", keep)
        if stripes is not None:
            stripes = arguments.whole("stripes", stripes, 1, MOST)
        arguments.function("allocate", allocate, "a function from a number of floats to an array")
        self.worker, self.incarnation = worker, incarnation
        self._user = RLock()  # whichever thread is in a call
        self.table, self.times = cluster.table, Times()
        self._size = cluster.table.size  # which is summed over its tensors
        self.duplicates = self.staleness = self.clock = self.step = self.lost = 0
        self.rolled_back: dict[int, events.RolledBack] = {}
        self.rtt_s = self._wait_s = 0.0
        self._pacing, self._prefetched = FlowControl(in_flight, time.monotonic()), PrefetchTable()
        self._arenas = ClientBuffers(cluster.table.size, allocate)
        self._replica: PulledWeights | None = None
        self._first_epoch = cluster.map.epoch
        self._leaving = self._departed = self._closed = False
        self._new_stay = partial(
            ClusterConnection,
            worker=worker,
            incarnation=incarnation,
            retry_s=retry_s,
            patience_s=patience_s,
            compression=compression_of("compression", compression),
            transport=transport_named(transport),
            link=link_of(link),
            gradients=(in_flight or LEAST) + _SPARE,
            stripes=stripes,
            times=self.times,
        )
        self._turn_to(self._new_stay(cluster))
        self._compresses = self._stay.session.cargo.feedback is not None
        self._keeper = (
            ResidualWriter(keep, worker) if keep is not None and self._compresses else None
        )
        try:
            restored = None if restore is None else residuals.loaded(restore, self._stay.session)
            self._turn_to(self._met(self._stay))
            ready = self._stay.session.ready
            assert ready is not None, "they have met"
            self.clock, self.step = ready.clock, ready.step
            if restored is not None:
                self._restore_residual(*restored)
        except BaseException:
            self.abort()
            raise

    @property
    def cluster(self) -> Cluster:
        """Where the job is, as far as this client has heard."""
        return self._stay.cluster

    # --- the sentence -----------------------------------------------------------------------------

    @_by_one_thread
    def pull(self, clock: int | None = None, *, copy: bool = False) -> PulledWeights:
        """The weights for the step at `clock` (default: the next one); waits at the bound.

        The array is read-only, and never written again while referred to; drop it when done. With
        `copy` it is the caller's own, and writable, as `torch.from_numpy` wants it.
        """
        wanted = self.clock
        if clock is not None:
            plain = type(clock) is int and 0 <= clock <= arguments.MOST
            wanted = clock if plain else arguments.whole("pull: clock", clock, 0)
        if copy is not False:
            copy = arguments.flag("pull: copy", copy)
        started, before = self._enter(Pull), self.times.serialise_s
        self._prefetched.drop_before(wanted)
        if wanted not in self._prefetched:
            self._stay.send(self._ask(wanted, time.monotonic()))
        while (pulled := self._prefetched.take(wanted)) is None:
            self._turn()
        took = time.monotonic() - started - (self.times.serialise_s - before)
        self._wait_s = min(took, pulled.waited_s)
        self.times.waited_s += self._wait_s
        self.times.network_s += took - self._wait_s
        assembling = time.monotonic()
        self._replica = replica = self._arenas.assembled(pulled)
        if copy:
            replica = PulledWeights(replica.weights.copy(), replica.versions)
        now = time.monotonic()
        self.times.serialise_s += now - assembling
        self._pacing.leave(now)
        return replica

    @_by_one_thread
    def prefetch(self, clock: int) -> None:
        """Ask now for what `pull(clock)` will return; its answer travels while you compute.

        Several may be asked for. `ahead` says how early, for each to be there in time.
        """
        self._check_open()
        clock = arguments.whole("prefetch: clock", clock, 0)
        if clock not in self._prefetched:
            self._stay.send(self._ask(clock, time.monotonic()))

    @property
    def recommended_prefetch(self) -> int:
        """How many of your steps early to prefetch weights, as the link has been until now."""
        return self._pacing.ahead

    @_by_one_thread
    def push(
        self,
        gradient: NDArray[np.float32] | Sequence[float],
        *,
        read_versions: Sequence[int] | None = None,
        steps: int = 1,
        samples: int = 0,
        loss: float = 0.0,
        prefetch: int | None = None,
    ) -> None:
        """Send a gradient over `steps` steps, of shape (table.size,) float32, and do not wait.

        A list of as many numbers will do.
        `read_versions`, one a shard, are what it was computed from (default: the last pull's). The
        array must not change until it is acknowledged: take it from `empty()`, then drop it. Waits
        only while `in_flight` earlier pushes are unacknowledged. Raises BadInput when the
        array does not fit, or what a shard found wrong with an earlier one, whose part there then
        counts as zeros: the next push may follow. `prefetch` asks in the same
        message for what `pull(prefetch)` will return, which then holds this push: one round trip.
        """
        if read_versions is None:
            if self._replica is None:
                raise BadInput("push: expected a pull before the first push, got none")
            read_versions = self._replica.versions
        if not isinstance(gradient, np.ndarray):
            gradient = arguments.array(f"push to table {self.table.name}", gradient, self._size)
        # What is plainly right costs no call, at every push; the rest is converted or refused.
        if type(steps) is not int or not 1 <= steps <= _MOST_COUNTED:
            steps = arguments.whole("push: steps", steps, 1, _MOST_COUNTED)
        if type(samples) is not int or not 0 <= samples <= _MOST_COUNTED:
            samples = arguments.whole("push: samples", samples, 0, _MOST_COUNTED)
        if type(loss) is not float:
            loss = arguments.loss("push: loss", loss)
        if prefetch is not None and (
            type(prefetch) is not int or not 0 <= prefetch <= arguments.MOST
        ):
            prefetch = arguments.whole("push: prefetch", prefetch, 0)
        started, before = self._enter(Push), self.times.serialise_s
        if self._stay.session.unacknowledged:
            self._await_room(self._pacing.room)
        now = time.monotonic()
        self.times.network_s += now - started - (self.times.serialise_s - before)
        request, sends = self._stay.session.push(
            gradient if self._compresses else self._arenas.placed(gradient),
            self._versions(_read_versions(read_versions)),
            clock=self.clock + steps,
            step=self.step + steps,
            steps=steps,
            samples=samples,
            loss=loss,
            rtt_s=self.rtt_s,
            wait_s=self._wait_s,
            now=now,
        )
        self._pushed(request, steps, now)
        if prefetch is not None and prefetch not in self._prefetched:
            sends += self._ask(prefetch, now)
        self._stay.send(sends)
        self._pacing.leave(time.monotonic())

    @_by_one_thread
    def flush(self) -> None:
        """Wait until every push is acknowledged by every shard."""
        started, before = self._enter(None), self.times.serialise_s
        self._await_room(0)
        now = time.monotonic()
        self.times.network_s += now - started - (self.times.serialise_s - before)
        self._pacing.leave(now)

    def new_gradient(self, *, zeroed: bool = True) -> NDArray[np.float32]:
        """A zeroed array of the table's size, for a gradient; dropping it recycles it.

        Where a shard shares memory with this client, the array is in that memory and is pushed
        without a copy. Zeroing costs time; without `zeroed` the array holds anything, so write
        every float of it, padding included.
        """
        array = self._arenas.take()
        if zeroed:
            array.fill(0)
        return array

    @property
    def transports(self) -> tuple[str, ...]:
        """What carries the arrays to and from each shard: shm, ipc or tcp."""
        return self._stay.connection.transports

    @_by_one_thread
    def save(self, path: str | Path) -> None:
        """Wait until every push is acknowledged, and write the residual that they leave to a file.

        A later life of this worker restores it, and nothing of any gradient is lost between them,
        if it stands where this one does. Raises BadInput where pushes are not compressed.
        """
        target = paths.path("save: path", path)
        feedback = residuals.feedback_of(self._stay.session, "save")
        self.flush()
        state = residuals.state_of(self._stay.session, self.step, self.clock, self.seq)
        save_state(target, state, feedback.state())

    @_by_one_thread
    def restore_residual(self, state: WorkerState, arrays: Arrays) -> None:
        """Go on as a life of this worker did that a snapshot was taken of (keeping.residual_in).

        Before the first pull. What it had pushed beyond the snapshot is pushed again, so `seq`,
        `step` and `clock` may be further afterwards. Raises BadInput when the state is another's or
        of another moment, or pushes are not compressed: the worker can go on without it.
        """
        arguments.instance("take_up: state", state, WorkerState, "a WorkerState")
        arguments.instance("take_up: arrays", arrays, Mapping, "arrays by name")  # type: ignore[type-abstract]
        residuals.feedback_of(self._stay.session, "take up")
        residuals.check(state, self._stay.session, f"residual of {state.worker}")
        self._restore_residual(state, arrays)

    @property
    def seq(self) -> int:
        """The number of this worker's last push; at first, its former life's last applied one."""
        return self._stay.session.seq

    @_by_one_thread
    def close(self) -> None:
        """Wait for the last acknowledgements, leave the gate, drop the connections, for good."""
        if self._closed:
            return
        try:
            self.flush()
            if self._keeper is not None and self.seq:
                self._keep(self.seq)
            self._leaving = True
            self._stay.send(self._stay.session.leave(time.monotonic()))
            while not self._departed:
                self._turn()
        finally:
            self.abort()

    def abort(self) -> None:
        """Drop the connections as a crash would: the lease frees the others."""
        self._closed = True
        self._stay.close()
        if self._keeper is not None:
            self._keeper.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    # --- the residual -----------------------------------------------------------------------------

    def _restore_residual(self, state: WorkerState, arrays: Arrays) -> None:
        """Go on with a residual, once the shards have the pushes that it follows."""
        base = self.seq
        for push in residuals.restored(self._stay.session, state, arrays):
            now = time.monotonic()
            request, sends = residuals.made_again(
                push,
                arrays[push.name],
                self._stay.session,
                clock=self.clock + push.steps,
                step=self.step + push.steps,
                now=now,
            )
            self._pushed(request, push.steps, now)
            self._stay.send(sends)
        if self._keeper is not None:  # a snapshot may be taken before the next push
            replaced = {"incarnation": self.incarnation, "base": base}
            self._keeper.keep(msgspec.structs.replace(state, **replaced), arrays)

    def _keep(self, base: int, pushes: Sequence[reshard_client.CarriedPush] = ()) -> None:
        """Have what a snapshot of the shards at push `base` wants of this worker written."""
        assert self._keeper is not None, "somebody asked for it"
        self._keeper.keep(*residuals.kept(self._stay.session, self.step, self.clock, base, pushes))

    # --- moving -----------------------------------------------------------------------------------

    def _turn_to(self, stay: ClusterConnection) -> None:
        """Whatever is asked from now on is asked there."""
        sharing = stay.connection.sharing
        self._pacing.begin(self.table.size, shared=sharing is not None)
        self._arenas.turn_to(stay.cluster.map, sharing)
        self._stay = stay

    def _met(self, stay: ClusterConnection) -> ClusterConnection:
        """This one, or that with whoever holds the job by now, once the shards know this worker."""
        try:
            while not stay.begin(self._note):
                stay.close()
                stay = self._succeeding(stay)
        except BaseException:
            stay.close()
            raise
        return stay

    def _succeeding(self, stay: ClusterConnection) -> ClusterConnection:
        assert stay.successors is not None, "these shards have no job any more"
        return self._new_stay(stay.successors)

    def _move(self) -> None:
        """Go on with the shards that hold the job now: repeat what the former have not applied.

        Who is interrupted here has not moved, still owes what it owed, and begins anew.
        """
        former = self._stay
        former.close()
        stay = self._met(self._succeeding(former))
        now = time.monotonic()
        try:
            joins, owed = reshard_client.resume_at(former.session, stay.session, now)
            wanted = self._prefetched.restart()
            self._turn_to(stay)
        except BaseException:
            stay.close()
            raise
        self._stay.send(joins)
        for request, sends in owed:
            self._pacing.pushes.record_send(request, now)
            self._stay.send(sends)
        for clock in wanted:
            self._stay.send(self._ask(clock, now))
        if self._leaving:
            self._stay.send(self._stay.session.leave(time.monotonic()))

    def _versions(self, read: Sequence[int]) -> Sequence[int]:
        """What was read before a move, as the shards after it are told."""
        shard_map = self._stay.cluster.map
        moved = shard_map.epoch > self._first_epoch
        return reshard_client.versions(read, shard_map.shards) if moved and read else read

    # --- requests and answers ---------------------------------------------------------------------

    def _ask(self, clock: int, now: float) -> list[events.Send]:
        request, sends = self._stay.session.pull(clock, now)
        self._pacing.pulls.record_send(request, now)
        self._prefetched.record_request(clock, request)
        return sends

    def _pushed(self, request: int, steps: int, now: float) -> None:
        """A push over so many steps is on its way."""
        self._pacing.pushes.record_send(request, now)
        self.clock += steps
        self.step += steps

    def _await_room(self, unacknowledged: int) -> None:
        while self._stay.session.unacknowledged > unacknowledged:
            self._turn()

    def _enter(self, kind: type[Pull | Push] | None) -> float:
        """The caller is back: note how long it was busy, and take in what came meanwhile.

        What came in a brief absence need not be told apart from what comes now. Returns when it is.
        """
        if self._closed:  # calls cost
            self._check_open()
        now = time.monotonic()
        away_s = self._pacing.enter(kind, now)
        if self._pacing.in_flight is None and away_s > _BRIEF_S:
            deadline = self._stay.session.next_deadline
            if deadline is not None and (deadline <= now or self._stay.links.waiting):
                self._turn(0.0)
        self._pacing.listens = True
        return now

    def _check_open(self) -> None:
        if self._closed:
            raise BadInput(f"client of worker {self.worker}: it is closed")

    def _turn(self, timeout: float | None = None) -> None:
        """Wait for the next thing to happen, up to `timeout`, and deal with it."""
        stay = self._stay
        if stay.successors is None:  # or Ctrl-C came while we moved
            if stay.torn:
                stay.ask_again()
                for clock in self._prefetched.cancel_all():
                    self.prefetch(clock)
                stay.torn = False
            stay.turn(self._note, timeout)
        if stay.successors is not None and stay.session.ready is not None:
            self._move()

    def _note(self, event: events.Event, now: float) -> None:
        heard = self._pacing.listens
        match event:
            case events.Pulled(waited_s=waited_s):
                self._prefetched.record_pulled(event)
                self._pacing.pulls.record_answer(event.request, now, heard=heard, waited_s=waited_s)
            case events.Pushed():
                self.duplicates += event.duplicates > 0
                self.staleness = event.staleness
                self.rtt_s = event.rtt_s
                self._pacing.pushes.record_answer(event.request, now, heard=heard)
            case events.RolledBack():
                self.rolled_back[event.shard] = event
                self.lost += event.lost
            case events.Usurped():
                raise Fenced(event.text)
            case events.Departed():
                self._departed = True
            case events.Exported() if self._keeper is not None and not self._keeper.busy:
                self._keep(event.base, reshard_client.recorded(self._stay.session, event))
