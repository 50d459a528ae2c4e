"""A worker of the SDK: steps that pull, compute and push.

    with job.worker("w0") as me:
        for batch in batches:
            with me.step(samples=len(batch)) as step:
                params = step.pull()
                step.loss, gradients = value_and_grad(params, batch)
                step.push(gradients)

    with me.step(samples=len(batch), gather={"user": ids}) as step:
        rows = step.rows("user")
        ...
        step.scatter("user", gradients_of_rows)

A step is one tick of the worker's clock and one push, with all tables that it pushes to. Each shard
applies its part of the push whole and once. The worker repeats it until every shard has it; if the
worker dies before that, the push may stay at some shards only, and the worker's next life begins
after it. A step that raises pushes nothing and does not tick. `step.ack` is a future: the push
travels while the caller computes the next step.

The worker is a thin layer over `Client`, which it gives arrays in the user's own structure.
"""

import time
from collections.abc import Mapping
from math import isfinite
from os import getpid
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import path_checks
from ps.client import Client
from ps.process_owner import BoundToProcess
from ps.session import events
from ps.session.row_requests import Gather
from ps.shared_memory.client_buffers import PulledWeights
from ps.snapshots import residuals
from ps.snapshots.worker_state import Arrays, WorkerState
from ps.step_rows import RequestedRows, RowsOfStep
from ps.table_views import TableViews
from shards import argument_checks
from shards.errors import BadInput, DownpourError, Retry
from shards.messages import MAX_SAMPLES
from shards.plurals import format_count
from shards.row_frames import RowGradient

Floats = NDArray[np.float32]

Gradients = Floats | Mapping[str, Floats | RowGradient]
"""A gradient of all dense tables, or one for each of some tables."""

_NOTHING = object()
RESULT_S = 60.0
PULL_S = 600.0
"""How long a step's pull waits at the staleness bound, in seconds, by default."""


class PushAck(msgspec.Struct, frozen=True):
    """The outcome of a push.

    `seq` numbers the worker's pushes. `versions` are those that the push made, one per shard;
    `staleness` counts the updates that others applied between its pull and its apply, at the shard
    where these were most. `age_s` is the time from the pull to the acknowledgement, in seconds.
    `duplicate`: the push was sent again to a shard that had it already. `scale` is the smallest
    factor by which a shard has multiplied the rate of the push. `dropped`: a shard dropped the
    push, which came too late for its round or was too stale (`on_stale`).
    """

    seq: int
    versions: tuple[int, ...]
    staleness: int
    age_s: float
    duplicate: bool
    scale: float
    dropped: bool


class AckFuture(BoundToProcess):
    """The acknowledgement of push `seq`, which may still be under way; `step.ack` of a step."""

    _is_a, _instead = "an acknowledgement", "make a worker of ps.connect there"

    def __init__(self, worker: "Worker", seq: int, pulled_at: float) -> None:
        self._worker = worker
        self._ack: PushAck | None = None
        self.seq = seq
        self._pulled_at = pulled_at

    def done(self) -> bool:
        """Return whether this worker has received the acknowledgements of all shards."""
        return self._ack is not None

    def result(self, timeout_s: float = RESULT_S) -> PushAck:
        """Wait for the acknowledgement; raises `ps.errors.Retry` after `timeout_s` seconds.

        The push is not lost then: the worker continues to repeat it.
        """
        if timeout_s != RESULT_S:
            timeout_s = argument_checks.seconds("timeout_s", timeout_s, zero=True)
        if self._ack is None:
            self._worker.client.wait(self.done, timeout_s)
        if self._ack is None:
            error = Retry(
                f"worker {self._worker.name}: push {self.seq} is not acknowledged after"
                f" {timeout_s:g} s; it is still being repeated"
            )
            error.worker = self._worker.name
            raise error
        return self._ack


