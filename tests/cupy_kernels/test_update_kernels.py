"""The update kernels against the CPU's update loops: one answer, wherever a shard lives.

`updates` is called alike on both; where the arrays live decides what runs.
"""

import numpy as np
import pytest

from cupy_kernels.backends import EmulatorBackend, as_host, copy_to
from cupy_kernels.emulator import Emulator
from cupy_kernels.ops import updates
from cupy_kernels.ops.updates.spec import CONSTANTS
from cupy_kernels.registry import KERNELS
from tests.support.update_arguments import RULES, SLOTS, constants, normal, run_of

pytestmark = pytest.mark.usefixtures("emulated")

PLACE = EmulatorBackend(Emulator())


@pytest.mark.parametrize("l1", [False, True])
@pytest.mark.parametrize("rule", RULES)
def test_kernels_and_loops_give_the_same_bits(rule: str, l1: bool) -> None:
    """Three updates of two runs with rates and decays of their own: no bit differs."""
    size, cut = 640, 256
    bounds = np.array([[0, cut], [cut, size]], np.int64)
    rates, decays = np.array([[0.1, 0.2], [0.02, 0.01]], np.float32)
    runs = updates.Runs(bounds, rates, decays, l1)
    weights = normal(size, 1)
    slots = tuple(np.zeros(size, np.float32) for _ in range(SLOTS.get(rule, 1)))
    there, state = copy_to(weights, PLACE), tuple(copy_to(slot, PLACE) for slot in slots)
    for turn in range(3):
        gradient, out = normal(size, 10 + turn), np.empty(size, np.float32)
        written = PLACE.empty((size,), np.float32)
        updates.apply(rule, weights, gradient, slots, out, runs, constants(rule))
        updates.apply(rule, there, copy_to(gradient, PLACE), state, written, runs, constants(rule))
        weights, there = out, written
    assert as_host(there).tobytes() == weights.tobytes()
    assert [as_host(a).tobytes() for a in state] == [a.tobytes() for a in slots]


def test_what_lies_between_runs_keeps_its_zeros() -> None:
    """A run that ends within a chunk, chunks of no run at all, and a last one that is not whole."""
    size = 70 + 64 * 3
    runs = run_of(size)._replace(bounds=np.array([[64, 100]], np.int64))
    weights, gradient = np.zeros((2, size), np.float32)
    weights[:100], gradient[64:100] = 1, 1
    slots = (PLACE.empty((size,), np.float32),)
    slots[0].fill(0)
    there, out = copy_to(weights, PLACE), PLACE.empty((size,), np.float32)
    updates.apply(
        "momentum", there, copy_to(gradient, PLACE), slots, out, runs, constants("momentum")
    )
    expected = weights.copy()
    expected[64:100] -= np.float32(0.1)
    np.testing.assert_array_equal(as_host(out), expected)
    assert set(np.flatnonzero(as_host(slots[0]))) == set(range(64, 100))


@pytest.mark.parametrize("size", [1, 63, 64, 1000, 40_000])
def test_norms_agree(size: int) -> None:
    """But for the last bits; and a value that is none, or has no square, is never lost."""
    values = normal(size, size)
    expected = updates.squared_norm(values)
    assert updates.squared_norm(copy_to(values, PLACE)) == pytest.approx(expected, rel=1e-6)
    for bad in (np.nan, np.inf, 1e30):
        values[size // 2] = bad
        assert not np.isfinite(updates.squared_norm(copy_to(values, PLACE)))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_means_agree(count: int) -> None:
    """Added in the order given, then divided, as on the host: the same bits; inputs stay."""
    arrays = [normal(1001, seed) for seed in range(count)]
    there = [copy_to(array, PLACE) for array in arrays]
    expected = updates.mean(arrays)
    assert as_host(updates.mean(there)).tobytes() == expected.tobytes()
    assert as_host(there[0]).tobytes() == arrays[0].tobytes() == normal(1001, 0).tobytes()


def test_runs_that_no_kernel_can_tell_apart() -> None:
    """A run that starts within a chunk of 64 would share it with its neighbour."""
    arrays = [PLACE.empty((640,), np.float32) for _ in range(3)]
    runs = run_of(640)._replace(bounds=np.array([[32, 640]], np.int64))
    line = "expected at most 65535 runs that start at multiples of 64"
    with pytest.raises(ValueError, match=line):
        updates.apply("sgd", arrays[0], arrays[1], (), arrays[2], runs, ())


def test_every_constant_has_its_place() -> None:
    """Each rule of the loops has a kernel, and as many fields of Hyper as constants."""
    assert sorted(CONSTANTS) == RULES
    for rule, fields in CONSTANTS.items():
        assert f"update_{rule}" in KERNELS
        assert len(fields) == len(constants(rule))
