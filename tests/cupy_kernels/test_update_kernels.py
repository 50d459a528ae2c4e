"""The update kernels against the CPU's update loops: one answer, wherever a shard lives."""

from typing import Any

import numpy as np
import pytest

from cupy_kernels import updates
from cupy_kernels.emulator import Emulator
from cupy_kernels.launch import launch
from cupy_kernels.rows.updates import HYPER, MULTIPLIERS
from tests.cupy_kernels.test_updates import RULES, SLOTS, constants, normal

pytestmark = pytest.mark.usefixtures("emulated")

NAMES = {
    "momentum": ("keep",),
    "nesterov": ("keep", "take"),
    "adagrad": ("delta",),
    "rmsprop": ("keep", "take", "delta"),
    "adadelta": ("keep", "take", "delta"),
    "adam": ("keep", "take", "keep2", "take2", "delta"),
}
SLOT_NAMES = {
    "momentum": ("history",),
    "nesterov": ("history",),
    "adagrad": ("square_sum",),
    "rmsprop": ("square_mean",),
    "adadelta": ("square_mean", "step_mean"),
    "adam": ("mean", "square_mean"),
}


@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_and_loops_give_the_same_bits(rule: str, l1: bool) -> None:
    """Three updates of two groups with rates and decays of their own: no bit differs."""
    size, cut = 640, 256
    bounds = np.array([[0, cut], [cut, size]], np.int64)
    multipliers = np.array([(1, 1), (2, 0.5)], MULTIPLIERS)
    rate, decay = np.float32(0.1), np.float32(0.02)
    runs = updates.Runs(bounds, rate * multipliers["rate"], decay * multipliers["decay"], l1)
    hyper = np.zeros(1, HYPER)
    hyper["rate"], hyper["decay"], hyper["l1"] = rate, decay, l1
    for name, value in zip(NAMES.get(rule, ()), constants(rule), strict=True):
        hyper[name] = value
    groups = np.repeat(np.array([0, 1], np.uint16), [cut // 64, (size - cut) // 64])
    weights = normal(size, 1)
    slots = tuple(np.zeros(size, np.float32) for _ in range(SLOTS.get(rule, 1)))
    emulated, state = weights.copy(), tuple(slot.copy() for slot in slots)
    for turn in range(3):
        gradient, out = normal(size, 10 + turn), np.empty(size, np.float32)
        updates.apply(rule, weights, gradient, slots, out, runs, constants(rule))
        named: dict[str, Any] = dict(zip(SLOT_NAMES.get(rule, ()), state, strict=True))
        launch(
            f"update_{rule}",
            engine=Emulator(),
            w=emulated,
            g=gradient,
            out=emulated,
            groups=groups,
            multipliers=multipliers,
            hyper=hyper,
            verdict=None,
            n=size,
            **named,
        )
        weights = out
    assert emulated.tobytes() == weights.tobytes()
    assert [a.tobytes() for a in state] == [a.tobytes() for a in slots]
