"""The interface of a kind of model: it fits itself to the data and describes its job.

`worker.Caffe` is one kind, `worker.CustomModel` another. A new kind is one file with one class.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import argument_checks
from shards.tables import DenseTable
from worker import spark
from worker.data.source import Source
from worker.job.option_fields import option
from worker.job.run_options import RunArguments
from worker.job.training_job import Job
from worker.training.evaluation import EvaluationPlan

Floats = NDArray[np.float32]


@runtime_checkable
class ModelKind(Protocol):
    """A kind of model for `worker.train`, such as `worker.Caffe` or `worker.CustomModel`."""

    def table(self) -> DenseTable:
        """The parameters: their names, shapes and places in the flat array of weights."""
        ...

    def fit_to(
        self, df: "spark.DataFrame | spark.SparkSession", options: "TrainArguments"
    ) -> "Fitted":
        """Check the data and the options, and describe the job; raises BadInput."""
        ...

    def save(self, path: Path, weights: Floats) -> None:
        """Write weights to a file; raises BadInput for a suffix that the kind does not know."""
        ...


def _kind(label: str, value: object) -> ModelKind:
    expected = 'a kind of model, such as worker.Caffe("solver.prototxt")'
    kind: ModelKind = argument_checks.instance(label, value, ModelKind, expected)  # type: ignore[type-abstract]
    return kind


class TrainArguments(RunArguments):
    """The keyword arguments of `train`."""

    model: ModelKind = option(
        "What to train: `worker.Caffe(solver)`, or a `worker.CustomModel`.", check=_kind
    )

    @classmethod
    def label_option(cls, name: str) -> str:
        return f"train: {name}"

    def count_workers(self, df: "spark.DataFrame") -> int:
        """The number of workers: that of the partitions of `df` unless it is given."""
        return spark.partition_count(df) if self.workers is None else self.workers


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """A model that fits its data: what `train` runs.

    `model` is the kind with what the data has determined. The tasks read a `source`, if there is
    one, in place of the rows of `df`. `start` are the first weights, None for those of the job's
    model. `evaluation` are the tests during training, and `test` computes the figures of the final
    weights; it raises BadInput.
    """

    model: ModelKind
    df: "spark.DataFrame"
    job: Job
    source: Source | None = None
    start: Floats | None = None
    evaluation: EvaluationPlan | None = None
    test: Callable[[Floats], dict[str, float]] | None = None
