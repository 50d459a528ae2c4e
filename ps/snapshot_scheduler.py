"""Who takes a job's snapshots while it runs: beside the training, and never in its way.

A thread with a console of its own asks all shards for their states and writes them. A shard only
lends what it has (shards/parameters.py), so pushes go on meanwhile. One snapshot is taken at a
time; one that falls due meanwhile is taken next. A snapshot that fails, on a full disk or because a
store cannot be reached, changes nothing: the last good one stays, whoever looks on is told, and the
training goes on.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from ps.admin_client import AdminClient
from ps.cluster import Cluster
from ps.session.events import Unreachable
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.residual_writer import awaited, gathered, sweep_kept
from ps.snapshots.worker_state import SavedWorkerState
from shards.errors import DownpourError
from shards.parameters import ShardState

_PATIENCE_S = 30.0  # for a large state over a slow link
_RESIDUALS_S = 30.0  # a worker hears of a snapshot with the next push that is acknowledged
_STANDSTILL_S = 5.0  # after which shards go on by themselves


class SnapshotScheduler:
    """Takes snapshots of one job onto a shelf; a context manager.

    One is due every `every` iterations and every `every_s` seconds (0: not by that), and whenever
    somebody asks. `begins_at` is the iteration that the job goes on from, of which there is one.
    With `aligned` the shards stand still at the same pushes of every worker while they are asked
    (shards/quiesce.py); one that they do not come together for is taken without, and its manifest
    says so. With `residuals` workers that compress their pushes write what they keep back
    (residual_writer.py), and it goes into the snapshot if it comes within half a minute. `told` is
    given what an operator should read, in the calling thread.
    """

    def __init__(
        self,
        cluster: Cluster,
        shelf: SnapshotCatalog,
        *,
        rule: str,
        workers: int,
        every: int = 0,
        every_s: float = 0.0,
        begins_at: int = 0,
        aligned: bool = False,
        residuals: bool = False,
        told: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.latest: str | None = None
        self._cluster = cluster
        self._shelf = shelf
        self._rule = rule
        self._workers = workers
        self._every = every
        self._every_s = every_s
        self._aligned = aligned
        self._residuals = residuals
        self._told = told
        self._next = self._next_after(begins_at)
        self._next_at = time.monotonic() + every_s
        self._asked = self._answering = False
        self._under_way: Future[None] | None = None
        self._missing: list[str] = []
        self._pool = ThreadPoolExecutor(1, "snapshots")
        self._sweep()

    def look(self, iteration: int, *, asked: bool = False) -> None:
        """Begin a snapshot if one is due or `asked` for, and tell how the one before went.

        Call it now and then; it does not wait.
        """
        self._asked |= asked
        if not self.idle:
            return
        now = time.monotonic()
        by_iteration = self._every > 0 and iteration >= self._next
        by_time = self._every_s > 0 and now >= self._next_at
        if not (self._asked or by_iteration or by_time):
            return
        self._next = self._next_after(iteration)
        self._next_at = now + self._every_s
        self._answering, self._asked = self._asked, False
        self._under_way = self._pool.submit(self._take)

    def _next_after(self, iteration: int) -> int:
        return (iteration // self._every + 1) * self._every if self._every else 0

    @property
    def idle(self) -> bool:
        """Whether none is under way; tells how the last one went."""
        if self._under_way is not None and self._under_way.done():
            self._finish()
        return self._under_way is None

    def follow(self, cluster: Cluster) -> None:
        """Take the next ones of these shards, which the job has moved to while this was idle."""
        assert self._under_way is None, "a snapshot would end the standstill of a move"
        self._cluster = cluster

    def save(self, states: Sequence[ShardState], patience_s: float = 0.0) -> str | None:
        """Write these states now, behind a snapshot under way; returns the place of theirs.

        A failure is told, and None is returned, whatever the `latest` one is. Workers that live are
        given `patience_s` for their residuals.
        """
        self._finish()
        self._under_way = self._pool.submit(self._write, states, patience_s)
        return self.latest if self._finish(goes_on=False) else None

    def close(self) -> None:
        """Wait for the snapshot under way, and take no more."""
        self._finish()
        self._pool.shutdown()
        self._sweep()

    def __enter__(self) -> "SnapshotScheduler":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take(self) -> None:
        with AdminClient(self._cluster, patience_s=_PATIENCE_S) as console:
            if self._aligned:
                with suppress(Unreachable):
                    console.quiesce(_STANDSTILL_S)
            self._write(console.export(going_on=self._aligned), _RESIDUALS_S)

    def _write(self, states: Sequence[ShardState], patience_s: float) -> None:
        self.latest = self._shelf.save(
            states[0].saved.steps // self._workers,
            states,
            table=self._cluster.table,
            shard_map=self._cluster.map,
            rule=self._rule,
            workers=self._workers,
            residuals=self._gathered(states, patience_s),
        )

    def _gathered(
        self, states: Sequence[ShardState], patience_s: float
    ) -> Sequence[tuple[str, SavedWorkerState]]:
        """What workers have kept back of these states, in the thread of the snapshot."""
        if not self._residuals:
            return ()
        wanted = awaited(states)
        try:
            found, self._missing = gathered(self._shelf.store, wanted, patience_s)
        except OSError:  # the states are worth a snapshot by themselves
            found, self._missing = [], list(wanted)
        return found

    def _sweep(self) -> None:
        """No worker lives: what any has left beside the snapshots is in them, or in vain."""
        if self._residuals:
            with suppress(OSError):
                sweep_kept(self._shelf.store)

    def _finish(self, *, goes_on: bool = True) -> bool:
        """Wait for the one under way, and tell how it went; False if it failed, or none was."""
        under_way, self._under_way = self._under_way, None
        answering, self._answering = self._answering, False
        if under_way is None:
            return False
        try:
            under_way.result()
        except DownpourError as error:
            kept = f"the last good one is {self.latest}" if self.latest else "there is none yet"
            self._told(f"{error}; {kept}{', and training goes on' if goes_on else ''}")
            return False
        missing, self._missing = self._missing, []
        if missing:
            self._told(f"snapshot {self.latest}: without the residuals of {' '.join(missing)}")
        if answering:
            self._told(f"snapshot {self.latest}")
        return True
