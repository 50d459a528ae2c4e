"""Caffe's `display`: when a line about the loss is due, and the mean loss that it shows."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shards.shard_status import ShardStatus
from worker.training.figures import RecentLoss


class Milestones:
    """Detects when iterations, which may be skipped, have reached a multiple of `every`."""

    def __init__(self, every: int) -> None:
        self._every = every
        self._passed: int | None = None

    def passes(self, iteration: int) -> bool:
        """Return whether a multiple was reached since the last call; false in the first call."""
        passed, self._passed = self._passed, iteration // self._every if self._every else 0
        return passed is not None and self._passed > passed


class LossLine:
    """A line about the loss every `every` iterations (0: never) of `workers` steps each."""

    def __init__(self, every: int, average: int | None, workers: int) -> None:
        self._workers = workers
        self._milestones = Milestones(every)
        self._loss = RecentLoss((average or 1) * workers)

    def line(
        self, statuses: Sequence[ShardStatus], records: Sequence[NDArray[np.void]]
    ) -> str | None:
        """The line, if one is due at these statuses; `records` are those since the last call."""
        self._loss.add(records)
        iteration = statuses[0].steps // self._workers
        if not self._milestones.passes(iteration) or self._loss.mean is None:
            return None
        rate = statuses[0].rate
        return f"iteration {iteration}: loss {self._loss.mean:.4g}, learning rate {rate:.4g}"
