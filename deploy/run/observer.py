"""Records and displays a training run: its updates, its evaluations, and its progress."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from deploy.run.evaluations_csv import EvaluationsFile
from deploy.run.folder import RunFolder
from deploy.run.progress import Progress
from deploy.run.settings import TrainSettings
from deploy.run.start_times import StartTimes
from deploy.run.updates_parquet import UpdatesWriter
from ps.closing_context import ClosingContext
from ps.cluster import Cluster, mark_ended
from shards.errors import BadInput, GiveUp
from shards.job_ids import short_id
from shards.live_settings import describe_settings
from shards.messages import LiveSettings
from shards.shard_status import ShardStatus
from worker.job.options import DEFAULT_SEED
from worker.job.shards import in_words
from worker.training.evaluation import Evaluation
from worker.training.worker_times import TimesTally, count_restarts


class RunObserver(ClosingContext):
    """Records and displays what `run_job` reports; a context manager.

    `begins_at` is the iteration from which a resumed run continues. `check` is called with each
    report; what it raises ends the run. `start` is the timeline of the start.
    """

    def __init__(
        self,
        folder: RunFolder,
        progress: Progress,
        settings: TrainSettings,
        *,
        seed: int = DEFAULT_SEED,
        begins_at: int | None = None,
        check: Callable[[], None] = lambda: None,
        start: StartTimes | None = None,
    ) -> None:
        self.start = start or StartTimes()
        self.cpu_s = 0.0  # of `progressed`
        self._check = check
        self._folder = folder
        self._progress = progress
        self._settings = settings
        self._seed = seed
        self.evaluations = EvaluationsFile(folder.evaluations, upto=begins_at)
        self.updates: UpdatesWriter | None = None
        self.times = TimesTally()
        self._began = time.monotonic()
        self._cluster: Cluster | None = None

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        self.start.note("shards")
        self._cluster, self._began = cluster, time.monotonic()
        cluster.save(self._folder.cluster)
        self.updates = self._folder.open_updates(
            job=short_id(cluster.job),
            seed=self._seed,
            restored=restored,
            part_s=self._settings.updates_every_s,
        )

    def progressed(self, statuses: list[ShardStatus], records: list[NDArray[np.void]]) -> None:
        assert self.updates is not None, "started comes first"
        began = time.thread_time()
        with self._survives_loss():
            self.updates.write(records)
        self.times.add(records, count_restarts(statuses), time.monotonic() - self._began)
        # Before the first worker registers, keep displaying what is being started.
        if statuses[0].workers:
            self.start.note("workers")
            if any(len(part) for part in records):
                self.start.note("step")
            self._progress.update(statuses, records)
        self._check()
        self.cpu_s += time.thread_time() - began

    def evaluated(self, result: Evaluation, weights: NDArray[np.float32]) -> None:
        assert self.updates is not None, "started comes first"
        seconds = self.updates.earlier_s + result.seconds
        self.evaluated_in_all(replace(result, seconds=seconds))

    def evaluated_in_all(self, result: Evaluation) -> None:
        """Record a result with the seconds of the whole run, those before a resumption included."""
        self._progress.show_evaluation(result)
        with self._survives_loss():
            self.evaluations.add(result)

    def tested(self, rows: int, of: int) -> None:
        self._progress.show_test_progress(rows, of)

    def resharded(self, cluster: Cluster) -> None:
        assert self.updates is not None, "started comes first"
        self.updates.restart_clocks()
        self._cluster = cluster
        self._settings = self._settings.replace(shards=cluster.map.shards)
        self._folder.resettle(self._settings.plain(), cluster)
        shards = cluster.map.shards
        self._progress.options_changed(f"moved to {in_words(shards)}", {"shards": shards})

    def settings_changed(self, settings: LiveSettings) -> None:
        """Record the changed settings: the run continues with them when it is resumed."""
        before = {
            "staleness": self._settings.staleness,
            "rate_factor": self._settings.rate_factor or 1.0,
        }
        now = {"staleness": settings.bound, "rate_factor": settings.rate_factor}
        changed = {name: value for name, value in now.items() if before[name] != value}
        self._progress.options_changed(describe_settings(settings), changed)
        try:
            self._settings = self._settings.replace(**changed)
            self._folder.write_settings(self._settings.plain())
        except (BadInput, GiveUp) as error:
            self.notice(f"{error}; the run trains with the change, and is resumed without it")

    def notice(self, text: str) -> None:
        self._progress.note(text)

    def close(self) -> None:
        """End the records, after the shards; `cluster.json` says from now on that they are gone."""
        if self._cluster is not None:
            mark_ended(self._folder.cluster, self._cluster)
            self._cluster = None
        if self.updates is not None:
            with self._survives_loss():
                self.updates.close()

    @contextmanager
    def _survives_loss(self) -> Iterator[None]:
        """Report a record that cannot be written, and continue: the training is worth more."""
        try:
            yield
        except GiveUp as error:
            self.notice(f"{error}; the run continues without it")
