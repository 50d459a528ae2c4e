"""The inputs of a job: everything is checked and read before a shard is started."""

from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import path_checks
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog
from shards import argument_checks
from shards.spec import TableSpec
from shards.tables import Layout
from worker import spark
from worker.job import initial_state
from worker.job.training_job import Job
from worker.training.device_selection import check, check_here
from worker.training.model import Model, build_model


class JobInputs(msgspec.Struct, frozen=True):
    """The checked inputs of a job, with its initial state read, before anything is started.

    `snapshot` is the one to resume, `snapshots` the place of new ones and `catalog` its catalog.
    `workers_here` is whether the workers are known to run on this machine.
    """

    model: Model
    tables: tuple[TableSpec, ...]
    snapshot: LoadedSnapshot | None
    beginning: initial_state.Beginning
    snapshots: str | Path | None
    catalog: SnapshotCatalog | None
    logs: Path | None
    workers_here: bool

    def begins_at(self, workers: int) -> int:
        """The iteration at which the job begins."""
        return self.snapshot.manifest.steps // workers if self.snapshot else 0


def prepare(
    df: spark.TaskInput,
    job: Job,
    weights: NDArray[np.float32] | None,
    resume: str | Path | LoadedSnapshot | None,
    snapshots: str | Path | None,
    logs: str | Path | None,
) -> JobInputs:
    """Check the inputs of a job and read its initial state; raises BadInput."""
    if not isinstance(resume, LoadedSnapshot | None):
        resume = path_checks.place("resume", resume)
    if snapshots is not None:
        snapshots = path_checks.place("snapshots", snapshots)
    folder = None if logs is None else path_checks.path("logs", logs)
    model = job.driver_model or build_model(job.model)
    tables = job.tables_of(model.table)
    layout = Layout.of(spec.table for spec in tables)
    if weights is not None:
        weights = argument_checks.array("weights", weights, layout.size)
    job.plan.strategy.check(job.bound, job.plan.prefetch)
    if job.function is None:  # a function moves its model to a device itself
        check(model, job.device)
    workers_here = spark.runs_here(df)
    if workers_here:
        check_here(job.device)
    if job.runtime.uses_curve:
        spark.check_guarded(df)
    snapshot = initial_state.read(resume)
    beginning = initial_state.beginning(model, tables, job, weights, snapshot)
    if folder is not None:
        initial_state.check_logs(folder, snapshot)
    catalog = None
    if snapshots is not None:
        catalog = SnapshotCatalog(snapshots, job.snapshots.retention())
        catalog.check_writable()
    return JobInputs(model, tables, snapshot, beginning, snapshots, catalog, folder, workers_here)