class Worker(BoundToProcess):
    """One worker of a job; a context manager. Not for use by two threads.

    Leaving it without an error waits for the acknowledgements and leaves the job; leaving it with
    an error drops the connections as a crash would. Make it with `Job.worker`.
    """

    _is_a, _instead = "a worker", "make a worker of ps.connect there"

    def __init__(self, client: Client, views: TableViews, prefetch: int) -> None:
        self.client = client
        self._views = views
        self._no_rows = RowsOfStep(views.sparse)
        self._requested = RequestedRows(views.sparse)
        self._prefetch = prefetch
        self._unacknowledged: dict[int, AckFuture] = {}
        self._open: WorkerStep | None = None
        client.on_pushed = self._on_acknowledged

    def __repr__(self) -> str:
        client = self.client
        state = "closed" if client.closed else "in a step" if self._open is not None else "open"
        transports, by_socket = "/".join(self.transports), client.links.by_socket
        sockets = f", {format_count(by_socket, 'message')} through a socket" if by_socket else ""
        pending = f", {len(self._unacknowledged)} unacknowledged" if self._unacknowledged else ""
        return (
            f"<worker {self.name} of job {client.cluster.name}: {state}, clock {self.clock},"
            f" {format_count(self.seq, 'push')}{pending}, over {transports}{sockets}>"
        )

    @property
    def name(self) -> str:
        """The worker's name, by which the shards know it."""
        return self.client.worker

    @property
    def clock(self) -> int:
        """The steps that this worker has completed, in all its incarnations."""
        return self.client.clock

    @property
    def seq(self) -> int:
        """The number of its last push; at first, of the last applied push of its former
        incarnations.
        """
        return self.client.seq

    @property
    def lost(self) -> int:
        """The number of its acknowledged pushes that shards lost by going back to an autosave."""
        return self.client.lost

    @property
    def rtt_s(self) -> float:
        """The seconds from the last acknowledged push to its acknowledgement."""
        return self.client.rtt_s

    @property
    def transports(self) -> tuple[str, ...]:
        """The transport of the arrays to and from each shard: `shm`, `ipc` or `tcp`.

        What finds no room in shared memory goes through a socket; the worker's description counts
        such messages.
        """
        return self.client.transports

    def step(self, *, samples: int = 0, gather: Mapping[str, Any] | None = None) -> "WorkerStep":
        """One step: pull, compute, push, and one tick of the clock.

        `samples` counts the examples in it, for the records. `gather` has, by sparse table, the ids
        of the rows that the step reads and may change: int64 or uint64 of shape (n,), duplicates
        allowed. All gradients that the step was given are sent on leaving the block, as one push.

        Raises BadInput for another table, and for ids of another dtype or shape.
        """
        try:
            if type(samples) is not int or not 0 <= samples <= MAX_SAMPLES:
                samples = argument_checks.whole("samples", samples, 0, MAX_SAMPLES)
            rows = self._no_rows
            if gather is not None:
                requested = self._requested.find(self._next_clock)
                rows = RowsOfStep(self._views.sparse, gather, requested)
        except BadInput as error:
            error.worker = self.name
            raise
        return WorkerStep(self, samples, rows)

    def prefetch(self, *, gather: Mapping[str, Any]) -> None:
        """Request now what a coming step with these ids will read: rows and dense tables, at once.

        The first call is for the next step, a further one for the step after the last that was
        requested; the answers travel while the caller computes. A step with the same ids, however
        ordered, takes its answer, and one with others reads anew. A step that is requested n steps
        early may miss n more pushes, of this worker's, too; the staleness bound holds as for any.

        Raises BadInput as `step` does, and for more than 64 steps that were requested.
        """
        try:
            self._requested.request(
                self._next_clock,
                gather,
                lambda clock, rows: self.client.prefetch(clock, gather=rows),
            )
        except BadInput as error:
            error.worker = self.name
            raise

    @property
    def _next_clock(self) -> int:
        """The clock of the step that begins next."""
        return self.client.clock + (self._open is not None)

    def pull(self, *, timeout_s: float = PULL_S) -> Any:
        """The weights outside a step, for evaluation, in the structures that were given.

        They are the only table's value, or a dict of the values of all tables. Float32 arrays of
        NumPy are read-only.

        It waits at the staleness bound as the next step would, and raises `ps.errors.ClockTimeout`
        after `timeout_s` seconds there.
        """
        timeout_s = argument_checks.seconds("pull: timeout_s", timeout_s, zero=True)
        return self._views.build(None, self.client.pull(timeout_s=timeout_s).weights)

    def flush(self) -> None:
        """Wait until every push is acknowledged by every shard.

        Raises `ps.errors.Unreachable` when a shard is silent for the worker's `patience_s`, and
        BadInput for a gradient that a shard has refused.
        """
        self.client.flush()

    def save(self, path: str | Path) -> None:
        """Flush, then write the residual of compressed pushes to a file, for `restore`.

        Raises BadInput where pushes are not compressed.
        """
        client, target = self.client, path_checks.path("save: path", path)
        residuals.feedback_of(client.session, "save")  # raised before the wait
        client.flush()
        residuals.save(target, client.session, client.step, client.clock)

    def restore(self, saved: str | Path | tuple[WorkerState, Arrays]) -> None:
        """Before the first push, continue with the residual that an earlier incarnation has saved.

        `saved` is the file that `save` wrote, or what `ps.saved_residual` returned from a snapshot.
        Raises BadInput when it is another worker's, or does not fit what the shards hold.
        """
        session = self.client.session
        match saved:
            case (WorkerState() as state, Mapping() as arrays):
                residuals.restore(session, state, arrays)
            case _:
                path = path_checks.path("restore: saved", saved)
                residuals.restore(session, *residuals.load(path, session))

    def close(self) -> None:
        """Wait for the acknowledgements, leave the job, and drop the connections; final.

        May be called twice. Raises what `flush` raises.
        """
        self.client.close()

    def abort(self) -> None:
        """Drop the connections as a crash would; others wait until the lease expires."""
        self.client.abort()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.__exit__(kind, error, trace)

    def _on_acknowledged(self, event: events.Pushed) -> None:
        future = self._unacknowledged.pop(event.seq, None)
        if future is not None:
            age_s = time.monotonic() - future._pulled_at
            shares = event.duplicates > 0, event.scale, event.dropped > 0
            future._ack = PushAck(event.seq, event.versions, event.staleness, age_s, *shares)

    def _pull(self, timeout_s: float, gather: Gather | None) -> PulledWeights:
        client = self.client
        pulled = client.pull(timeout_s=timeout_s, gather=gather)
        if gather is not None:
            return pulled  # the ids of later steps are not known
        for further in range(1, self._prefetch + 1):
            client.prefetch(client.clock + further)
        return pulled

    def _push(self, gradients: Gradients, samples: int, loss: float, pulled_at: float) -> AckFuture:
        future = AckFuture(self, self.client.seq + 1, pulled_at)
        self._unacknowledged[future.seq] = future
        try:
            self.client.push(gradients, samples=samples, loss=loss)
        except BaseException:
            if self.client.seq < future.seq:  # it was not sent
                del self._unacknowledged[future.seq]
            raise
        return future


