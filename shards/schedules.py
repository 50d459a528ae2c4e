"""Learning-rate schedules: each of Caffe's policies as a value.

A schedule is a frozen struct that maps an iteration to a rate. It has no state, so a restarted
shard finds its rate from the iteration alone. The iteration counts updates from 0. The struct's tag
is the policy's name in a solver file; `Schedule` is the union of all policies, for
`msgspec.convert`.
"""

from bisect import bisect_right
from math import exp
from numbers import Real
from typing import cast, get_args

import msgspec
import numpy as np
from msgspec import structs

from shards import argument_checks
from shards.errors import BadInput
from shards.named_fields import NamedFields


class RatePolicy(
    msgspec.Struct, frozen=True, tag_field="policy", kw_only=True, metaclass=NamedFields
):
    """The base of all policies, with the rate that they scale."""

    base_rate: float

    def __post_init__(self) -> None:
        _number(self, "base_rate", 0, "0 or more, and finite")

    def rate(self, iteration: int) -> float:
        """The learning rate of an iteration, counted from 0."""
        raise NotImplementedError


class Fixed(RatePolicy, frozen=True, tag="fixed"):
    """Always `base_rate`."""

    def rate(self, iteration: int) -> float:
        return self.base_rate


class Step(RatePolicy, frozen=True, tag="step", kw_only=True):
    """`base_rate * gamma ^ floor(iteration / step_size)`."""

    gamma: float
    step_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _number(self, "gamma")
        _whole(self, "step_size")
        _demand(self, "step_size", "1 or more", self.step_size >= 1)

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * self.gamma ** (iteration // self.step_size))


class Exp(RatePolicy, frozen=True, tag="exp", kw_only=True):
    """`base_rate * gamma ^ iteration`."""

    gamma: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _number(self, "gamma")

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * self.gamma**iteration)


class Inv(RatePolicy, frozen=True, tag="inv", kw_only=True):
    """`base_rate * (1 + gamma * iteration) ^ -power`."""

    gamma: float
    power: float

    def __post_init__(self) -> None:
        super().__post_init__()
        _number(self, "gamma", 0, "0 or more")
        _number(self, "power")

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * (1 + self.gamma * iteration) ** -self.power)


class MultiStep(RatePolicy, frozen=True, tag="multistep", kw_only=True):
    """`base_rate * gamma ^ (how many of `steps` the iteration has reached)`."""

    gamma: float
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        _number(self, "gamma")
        _steps(self)
        _demand(self, "steps", "in rising order", list(self.steps) == sorted(self.steps))

    def rate(self, iteration: int) -> float:
        return float(self.base_rate * self.gamma ** bisect_right(self.steps, iteration))


class Poly(RatePolicy, frozen=True, tag="poly", kw_only=True):
    """`base_rate * (1 - iteration / max_iteration) ^ power`, and 0 from `max_iteration` on."""

    power: float
    max_iteration: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole(self, "max_iteration")
        _demand(self, "max_iteration", "1 or more", self.max_iteration >= 1)
        _number(self, "power", 0, "0 or more")

    def rate(self, iteration: int) -> float:
        # Late pushes may take the iteration past the end, where the base would be negative.
        if iteration >= self.max_iteration:
            return 0.0
        return float(self.base_rate * (1 - iteration / self.max_iteration) ** self.power)


class Sigmoid(RatePolicy, frozen=True, tag="sigmoid", kw_only=True):
    """`base_rate / (1 + exp(-gamma * (iteration - step_size)))`."""

    gamma: float
    step_size: int

    def __post_init__(self) -> None:
        super().__post_init__()
        _number(self, "gamma")
        _whole(self, "step_size")

    def rate(self, iteration: int) -> float:
        exponent = -self.gamma * (iteration - self.step_size)
        if exponent > 700:  # exp would overflow, and the rate is already 0 in float32
            return 0.0
        return self.base_rate / (1 + exp(exponent))


Schedule = Fixed | Step | Exp | Inv | MultiStep | Poly | Sigmoid

SCHEDULES: dict[str, type[Schedule]] = {
    str(policy.__struct_config__.tag): policy for policy in get_args(Schedule)
}


def schedule_of(argument: str, value: object) -> Schedule:
    """A schedule, given as itself or as a fixed rate; raises BadInput."""
    if isinstance(value, RatePolicy):  # the project's, or defined by the user
        return cast(Schedule, value)
    if not isinstance(value, bool) and isinstance(value, Real | np.floating):
        rate = argument_checks.number(
            argument, value, least=0, expected="a rate of 0 or more, and finite"
        )
        return Fixed(base_rate=rate)
    raise argument_checks.wrong(
        argument, "a rate or a schedule such as Fixed(base_rate=0.1)", value
    )


def _field(policy: RatePolicy, field: str) -> str:
    return f"learning-rate policy {policy.__struct_config__.tag}: {field}"


def _number(
    policy: RatePolicy,
    field: str,
    least: float = -argument_checks.LARGEST,
    expected: str = "a finite number",
) -> None:
    value = getattr(policy, field)
    plain = argument_checks.number(_field(policy, field), value, least=least, expected=expected)
    structs.force_setattr(policy, field, plain)


def _whole(policy: RatePolicy, field: str) -> None:
    plain = argument_checks.whole(_field(policy, field), getattr(policy, field))
    structs.force_setattr(policy, field, plain)


def _steps(policy: MultiStep) -> None:
    argument, steps = _field(policy, "steps"), policy.steps
    listed = argument_checks.items(argument, steps, "a list of whole numbers")
    structs.force_setattr(
        policy, "steps", tuple(argument_checks.whole(argument, step) for step in listed)
    )


def _demand(policy: RatePolicy, field: str, expected: str, holds: bool) -> None:
    if not holds:
        raise BadInput(_field(policy, field), expected=expected, got=getattr(policy, field))
