"""Records a run of a program of the user's own in a folder: its updates, and its tests.

    with worker.start(tables, strategy="decoupled_diloco") as job:
        with deploy.record(job, "runs/mine") as records:
            ...
            records.test({"loss": 2.1})

    worker.run(df, train, params=params, callbacks=[deploy.Recorder("runs/mine")])

`downpour plot runs/mine` draws it. The files are those of `downpour train`. A shard gives each
record away once, so only one program may collect those of a job.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread

import numpy as np
from numpy.typing import NDArray

from deploy.run.evaluations_csv import EvaluationsFile
from deploy.run.folder import EVALUATIONS, UPDATES
from deploy.run.updates_parquet import UpdatesWriter
from ps import AdminClient, Cluster, Job, path_checks
from ps.logs import logger
from ps.storage import place_error
from shards import argument_checks
from shards.errors import BadInput, DownpourError
from shards.job_ids import short_id
from worker.callbacks.base import Callback, Parameters, WatchedRun
from worker.job.options import DEFAULT_SEED
from worker.training.evaluation import Evaluation

_COLLECT_S = 0.5


class Recorder(Callback):
    """A callback that writes `updates.parquet` and `evaluations.csv` of a run to a new folder.

    Raises BadInput, as the run starts, for a folder that has files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = path_checks.path("folder", folder)
        self._updates: UpdatesWriter | None = None
        self._tests = EvaluationsFile(self.folder / EVALUATIONS)

    def started(self, run: WatchedRun) -> None:
        """Make the folder."""
        self.open(run.cluster)

    def recorded(self, records: list[NDArray[np.void]]) -> None:
        """Write the records of updates."""
        self.updates.write(records)

    def evaluated(self, result: Evaluation, parameters: Parameters) -> None:
        """Write the result of a test."""
        self.add(result)

    def ended(self, parameters: Parameters | None) -> None:
        """Close the files."""
        if self._updates is not None:
            self._updates.close()

    def open(self, cluster: Cluster) -> None:
        """Make the folder for the records of this job."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if content := sorted(self.folder.iterdir()):
                raise BadInput(
                    f"record: {self.folder}", expected="a new folder", got=f"one with {content[0]}"
                )
        except OSError as error:
            raise place_error(f"record: {self.folder}", error) from None
        self._updates = UpdatesWriter(
            self.folder / UPDATES, job=short_id(cluster.job), seed=DEFAULT_SEED
        )

    def add(self, result: Evaluation) -> None:
        """Write the result of a test."""
        self._tests.add(result)

    @property
    def updates(self) -> UpdatesWriter:
        """The open record of updates."""
        assert self._updates is not None, "open comes first"
        return self._updates


class JobRecords:
    """The records of a running job, which a thread collects; made by `record`."""

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job = job
        self._recorder = recorder
        self._lock = Lock()
        self._cluster = job.cluster
        self._admin = AdminClient(job.cluster, check=job.check)
        self._began = 0.0  # when the first update was collected
        self._steps = 0
        recorder.open(job.cluster)

    def test(self, figures: dict[str, float]) -> None:
        """Record the figures of a test of the present weights, such as {"loss": 2.1}."""
        figures = dict(argument_checks.instance("test: figures", figures, dict, "numbers by name"))
        for name, value in figures.items():
            argument_checks.number(f"test: figures: {name}", value)
        self.collect()
        with self._lock:
            iteration = self._steps // max(1, self._cluster.workers)
            samples = self._recorder.updates.fresh_samples
            seconds = time.monotonic() - self._began if self._steps else 0.0
            self._recorder.add(Evaluation(iteration, samples, seconds, figures))

    def collect(self) -> None:
        """Write the records of the updates since the last call."""
        with self._lock:
            if self._job.cluster is not self._cluster:  # the job has moved to other shards
                self._admin.close()
                self._cluster = self._job.cluster
                self._admin = AdminClient(self._cluster, check=self._job.check)
                self._recorder.updates.restart_clocks()
            records = self._admin.records()
            if len(records[0]) and not self._steps:
                self._began = time.monotonic()
            self._steps += int(records[0]["steps"].sum())
            self._recorder.updates.write(records)

    def close(self) -> None:
        """Close the files and the connections."""
        self._recorder.ended(None)
        self._admin.close()


@contextmanager
def record(job: Job, folder: str | Path) -> Iterator[JobRecords]:
    """Record a job of `worker.start`, `ps.start` or `ps.connect` in a new folder until the block
    ends.

    It must end before the job does. What the disk or a shard refuses is logged, and the training
    continues. Raises BadInput for a folder that has files.
    """
    argument_checks.instance("record: job", job, Job, "a ps.Job")
    records, stop = JobRecords(job, Recorder(folder)), Event()
    thread = Thread(target=_collect_until, args=(records, stop), name="records", daemon=True)
    thread.start()
    try:
        yield records
    finally:
        stop.set()
        thread.join()
        records.close()


def _collect_until(records: JobRecords, stop: Event) -> None:
    """Collect records twice a second, and once more at the end."""
    ended = False
    while not ended:
        ended = stop.wait(_COLLECT_S)
        try:
            records.collect()
        except DownpourError as error:
            logger("deploy").warning("%s; the run continues without records", error)
            return
