"""Asynchronous DiLoCo with delayed Nesterov (Liu et al. 2024, arXiv 2401.09135).

    at first:   pull w;  x = w
    each step:  x by AdamW; its moments stay with their worker
    each h steps:  push D = w - x

The shards apply each delta at once, at an N-th of the rate, and the momentum at every N-th:

    w -= rate * D / N;  s += D
    each N-th push:  m = momentum * m + s / N;  w -= rate * momentum * m;  s = 0

N is the number of workers, so over a round of pushes the deltas move w by `rate` times their mean.
Applying each at the full rate, and their mean through the momentum as well, counts them twice and
diverges. A slower worker takes fewer steps, h * v / v_max, so that no delta is very old: name the
steps a second of the workers in `speeds`.
"""

from math import floor
from typing import ClassVar

import msgspec
from msgspec import structs

from shards import argument_checks
from shards.aggregation import EACH, ServerHalf
from shards.errors import BadInput
from shards.rules import DelayedNesterov
from worker.strategies.base import at_least, check_options, positive
from worker.strategies.diloco import DiLoCo


class AsyncDiLoCo(DiLoCo, frozen=True, tag="async_diloco", kw_only=True):
    """DiLoCo without rounds: each delta is applied at once, the momentum every `n` (None: W).

    `speeds` are steps a second by worker, in any unit; a worker not in it is as fast as the
    fastest. In a text: async_diloco:speeds=worker-0/1+worker-1/2.
    """

    n: int | None = None
    speeds: dict[str, float] = msgspec.field(default_factory=dict)

    synchronous: ClassVar[bool] = False
    usual_bound: ClassVar[int | None] = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.b:
            raise BadInput(
                f"strategy {self.name}: b", expected="0, as there are no rounds", got=self.b
            )
        if self.n is not None:
            check_options(self, n=at_least(1))
        speeds = argument_checks.instance("speeds", self.speeds, dict, "numbers by worker")
        for worker, speed in speeds.items():
            positive(f"strategy {self.name}: speeds: {worker}", speed)

    def for_workers(self, workers: int) -> "AsyncDiLoCo":
        return structs.replace(self, n=workers) if self.n is None else self

    def for_worker(self, name: str) -> "AsyncDiLoCo":
        if not self.speeds:
            return self
        fastest = max(self.speeds.values())
        steps = max(1, floor(self.h * self.speeds.get(name, fastest) / fastest))
        return structs.replace(self, h=steps, speeds={})

    def server(self, workers: int) -> ServerHalf:
        rule = DelayedNesterov(self.momentum, workers if self.n is None else self.n)
        return ServerHalf(merge=EACH, rule=rule, rate=self.outer_lr)
