"""The initial state of a training job: fresh weights, or a snapshot.

A snapshot must be of the same network, rule and number of workers. It may be of more or fewer
shards: its state is repartitioned for the present number. A job's logs serve as a snapshot, too.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ps import AdminClient, ShardState
from ps.job import in_words
from ps.snapshots.catalog import LoadedSnapshot
from ps.snapshots.manifest import Manifest
from ps.wal.job_logs import load_state, newest_logs
from shards.errors import BadInput
from shards.resumed_state import resume_states
from shards.spec import TableSpec
from shards.tables import Layout
from worker.job.training_job import Job
from worker.training.model import Model, check_start


class InitialState(msgspec.Struct, frozen=True):
    """A state for each shard of the job, and the versions of the shards that were saved.

    The two lists differ in length if the number of shards has changed.
    """

    states: Sequence[ShardState]
    versions: list[int]


Beginning = NDArray[np.float32] | InitialState
"""What is installed on the shards: an arena, or a state for each shard."""


def read(resume: str | Path | LoadedSnapshot | None) -> LoadedSnapshot | None:
    """The snapshot at a path or URI, or in a job's logs, read completely; raises BadInput."""
    if resume is None or isinstance(resume, LoadedSnapshot):
        return resume
    return load_state(resume)


def check_logs(logs: Path, snapshot: LoadedSnapshot | None) -> None:
    """Raise BadInput if the logs in a folder hold more updates than the initial state.

    This job will delete those logs, and they may be the only record of acknowledged pushes.
    """
    resumed = (
        None if snapshot is None else Path(snapshot.place)
    )  # already read, if it is one of these
    former_logs = newest_logs(logs, but=resumed)
    if former_logs is not None and (
        snapshot is None or snapshot.manifest.steps < former_logs.manifest.steps
    ):
        raise BadInput(
            f"logs {logs}",
            expected="a folder of this job's own",
            got=(
                f"an earlier job's logs, with {former_logs.manifest.steps} pushes: "
                f"resume from {former_logs.place}, or remove it"
            ),
        )


def beginning(
    model: Model,
    tables: Sequence[TableSpec],
    job: Job,
    weights: NDArray[np.float32] | None,
    resume: LoadedSnapshot | None,
) -> Beginning:
    """`weights`, or the snapshot `resume`, or the model's initial weights; raises BadInput."""
    if resume is None:
        return check_start(model, model.initial(job.plan.seed)) if weights is None else weights
    if weights is not None:
        raise BadInput("start", expected="weights or a snapshot to resume", got="both")
    manifest, states = resume.manifest, resume.states
    check_fit(resume.place, manifest, Layout.of(table_spec.table for table_spec in tables), job)
    versions = [state.saved.version for state in states]
    spec, *_ = job.specs(tables)
    if job.rate_factor is not None:  # the options say all, also of what an operator had changed
        saved = [structs.replace(state.saved, settings=None) for state in states]
        states = [
            structs.replace(state, saved=bare_state)
            for state, bare_state in zip(states, saved, strict=True)
        ]
    return InitialState(resume_states(states, manifest.map, spec), versions)


def check_fit(where: str, manifest: Manifest, layout: Layout, job: Job) -> None:
    """Raise BadInput when the snapshot at `where` is another job's."""
    for subject, expected, got in (
        ("workers", manifest.workers, job.workers),
        ("rule", ", ".join(manifest.rules), ", ".join(job.rule_names)),
        ("tensors", _shapes(manifest.layout), _shapes(layout)),
        ("sparse tables", _rows(manifest.layout), _rows(layout)),
    ):
        if expected != got:
            raise BadInput(f"resume {where}: it was made with {subject} {expected}, got {got}")


def install(admin: AdminClient, begin: Beginning) -> None:
    """Send every shard its part of the initial state."""
    if isinstance(begin, np.ndarray):
        admin.install(begin)
        return
    for shard, state in enumerate(begin.states):
        admin.restore(shard, state)


def versions(begin: Beginning) -> list[int] | None:
    """The versions of the shards in a resumed snapshot; None for fresh weights."""
    return begin.versions if isinstance(begin, InitialState) else None


def first_incarnation(begin: Beginning) -> int:
    """An incarnation above all in a snapshot's ledgers, so that no earlier worker can come back."""
    if isinstance(begin, np.ndarray):
        return 0
    ledgers = [state.saved.ledger for state in begin.states]
    incarnations = [entry.incarnation for ledger in ledgers for entry in ledger.entries.values()]
    return max(incarnations, default=-1) + 1


def _shapes(layout: Layout) -> str:
    tensors = (tensor for table in layout.tables for tensor in table.tensors)
    return " ".join(f"{tensor.name}{list(tensor.shape)}" for tensor in tensors)


def _rows(layout: Layout) -> str:
    return in_words(Layout((), layout.sparse)) if layout.sparse else "none"