class WorkerStep(BoundToProcess):
    """One step of a worker, a context manager; see `Worker.step`.

    Set `loss`, a number, for the records. A step that pulled nothing pulls at its end, so that it
    keeps the staleness bound; one that was given nothing to push only ticks the clock.
    """

    _is_a, _instead = "a step", "make a worker of ps.connect there"

    def __init__(self, worker: Worker, samples: int, rows: RowsOfStep) -> None:
        self.loss = 0.0
        self._rows = rows
        self._worker = worker
        self._views = worker._views
        self._samples = samples
        self._pulled: PulledWeights | None = None
        self._arena: Floats | None = None
        self._pushed: set[str] = set()
        self._pulled_at = 0.0
        self._ack: AckFuture | None = None
        self._ended = False

    def __repr__(self) -> str:
        state = "ended" if self._ended else "open" if self._worker._open is self else "not begun"
        tables = sorted({*self._pushed, *self._rows.gradients})
        pushes = f"gradients of {', '.join(tables)}" if tables else "nothing"
        pulled = "pulled" if self.pulled else "not pulled"
        return f"<step of worker {self._worker.name}: {state}, {pulled}, {pushes} to push>"

    def __enter__(self) -> "WorkerStep":
        if self._worker._open is not None or self._ended:
            open_or_ended = "has ended" if self._ended else "is open"
            raise self._misuse_error(f"a step {open_or_ended}; expected one after the other")
        if self._worker.client.closed:
            raise self._misuse_error("it is closed")
        self._worker._open = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if error is None:
                self._finish()
        except DownpourError as own:
            error = own
            raise
        finally:
            if isinstance(error, DownpourError):
                error.worker = error.worker or self._worker.name
            self._worker._open = None
            self._drop()

    @property
    def ack(self) -> AckFuture:
        """The future acknowledgement of the step's push; raises BadInput before it is sent."""
        if self._ack is None:
            raise self._misuse_error("the step has not been pushed yet")
        return self._ack

    @property
    def gather(self) -> Gather | None:
        """The ids that the step reads; None without any."""
        return self._rows.gather

    @property
    def pulled(self) -> bool:
        """True if the step has its weights, so that `pull` does not wait."""
        return self._pulled is not None

    def pull(self, table: str | None = None, *, timeout_s: float = PULL_S) -> Any:
        """A table's weights, in the structure that was given; waits at the staleness bound.

        After `timeout_s` seconds there it raises `ps.errors.ClockTimeout`, with the slowest
        worker's clock. Without a name it is the only table's value, or a dict of the values of all.
        All tables of a step are of one version at each shard. Float32 arrays of NumPy are read-only
        and never change, also after the step: copy what you want to write.
        """
        return self._views.build(table, self._pull_once(timeout_s).weights)

    def rows(self, table: str, *, timeout_s: float = PULL_S) -> Floats:
        """The rows of the step's ids of a sparse table, float32 (n, dim), in the order of the ids.

        They are copies, of the same version as the dense tables that the step pulls. A row that
        nobody has pushed yet has its first values. It waits as `pull` does.
        """
        distinct = self._rows.find(table)
        pulled = self._pull_once(timeout_s)
        return pulled.rows[table].rows.take(distinct.inverse, axis=0)

    def scatter(self, table: str, gradient: Any) -> None:
        """Give the step the gradients of the rows of its ids, float32 (n, dim), in their order.

        Rows of the same id are added up. They are sent with the gradients of the other tables, as
        one push. Raises BadInput naming the table for another shape or dtype, for values that are
        not finite, and for a second call.
        """
        self._check_open()
        self._rows.scatter(table, gradient)

    def _pull_once(self, timeout_s: float = PULL_S) -> PulledWeights:
        self._check_open()
        if self._pulled is None:
            if timeout_s != PULL_S:
                timeout_s = argument_checks.seconds("pull: timeout_s", timeout_s, zero=True)
            self._pulled = self._worker._pull(timeout_s, self._rows.gather)
            self._pulled_at = time.monotonic()
        return self._pulled

    def gradients(self, table: str | None = None) -> Any:
        """Zeroed, writable arrays to fill in place of a `push`: what they hold is pushed.

        A further call returns the same arrays, with what they hold, to which gradients can be
        added. They are float32, in the table's structure, and in shared memory where a shard is on
        this host: nothing is copied.
        """
        name, arena = self._views.name(table), self._gradients()
        if name not in self._pushed:
            self._views.clear(name, arena)
            self._pushed.add(name)
        return self._views.views(name, arena)

    def push(self, table: Any, gradient: Any = _NOTHING) -> None:
        """Give the step the gradient of a table, in the table's structure, to send at its end.

        `push(gradient)` is for a job with one table, `push("net", gradient)` for any. A table that
        is not pushed to does not change. Raises BadInput, naming the table and the array, for
        another structure, shape or dtype, and for a second push to a table in one step, which would
        drop the first: add the gradients up, as in the arrays of `gradients`, or take a step each.
        """
        name = self._views.name(None if gradient is _NOTHING else table)
        arena = self._gradients()
        if name in self._pushed:
            raise self._misuse_error(
                f"table {name} already has a gradient in this step; expected one push to a table in"
                " a step: add the gradients up, or take a step for each"
            )
        self._views.write(name, table if gradient is _NOTHING else gradient, arena)
        self._pushed.add(name)

    def _check_open(self) -> None:
        client = self._worker.client
        if getpid() != client.opener.pid:
            client.check_process()
        if self._worker._open is not self:
            if self._ended:
                raise self._misuse_error("the step has ended; expected another")
            # What it was given would never be pushed.
            raise self._misuse_error("the step has not begun; expected `with me.step() as step`")

    def _misuse_error(self, text: str) -> BadInput:
        error = BadInput(f"worker {self._worker.name}: {text}")
        error.worker = self._worker.name
        return error

    def _gradients(self) -> Floats:
        self._check_open()
        if self._arena is None:
            self._arena = self._worker.client.new_gradient(zeroed=False)
        return self._arena

    def _finish(self) -> None:
        """Push what the step was given; a step that was given nothing only ticks the clock."""
        if self._pulled is None:
            self._pull_once()
        loss: float = self.loss
        gradients: Gradients = {}
        if type(loss) is not float:
            loss = argument_checks.loss_of("step: loss", loss)
        if self._arena is not None:
            gradients = self._views.sections(self._pushed, self._arena)
            self._check_finite(self._arena, loss)
        if self._rows.gradients:
            assert isinstance(gradients, dict), "a job with rows pushes its tables by name"
            gradients = {**gradients, **self._rows.gradients}
        self._ack = self._worker._push(gradients, self._samples, loss, self._pulled_at)

    def _check_finite(self, arena: Floats, loss: float) -> None:
        """Raise BadInput, before anything is sent, naming the array that holds NaN or infinity."""
        try:
            self._views.check_finite(self._pushed, arena)
        except BadInput as error:
            if isfinite(loss):
                raise
            diverged = BadInput(f"{error}; is the rate too high?")
            diverged.table = error.table
            raise diverged from None

    def _drop(self) -> None:
        """Let go of the arrays, so that they can be used again."""
        self._ended = True
        self._arena = self._pulled = None
