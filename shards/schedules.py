"""Learning-rate schedules: each of Caffe's policies as a value.

A schedule is a frozen struct that maps an iteration to a rate and remembers nothing, so that a
shard which restarts, or a worker which is retried, finds its place from the iteration alone. The
iteration counts updates from 0. The struct's tag is the policy's name in a solver file; `Schedule`
is the union of all of them, which `msgspec.convert` takes as it is.
"""

from bisect import bisect_right
from math import exp, inf
from typing import get_args

import msgspec

from shards.errors import BadInput


class _Policy(msgspec.Struct, frozen=True, tag_field="policy", kw_only=True):
    """What every policy has: the rate that it scales."""

    base_rate: float

    def __post_init__(self) -> None:
        _demand(self, "base_rate", "0 or more, and finite", 0 <= self.base_rate < inf)


class Fixed(_Policy, frozen=True, tag="fixed"):
    """`base_rate`, for ever."""

    def rate(self, iteration: int) -> float:  # all policies share one call
        return self.base_rate


class Step(_Policy, frozen=True, tag="step", kw_only=True):
    """`base_rate * gamma ^ floor(iteration / step_size)`."""

    gamma: float
    step_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand(self, "step_size", "1 or more", self.step_size >= 1)

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * self.gamma ** (iteration // self.step_size))


class Exp(_Policy, frozen=True, tag="exp", kw_only=True):
    """`base_rate * gamma ^ iteration`."""

    gamma: float

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * self.gamma**iteration)


class Inv(_Policy, frozen=True, tag="inv", kw_only=True):
    """`base_rate * (1 + gamma * iteration) ^ -power`."""

    gamma: float
    power: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand(self, "gamma", "0 or more", self.gamma >= 0)

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * (1 + self.gamma * iteration) ** -self.power)


class MultiStep(_Policy, frozen=True, tag="multistep", kw_only=True):
    """`base_rate * gamma ^ (how many of `steps` the iteration has reached)`."""

    gamma: float
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand(self, "steps", "in rising order", list(self.steps) == sorted(self.steps))

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * self.gamma ** bisect_right(self.steps, iteration))


class Poly(_Policy, frozen=True, tag="poly", kw_only=True):
    """`base_rate * (1 - iteration / max_iteration) ^ power`, and 0 from `max_iteration` on."""

    power: float
    max_iteration: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _demand(self, "max_iteration", "1 or more", self.max_iteration >= 1)
        _demand(self, "power", "0 or more", self.power >= 0)

    def rate(self, iteration: int) -> float:
        # A late push may carry an iteration past the end, where the base would turn negative.
        if iteration >= self.max_iteration:
            return 0.0
        return float(self.base_rate * (1 - iteration / self.max_iteration) ** self.power)


class Sigmoid(_Policy, frozen=True, tag="sigmoid", kw_only=True):
    """`base_rate / (1 + exp(-gamma * (iteration - step_size)))`."""

    gamma: float
    step_size: int

    def rate(self, iteration: int) -> float:
        exponent = -self.gamma * (iteration - self.step_size)
        if exponent > 700:  # exp would overflow; the rate has long been 0 in float32
            return 0.0
        return self.base_rate / (1 + exp(exponent))


Schedule = Fixed | Step | Exp | Inv | MultiStep | Poly | Sigmoid

SCHEDULES: dict[str, type[Schedule]] = {
    str(policy.__struct_config__.tag): policy for policy in get_args(Schedule)
}


def _demand(policy: _Policy, field: str, expected: str, holds: bool) -> None:
    if not holds:
        name = policy.__struct_config__.tag
        raise BadInput(
            f"learning-rate policy {name}: {field}: expected {expected},"
            f" got {getattr(policy, field)}"
        )
