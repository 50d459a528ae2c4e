"""The reports of a training job: to its observer while it runs, and its outcome at the end."""

from collections.abc import Sequence
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps import Cluster
from ps.logs import Logger
from shards.messages import LiveSettings
from shards.shard_status import ShardStatus
from worker.job.stored_rows import StoredRows
from worker.training.evaluation import Evaluation, in_words
from worker.training.training_loop import WorkerReport


class Observer(Protocol):
    """Receives a running job's events, in the thread that called `train` or `run`."""

    def started(self, cluster: Cluster, restored: list[int] | None) -> None:
        """The shards hold their weights; `restored` are their versions in a resumed snapshot."""
        ...

    def progressed(
        self, statuses: list[ShardStatus], records: list[NDArray[np.void]]
    ) -> bool | None:
        """The current counters, and the records since the last call, one array a shard.

        True ends the training.
        """
        ...

    def evaluated(self, result: Evaluation, weights: NDArray[np.float32]) -> None:
        """The result of a test of weights, an arena to keep, made while the job trains."""
        ...

    def resharded(self, cluster: Cluster) -> None:
        """The job has been resharded to `cluster`; later reports come from its shards."""
        ...

    def settings_changed(self, settings: LiveSettings) -> None:
        """An operator has changed settings of the job, which trains with these from now on."""
        ...

    def notice(self, text: str) -> None:
        """A message for the operator, such as a failed snapshot."""
        ...


class Notices:
    """Keeps the messages for the operator, and passes each to the observer, or else to the log."""

    def __init__(self, observer: Observer | None, log: Logger) -> None:
        self._observer = observer
        self._logger = log
        self.texts: list[str] = []

    def __call__(self, text: str) -> None:
        self.texts.append(text)
        if self._observer is not None:
            self._observer.notice(text)
        else:
            self._logger.warning("%s", text)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a job: the final weights as a flat float32 arena, its rows, and how it went.

    `former_statuses` are the last statuses of the former shards of a resharded job. `snapshot` is
    that of the final weights; None if none was wanted or it could not be written, even if earlier
    snapshots exist. `evaluations` are the results of the tests during training, which have taken
    `tests_cpu_s` CPU seconds. `notices` are the messages for the operator that the observer
    received, such as why a snapshot is missing and which updates the death of a shard has lost.
    """

    cluster: Cluster
    weights: NDArray[np.float32]
    statuses: list[ShardStatus]
    former_statuses: list[ShardStatus]
    reports: list[WorkerReport]
    snapshot: str | None
    seconds: float
    interrupted: bool
    evaluations: list[Evaluation] = []
    notices: tuple[str, ...] = ()
    tests_cpu_s: float = 0.0
    rows: StoredRows = msgspec.field(default_factory=StoredRows)

    def __repr__(self) -> str:
        return f"Outcome({in_a_line(self, self.evaluations)})"

    def last_evaluation(self, workers: int, figures: dict[str, float]) -> Evaluation:
        """The result of a test of the final weights, of a job with this many workers."""
        status = self.statuses[0]
        return Evaluation(status.steps // workers, status.samples, self.seconds, figures)


def in_a_line(outcome: Outcome, evaluations: Sequence[Evaluation]) -> str:
    """The steps of a job and its last test in a line, for a `repr`."""
    steps = outcome.statuses[0].steps if outcome.statuses else 0
    return ", ".join(
        [
            f"{steps:,} steps of all workers in {outcome.seconds:.1f} s",
            *([in_words(evaluations[-1].figures)] if evaluations else []),
            *(["interrupted"] if outcome.interrupted else []),
        ]
    )
