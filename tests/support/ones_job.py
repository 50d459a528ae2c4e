"""Jobs whose outcome is known in advance: gradients of ones, whose sum counts the pushes."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.rules import SGD, Decay
from shards.schedules import Fixed
from shards.tables import DenseTable, TensorSpec
from worker.job.options import LinkOptions, ShardRuntime
from worker.job.training_job import Job
from worker.strategies import Downpour, Strategy
from worker.training.model import Batch, Model
from worker.training.training_loop import Plan

TABLE = DenseTable("weights", (TensorSpec("a", (300,)), TensorSpec("b", (70, 10))))


class Ones:
    """A model whose gradient is 1 everywhere: after n pushes at rate 1 every weight is -n."""

    def __init__(self, pause_s: float = 0.0) -> None:
        self.table = TABLE
        self._pause_s = pause_s

    def initial(self, seed: int) -> NDArray[np.float32]:
        return TABLE.empty()

    def gradient(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> float:
        time.sleep(self._pause_s)
        out[:] = 0
        for view in TABLE.views(out).values():
            view[:] = 1
        return 1.0


class DiesOnce(Ones):
    """Ends its own process with SIGKILL at `step`, the first time that any process gets there."""

    def __init__(self, marker: Path, at_step: int) -> None:
        super().__init__(pause_s=0.005)
        self._marker = marker
        self._at_step = at_step

    def gradient(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> float:
        if step == self._at_step:
            try:
                self._marker.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().gradient(weights, batch, out, step=step, seed=seed)


class Broken(Ones):
    """Raises an error of its own at step 5, in every life."""

    def gradient(
        self,
        weights: NDArray[np.float32],
        batch: Batch,
        out: NDArray[np.float32],
        *,
        step: int,
        seed: int,
    ) -> float:
        if step == 5:
            raise RuntimeError("the model broke")
        return super().gradient(weights, batch, out, step=step, seed=seed)


class Silent(Ones):
    """Its gradient forgets to return the loss."""

    def gradient(self, *arguments: Any, **options: Any) -> float:
        super().gradient(*arguments, **options)
        return None  # type: ignore[return-value]  # as a user's may


def ones_job(
    model: Callable[[], Model] | None = None,
    *,
    steps: int,
    workers: int,
    bound: int | None = 2,
    strategy: Strategy | None = None,
    links: LinkOptions = LinkOptions(),  # noqa: B008  # frozen
    **runtime: Any,
) -> Job:
    """A job of `workers` times `steps` unit pushes at rate 1.

    Its shards live in processes, which start for half the CPU time of Ray's actors.
    """
    return Job(
        model=model or partial(Ones, 0.002),
        plan=Plan(
            steps=steps,
            seed=1,
            strategy=strategy or Downpour(scale=1.0),
            schedule=Fixed(base_rate=1.0),
        ),
        rule=SGD(),
        schedule=Fixed(base_rate=1.0),
        decay=Decay(),
        batch_size=4,
        workers=workers,
        bound=bound,
        links=links,
        runtime=ShardRuntime(shards=2, shards_in="processes").replace(**runtime),
    )


def rows(count: int) -> pa.Table:
    """`count` images of 2x2 zeros, labelled 0."""
    return pa.table({"label": pa.array([0] * count), "data": pa.array([bytes(4)] * count)})


def counted(weights: NDArray[np.float32]) -> set[float]:
    """The values that the weights took: {-n} when exactly n pushes were applied everywhere."""
    return {float(value) for view in TABLE.views(weights).values() for value in view.ravel()}
