"""DiLoCo on a network that loses exchanges, as Douillard et al. 2023 (arXiv 2311.08105) test it.

In every round each worker loses its exchange with the same probability: its delta does not count in
the round's mean, and it continues from its own weights, not from the new ones. The next exchange
that works sends how far its own weights are then from the shards'.

This is an experiment's set-up and no strategy for users: Downpour repeats what a network loses.
"""

from typing import Self

import numpy as np
from msgspec import structs

from deploy.experiments.cluster import worker_name
from shards.errors import BadInput
from worker.strategies import DiLoCo
from worker.strategies.base import Floats, Local, check_options, share


class LossyDiLoCo(DiLoCo, frozen=True, tag="lossy_diloco", kw_only=True):
    """DiLoCo in which each worker loses an exchange with the probability `drop`.

    A worker that has lost one pushes zeros, which close the round; those that have not push a delta
    as many times as large as makes the round's mean that of their deltas. Every worker draws the
    losses of all of them from `seed` and the round, so they agree.
    """

    drop: float = 0.5
    seed: int = 0
    workers: int = 1
    number: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, drop=share)
        if self.b:
            raise BadInput(f"strategy {self.name}: b", expected="0 with drop", got=self.b)

    def for_workers(self, workers: int) -> Self:
        return structs.replace(self, workers=workers)

    def for_worker(self, name: str) -> Self:
        numbers = {worker_name(number): number for number in range(self.workers)}
        return structs.replace(self, number=numbers.get(name, 0))

    def draw_losses(self, window: int) -> list[bool]:
        """Which workers lose the exchange at the end of a window, counted from 0."""
        drawn = np.random.default_rng((self.seed, window, 5)).random(self.workers) < self.drop
        return [bool(loss) for loss in drawn]

    def on_pull(self, local: Local, pulled: Floats) -> None:
        if not local.count or not self.draw_losses(local.count // self.h - 1)[self.number]:
            local.weights = pulled

    def contribution(self, local: Local) -> Floats:
        delta = super().contribution(local)
        lost = self.draw_losses(local.count // self.h - 1)
        delta *= np.float32(0 if lost[self.number] else self.workers / lost.count(False))
        return delta
