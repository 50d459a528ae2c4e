"""`worker.CustomModel`: a model of the user's own as a kind of model of `worker.train`."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.tables import tables_of
from shards import argument_checks
from shards.errors import BadInput
from shards.rules import Decay, Rule, decay_of, rule_of
from shards.schedules import Schedule, schedule_of
from shards.tables import DenseTable
from worker import spark
from worker.data.parameters_file import write_parameters
from worker.job.model_kind import Fitted, TrainArguments
from worker.job.options import DEFAULT_SEED, MAX_COUNT, LinkOptions, ShardRuntime, SnapshotPolicy
from worker.job.training_job import Job
from worker.training.model import Model, build_model
from worker.training.training_loop import Plan


class CustomModel(msgspec.Struct, frozen=True):
    """A `worker.Model` of your own, for `worker.train`.

    `build` is a function without arguments that makes the model, in this process and in every task.
    A step takes `batch_size` rows. `rule`, `rate` and `decay` say how the shards update, as in
    `ps.Dense.like`. The DataFrame needs a column `label` (whole numbers) and one named `image` or
    `data`; a batch has these as `data`, (n, channels, height, width), and `label`, (n,).

    Training has no end without `max_iter`, so `worker.train` needs one.
    """

    build: Callable[[], Model]
    batch_size: int
    rate: Schedule | float = 0.01
    rule: Rule | str = "sgd"
    decay: Decay | float = 0.0

    def __post_init__(self) -> None:
        expected = "a function without arguments that makes a model"
        argument_checks.function("CustomModel: build", self.build, expected)
        argument_checks.whole("CustomModel: batch_size", self.batch_size, 1, MAX_COUNT)
        for name, checked in (("rate", schedule_of), ("rule", rule_of), ("decay", decay_of)):
            value = checked(f"CustomModel: {name}", getattr(self, name))
            msgspec.structs.force_setattr(self, name, value)

    def table(self) -> DenseTable:
        """The model's tensors."""
        return build_model(self.build).table

    def fit_to(self, df: "spark.DataFrame | spark.SparkSession", options: TrainArguments) -> Fitted:
        """See `worker.train`."""
        if isinstance(df, spark.SparkSession):
            raise argument_checks.wrong("train: df", "a Spark DataFrame", df)
        if options.max_iter is None:
            raise BadInput("train: max_iter", expected="a number of steps", got="none")
        rate = schedule_of("rate", self.rate)
        job = Job(
            model=self.build,
            plan=Plan(
                steps=options.max_iter,
                seed=DEFAULT_SEED if options.seed is None else options.seed,
                strategy=options.build_strategy(),
                schedule=rate,
                prefetch=options.prefetch,
            ),
            rule=rule_of("rule", self.rule),
            schedule=rate,
            decay=decay_of("decay", self.decay),
            batch_size=self.batch_size,
            workers=options.count_workers(df),
            bound=options.staleness,
            rate_factor=options.rate_factor,
            stale=options.on_stale,
            shuffle=options.shuffle,
            skip_images=options.skip_images,
            device=options.build_device("auto"),
            runtime=options.part(ShardRuntime),
            links=options.part(LinkOptions),
            snapshots=options.part(SnapshotPolicy),
            logs_apart=True,
        )
        return Fitted(model=self, df=df, job=job)

    def save(self, path: Path, weights: NDArray[np.float32]) -> None:
        """Write the tensors by name as .safetensors."""
        views = self.table().views(weights)
        write_parameters(path, tables_of(views), views)
