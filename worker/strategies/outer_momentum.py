"""The bases of DiLoCo's family: windows of AdamW on a worker, momentum over their deltas at shards.

    at first:   pull w;  x = w
    each step:  x by AdamW; its moments stay with their worker
    each h steps:  push D = w - x

An outer rate and momentum of 0.7 and 0.9 suit hundreds of local steps; after only a few, w moves
too far, because each delta is small and always points the same way.
"""

from math import floor
from typing import ClassVar, Self

import msgspec
from msgspec import structs

from shards import argument_checks
from shards.rules import AdamW, Rule
from worker.strategies.base import (
    Floats,
    Local,
    Windowed,
    check_options,
    explain_scale,
    positive,
    share,
)
from worker.strategies.base import window_steps as check_window


class OuterMomentum(Windowed, frozen=True, kw_only=True):
    """Take `h` local steps of AdamW; the shards apply the deltas with momentum.

    `inner_lr` is the rate of the local steps (None: the job's), `weight_decay` AdamW's.
    """

    h: int = 500
    outer_lr: float = 0.7
    momentum: float = 0.9
    inner_lr: float | None = None
    weight_decay: float = 0.1

    keeps: ClassVar[tuple[str, ...]] = AdamW.slot_names
    keeps_moments: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_options(self, h=check_window, outer_lr=positive, momentum=share, weight_decay=share)
        if self.inner_lr is not None:
            check_options(self, inner_lr=positive)

    @property
    def own_rate(self) -> bool:
        return self.inner_lr is not None

    @property
    def window_steps(self) -> int:
        return self.h

    def inner_rule(self) -> Rule:
        return AdamW(weight_decay=self.weight_decay)

    def local_step(self, local: Local, gradient: Floats, rate: float) -> None:
        inner = rate if self.inner_lr is None else self.inner_lr
        super().local_step(local, gradient, inner)


class PacedWindows(OuterMomentum, frozen=True, kw_only=True):
    """A family without rounds: a slower worker takes fewer steps, so that no delta is very old.

    `speeds` are steps a second by worker, in any unit; a worker takes h * v / v_max steps, and one
    without a speed is as fast as the fastest. In a text: speeds=worker-0/1+worker-1/2.
    """

    speeds: dict[str, float] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        speeds = argument_checks.instance("speeds", self.speeds, dict, "numbers by worker")
        for worker, speed in speeds.items():
            positive(f"strategy {self.name}: speeds: {worker}", speed)

    def for_worker(self, name: str) -> Self:
        if not self.speeds:
            return self
        fastest = max(self.speeds.values())
        steps = floor(self.h * self.speeds.get(name, fastest) / fastest)
        return structs.replace(self, h=max(self.least_steps, steps), speeds={})

    @property
    def least_steps(self) -> int:
        """The fewest steps that the slowest worker takes between two pushes."""
        return 1


class ScaledWindows(PacedWindows, frozen=True, kw_only=True):
    """A family whose shards apply each delta at once at the whole rate, times `scale`.

    By default `scale` is 1/W: the papers push at the full rate, and eight workers then move w too
    far. On MNIST they ended at the accuracy of a guess.
    """

    scale: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None:
            check_options(self, scale=positive)

    def scale_for(self, workers: int) -> float:
        """The factor on the outer rate with this number of workers."""
        return 1 / workers if self.scale is None else self.scale

    def notices(self, workers: int, rule: Rule) -> tuple[str, ...]:
        texts = super().notices(workers, rule)
        if workers == 1 or self.scale is not None:
            return texts
        return explain_scale(self, workers), *texts
