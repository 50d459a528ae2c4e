"""Learning-rate schedules against Caffe's formulas, worked out by hand."""

import math
from typing import Any

import msgspec
import pytest

from shards.errors import BadInput
from shards.schedules import (
    SCHEDULES,
    Exp,
    Fixed,
    Inv,
    MultiStep,
    Poly,
    Schedule,
    Sigmoid,
    Step,
)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Fixed(base_rate=0.1), {0: 0.1, 10**9: 0.1}),
        (
            Step(base_rate=0.1, gamma=0.5, step_size=2),
            {0: 0.1, 1: 0.1, 2: 0.05, 3: 0.05, 4: 0.025},
        ),
        (Exp(base_rate=0.1, gamma=0.8), {0: 0.1, 1: 0.08, 3: 0.0512}),
        (
            Inv(base_rate=0.01, gamma=0.0001, power=0.75),
            {0: 0.01, 500: 0.0096406879, 10_000: 0.0059460355},
        ),
        (
            MultiStep(base_rate=0.1, gamma=0.1, steps=(5, 8, 8)),
            {0: 0.1, 4: 0.1, 5: 0.01, 7: 0.01, 8: 1e-4, 100: 1e-4},
        ),
        (Poly(base_rate=0.2, power=2.0, max_iteration=10), {0: 0.2, 5: 0.05, 9: 0.002, 10: 0}),
        (Poly(base_rate=0.2, power=0.5, max_iteration=10), {10: 0, 11: 0}),
        (
            Sigmoid(base_rate=0.1, gamma=0.5, step_size=3),
            {3: 0.05, 0: 0.1 / (1 + math.exp(1.5)), 1000: 0.1},
        ),
        (Sigmoid(base_rate=0.1, gamma=-5.0, step_size=3), {1000: 0.0}),
    ],
)
def test_rates(schedule: Schedule, expected: dict[int, float]) -> None:
    """Each policy gives the rate that its formula says, at its steps and next to them."""
    for iteration, rate in expected.items():
        assert schedule.rate(iteration) == pytest.approx(rate, rel=1e-6), iteration


def test_a_policy_is_found_by_its_name_in_a_solver_file() -> None:
    """The registry's names are Caffe's, and msgspec reads a schedule by them."""
    assert sorted(SCHEDULES) == ["exp", "fixed", "inv", "multistep", "poly", "sigmoid", "step"]
    wanted = Step(base_rate=0.1, gamma=0.5, step_size=2)
    plain = {"policy": "step", "base_rate": 0.1, "gamma": 0.5, "step_size": 2}
    assert msgspec.to_builtins(wanted) == plain
    assert msgspec.convert(plain, Schedule) == wanted


@pytest.mark.parametrize(
    ("policy", "fields", "text"),
    [
        ("fixed", {"base_rate": -1.0}, "fixed: base_rate: expected 0 or more, and finite, got -1"),
        ("fixed", {"base_rate": math.nan}, "base_rate: expected 0 or more, and finite, got nan"),
        ("step", {"base_rate": 1.0, "gamma": 0.5, "step_size": 0}, "expected 1 or more, got 0"),
        ("inv", {"base_rate": 1.0, "gamma": -0.5, "power": 1.0}, "gamma: expected 0 or more"),
        ("multistep", {"base_rate": 1.0, "gamma": 0.5, "steps": (3, 2)}, "in rising order"),
        ("poly", {"base_rate": 1.0, "power": 1.0, "max_iteration": 0}, "max_iteration"),
        ("poly", {"base_rate": 1.0, "power": -1.0, "max_iteration": 9}, "power: expected 0"),
    ],
)
def test_a_senseless_policy_is_refused(policy: str, fields: dict[str, Any], text: str) -> None:
    """A policy that could give no rate, or a negative one, says which field is wrong."""
    with pytest.raises(BadInput, match=text):
        SCHEDULES[policy](**fields)
