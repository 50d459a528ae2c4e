"""The blocking client, which is the SDK: pull weights, push gradients.

    with ps.Client(cluster, worker="w0") as shards:
        weights = shards.pull()
        shards.push(gradient(weights))

It is a dull driver: it moves bytes between the links and the session and waits. While the caller
computes, ZeroMQ's own thread goes on sending and receiving, so a prefetched pull and an
unacknowledged push cost the caller no time; a second small thread renews the lease, so that a long
computation is not taken for death.
"""

import threading
import time
import weakref
from collections.abc import Sequence
from types import TracebackType

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.cluster import Cluster
from ps.links import Links
from ps.session import Departed, Event, Pulled, Pushed, Ready, Send, Session, Unreachable
from shards.errors import BadInput, DownpourError
from shards.messages import Renew
from shards.versions import Buffers

_RENEWALS_A_LEASE = 4


class Times(msgspec.Struct):
    """Where a client's time went, in seconds, since it connected."""

    waited_s: float = 0.0
    network_s: float = 0.0
    serialise_s: float = 0.0


class Replica(msgspec.Struct, frozen=True):
    """Pulled weights: a flat array of the table's size, and the version of each shard's part."""

    weights: NDArray[np.float32]
    versions: tuple[int, ...]


class Client:
    """One worker's connection to every shard of a job.

    `incarnation` orders the lives of one worker name:
    give a restarted worker a higher one and it goes on where the last one was applied (`seq`,
    `step`). `patience_s` is how long a silent shard is waited for before `Unreachable` is raised;
    `in_flight` bounds the pushes that may be unacknowledged when a further one is sent.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        worker: str,
        incarnation: int = 0,
        retry_s: float = 1.0,
        patience_s: float = 30.0,
        in_flight: int = 2,
    ) -> None:
        for what, value in (("retry_s", retry_s), ("patience_s", patience_s)):
            if not value > 0:
                raise BadInput(f"{what}: expected more than 0 s, got {value:g}")
        if in_flight < 1:
            raise BadInput(f"in_flight: expected at least 1, got {in_flight}")
        self.cluster = cluster
        self.worker = worker
        self.table = cluster.table
        self.times = Times()
        self.duplicates = 0
        self.staleness = 0
        self.rtt_s = 0.0
        self.clock = 0
        self.step = 0
        self._wait_s = 0.0
        self._in_flight = in_flight
        self._session = Session(
            job=cluster.job,
            worker=worker,
            incarnation=incarnation,
            build=cluster.build,
            table=cluster.table,
            shard_map=cluster.map,
            retry_s=retry_s,
            patience_s=patience_s,
        )
        self._links = Links(cluster.endpoints)
        self._buffers = Buffers(cluster.table.size)
        self._pulled: dict[int, Pulled] = {}
        self._prefetched: tuple[int, int] | None = None
        self._unwanted: set[int] = set()
        self._replica: Replica | None = None
        self._departed = False
        self._renewal: _Renewal | None = None
        try:
            self._links.await_connections(min(retry_s, patience_s))
            self._greet()
        except BaseException:
            self._links.close()
            raise

    # --- the sentence -----------------------------------------------------------------------------

    def pull(self, clock: int | None = None) -> Replica:
        """The weights for the step at `clock` (default: the next one); waits at the bound.

        The array is this caller's until dropped; it is never written again while referred to.
        """
        wanted = self.clock if clock is None else clock
        started, before = time.monotonic(), self.times.serialise_s
        request = self._take_prefetched(wanted)
        while request not in self._pulled:
            self._turn()
        pulled = self._pulled.pop(request)
        took = time.monotonic() - started - (self.times.serialise_s - before)
        self._wait_s = min(took, pulled.waited_s)
        self.times.waited_s += self._wait_s
        self.times.network_s += took - self._wait_s
        self._replica = self._assemble(pulled)
        return self._replica

    def prefetch(self, clock: int) -> None:
        """Ask now for what `pull(clock)` will return; its answer travels while you compute."""
        if self._prefetched is None:
            self._prefetched = (clock, self._ask(clock))

    def push(
        self,
        gradient: NDArray[np.float32],
        *,
        read_versions: Sequence[int] | None = None,
        steps: int = 1,
        samples: int = 0,
        loss: float = 0.0,
    ) -> None:
        """Send a gradient over `steps` steps, of shape (table.size,) float32, and do not wait.

        `read_versions`, one a shard, are what it was computed from (default: the last pull's). The
        array must not change until it is acknowledged: take it from `empty()`, then drop it. Waits
        only while `in_flight` earlier pushes are unacknowledged. Raises BadInput when the
        array does not fit, or what a shard found wrong with it.
        """
        if read_versions is None:
            if self._replica is None:
                raise BadInput("push: expected a pull before the first push, got none")
            read_versions = self._replica.versions
        if steps < 1 or samples < 0:
            raise BadInput(f"push: expected steps >= 1 and samples >= 0, got {steps} and {samples}")
        started, before = time.monotonic(), self.times.serialise_s
        self._await_room(self._in_flight - 1)
        self.times.network_s += time.monotonic() - started - (self.times.serialise_s - before)
        _, sends = self._session.push(
            gradient,
            read_versions,
            clock=self.clock + steps,
            step=self.step + steps,
            steps=steps,
            samples=samples,
            loss=float(loss),
            rtt_s=self.rtt_s,
            wait_s=self._wait_s,
            now=time.monotonic(),
        )
        self.clock += steps
        self.step += steps
        self._send(sends)

    def flush(self) -> None:
        """Wait until every push is acknowledged by every shard."""
        started, before = time.monotonic(), self.times.serialise_s
        self._await_room(0)
        self.times.network_s += time.monotonic() - started - (self.times.serialise_s - before)

    def empty(self) -> NDArray[np.float32]:
        """An array of the table's size, of any content; dropping it recycles it."""
        return self._buffers.take()

    @property
    def seq(self) -> int:
        """The number of this worker's last push; at first, its former life's last applied one."""
        return self._session.seq

    def close(self) -> None:
        """Wait for the last acknowledgements, leave the gate, and drop the connections."""
        try:
            self.flush()
            self._send(self._session.leave(time.monotonic()))
            while not self._departed:
                self._turn()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Drop the connections as a crash would: the lease frees the others."""
        if self._renewal is not None:
            self._renewal.stop()
        self._links.close()

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
            self.abandon()

    # --- driving the session ----------------------------------------------------------------------

    def _greet(self) -> None:
        self._send(self._session.hello(time.monotonic()))
        while self._session.ready is None:
            self._turn()
        ready = self._session.ready
        self.clock, self.step = ready.clock, ready.step
        self._renewal = _Renewal(self.cluster, self._session, ready.lease_s / _RENEWALS_A_LEASE)
        # Or a client that was dropped without a word would hold back the others for ever.
        weakref.finalize(self, self._renewal.end)

    def _take_prefetched(self, clock: int) -> int:
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None:
            return self._ask(clock)
        asked_for, request = prefetched
        if asked_for == clock:
            return request
        if self._pulled.pop(request, None) is None:
            self._unwanted.add(request)
        return self._ask(clock)

    def _ask(self, clock: int) -> int:
        request, sends = self._session.pull(clock, time.monotonic())
        self._send(sends)
        return request

    def _await_room(self, unacknowledged: int) -> None:
        while self._session.unacknowledged > unacknowledged:
            self._turn()

    def _turn(self) -> None:
        """Wait for the next thing to happen, and deal with it."""
        if self._renewal is not None:
            self._renewal.check()
        deadline = self._session.next_deadline
        timeout = 1.0 if deadline is None else deadline - time.monotonic()
        for shard, reply, frames in self._links.receive(timeout):
            sends, events = self._session.receive(shard, reply, frames, time.monotonic())
            self._send(sends)
            for event in events:
                self._note(event)
        try:
            self._send(self._session.tick(time.monotonic()))
        except Unreachable as error:
            text = f"{error} at {self.cluster.endpoints[error.shard]}"
            raise Unreachable(text, error.shard) from None

    def _note(self, event: Event) -> None:
        match event:
            case Pulled() if event.request in self._unwanted:
                self._unwanted.remove(event.request)
            case Pulled():
                self._pulled[event.request] = event
            case Pushed():
                self.duplicates += event.duplicates > 0
                self.staleness = event.staleness
                self.rtt_s = event.rtt_s
            case Departed():
                self._departed = True
            case Ready():
                pass

    def _send(self, sends: Sequence[Send]) -> None:
        started = time.monotonic()
        for send in sends:
            self._links.send(send.shard, send.message, send.frames)
        self.times.serialise_s += time.monotonic() - started

    def _assemble(self, pulled: Pulled) -> Replica:
        """Lay the shards' frames into one arena."""
        started = time.monotonic()
        arena = self._buffers.take()
        for shard, frames in enumerate(pulled.frames):
            for part, frame in zip(self.cluster.map.cut(arena, shard), frames, strict=True):
                part[:] = np.frombuffer(frame, np.float32)
        self.times.serialise_s += time.monotonic() - started
        return Replica(arena, pulled.versions)


class _Renewal:
    """A thread with links of its own that keeps the lease while its owner computes."""

    def __init__(self, cluster: Cluster, session: Session, period_s: float) -> None:
        self._session = session
        self._shards = len(cluster.endpoints)
        self._endpoints = cluster.endpoints
        self._period_s = period_s
        self._ended = threading.Event()
        self._failure: DownpourError | None = None
        self._thread = threading.Thread(target=self._run, name="lease", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what ended the thread, if anything did."""
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        self._ended.set()

    def stop(self) -> None:
        self.end()
        self._thread.join()

    def _run(self) -> None:
        try:
            self._renew_until_ended()
        except DownpourError as error:
            self._failure = error

    def _renew_until_ended(self) -> None:
        links = Links(self._endpoints)
        try:
            while not self._ended.wait(self._period_s):
                for shard, boot in enumerate(self._session.boots):
                    links.send(shard, self._renew(boot))
                # The answers say nothing that the owner's own messages will not hear too.
                for _ in links.receive(0.0):
                    pass
        finally:
            links.close()

    def _renew(self, boot: int) -> Renew:
        session = self._session
        return Renew(0, session.job, session.worker, session.incarnation, boot)
