"""Takes a job's snapshots while it runs, without delaying the training.

A thread with an admin client of its own asks all shards for their states and writes them. A shard
shares its arrays without copying (shards/parameters.py), so pushes continue meanwhile. One snapshot
is taken at a time; one that falls due meanwhile is taken next. A failed snapshot, on a full disk or
because a store cannot be reached, changes nothing: the last good one stays, the failure is
reported, and the training continues.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial

from ps.admin_client import AdminClient
from ps.closing_context import ClosingContext
from ps.cluster import Cluster
from ps.logs import logger
from ps.process_owner import Opener
from ps.session.events import Unreachable
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.residual_writer import find_residuals, gather_residuals, sweep_residuals
from ps.snapshots.worker_saves import sweep_saves
from ps.snapshots.worker_state import SavedWorkerState
from shards.errors import DownpourError, Retry
from shards.shard_state import ShardState

_PATIENCE_S = 30.0  # for a large state over a slow link
_STATES_S = 30.0  # a worker looks every few seconds whether its state is wanted
_QUIESCE_S = 5.0  # after which quiesced shards resume by themselves

_Answer = Callable[[DownpourError | None, str], object]


class SnapshotScheduler(ClosingContext):
    """Takes snapshots of one job into a `catalog`; a context manager.

    One is due every `every` iterations and every `every_s` seconds (0 disables either), and at each
    explicit request. `begins_at` is the iteration at which the job starts, of which a snapshot
    exists. With `aligned` the shards are quiesced at the same pushes of every worker while they
    export (shards/quiesce.py); if they do not come together, the snapshot is taken without, and its
    manifest records that. With `worker_states`, workers write what they keep between pushes
    (residual_writer.py), which goes into the snapshot if it arrives within half a minute.
    `report` is called with messages for the operator, in the calling thread; without it they are
    warnings of the logger.
    """

    def __init__(
        self,
        cluster: Cluster,
        catalog: SnapshotCatalog,
        *,
        rules: tuple[str, ...],
        workers: int,
        every: int = 0,
        every_s: float = 0.0,
        begins_at: int = 0,
        aligned: bool = False,
        worker_states: bool = False,
        report: Callable[[str], None] | None = None,
    ) -> None:
        self.latest: str | None = None
        self._opener = Opener()
        self._cluster = cluster
        self._catalog = catalog
        self._rules = rules
        self._workers = workers
        self._every = every
        self._every_s = every_s
        self._aligned = aligned
        self._worker_states = worker_states
        self._logger = logger(__name__, job=cluster.job)
        self._report = report or self._logger.warning
        self._next = self._next_after(begins_at)
        self._next_at = time.monotonic() + every_s
        self._requests: list[_Answer] = []  # for the next snapshot to begin
        self._answers: list[_Answer] = []  # for the one in progress
        self._under_way: Future[int] | None = None
        self._missing: list[str] = []
        self._pool = ThreadPoolExecutor(1, "snapshots")
        self._sweep()

    def request(self, answer: _Answer = lambda *_: None) -> None:
        """Have the next snapshot begin as soon as possible, which answers all requests before it.

        `answer` is called in the thread that uses this object: with None and the snapshot in words,
        or with the error.
        """
        self._requests.append(answer)

    @property
    def is_requested(self) -> bool:
        """True if a snapshot is requested that has not begun."""
        return bool(self._requests)

    def snapshot_if_due(self, iteration: int) -> None:
        """Begin a snapshot if one is due or requested, and report how the last one went.

        Call it regularly; it does not wait.
        """
        if not self.idle:
            return
        now = time.monotonic()
        by_iteration = self._every > 0 and iteration >= self._next
        by_time = self._every_s > 0 and now >= self._next_at
        if not (self._requests or by_iteration or by_time):
            return
        self._next = self._next_after(iteration)
        self._next_at = now + self._every_s
        self._begin(self._take)

    def _begin(self, take: Callable[[], int]) -> None:
        self._answers, self._requests = self._requests, []
        self._under_way = self._pool.submit(take)

    def _next_after(self, iteration: int) -> int:
        return (iteration // self._every + 1) * self._every if self._every else 0

    @property
    def idle(self) -> bool:
        """True if no snapshot is in progress; reports how the last one went."""
        if self._under_way is not None and self._under_way.done():
            self._finish()
        return self._under_way is None

    def follow(self, cluster: Cluster) -> None:
        """Take the next snapshots of these shards, to which the job was resharded while this was
        idle.
        """
        assert self._under_way is None, "the snapshot in progress is of the former shards"
        self._cluster = cluster

    def stop_workers(self, workers: Mapping[str, tuple[int, int]], patience_s: float) -> None:
        """Have workers write their states, if they have any, and push no more.

        `workers` are the incarnation and the last push of each that trains. Shards that are
        exported afterwards have the same pushes. After `patience_s` seconds it waits no longer.
        """
        if not self._worker_states:
            return
        try:
            gather_residuals(self._catalog.store, workers, patience_s, last=True)
        except OSError as error:
            self._warn_of("states", error)

    def save(self, states: Sequence[ShardState]) -> str | None:
        """Write these states now, after a snapshot in progress; returns the path of theirs.

        On failure it reports the error and returns None, whatever `latest` is. Of the workers'
        states it takes those that are there.
        """
        self._finish()
        self._begin(partial(self._write, states, 0.0))
        return self.latest if self._finish(training=False) else None

    def close(self) -> None:
        """Wait for the snapshot in progress, and take no more; in a forked process do nothing."""
        if not self._opener.is_this_process:
            return
        self._finish()
        self._pool.shutdown()
        self._sweep()

    def _take(self) -> int:
        with AdminClient(self._cluster, patience_s=_PATIENCE_S) as admin:
            if self._aligned:
                with suppress(Unreachable, Retry):
                    admin.quiesce(_QUIESCE_S)
            return self._write(admin.export(then_resume=self._aligned), _STATES_S)

    def _write(self, states: Sequence[ShardState], patience_s: float) -> int:
        """Write these states; returns the number of the snapshot."""
        number = states[0].saved.steps // self._workers
        self.latest = self._catalog.save(
            number,
            states,
            layout=self._cluster.layout,
            shard_map=self._cluster.map,
            rules=self._rules,
            workers=self._workers,
            residuals=self._gather(states, patience_s),
        )
        return number

    def _gather(
        self, states: Sequence[ShardState], patience_s: float
    ) -> Sequence[tuple[str, SavedWorkerState]]:
        """The workers' own states for these; runs in the snapshot's thread."""
        if not self._worker_states:
            return ()
        expected = find_residuals(states)
        try:
            residuals, self._missing = gather_residuals(self._catalog.store, expected, patience_s)
        except OSError as error:  # the states are worth a snapshot by themselves
            self._warn_of("states", error)
            residuals, self._missing = [], list(expected)
        return residuals

    def _sweep(self) -> None:
        """Delete leftover files of workers; no worker is alive that could still need them."""
        if self._worker_states:
            try:
                sweep_residuals(self._catalog.store)
                sweep_saves(self._catalog.store)
            except OSError as error:
                self._warn_of("old states", error)

    def _warn_of(self, states: str, error: OSError) -> None:
        store = self._catalog.store
        self._logger.warning("%s of workers in %s: %s", states, store.place, error.strerror)

    def _finish(self, *, training: bool = True) -> bool:
        """Wait for the snapshot in progress, and report how it went; False if it failed, or there
        was none.
        """
        under_way, self._under_way = self._under_way, None
        answers, self._answers = self._answers, []
        if under_way is None:
            return False
        try:
            number = under_way.result()
        except DownpourError as error:
            remaining = (
                f"the last good one is {self.latest}" if self.latest else "there is none yet"
            )
            self._report(f"{error}; {remaining}{', and training continues' if training else ''}")
            for answer in answers:
                answer(error, "")
            return False
        self._logger.info("snapshot %s", self.latest)
        if self._catalog.untidy:
            self._report(self._catalog.untidy)
        missing, self._missing = self._missing, []
        if missing:
            workers = " ".join(missing)
            self._report(f"snapshot {self.latest}: without the states of workers {workers}")
        if answers:
            self._report(f"snapshot {self.latest}")
        for answer in answers:
            answer(None, f"snapshot {number}")
        return True
