"""Fillers draw what they say they draw, and draw it again."""

import re
from math import sqrt
from typing import Any

import numpy as np
import pytest

from shards.errors import BadInput
from worker.caffe import fillers
from worker.caffe.caffe_pb2 import FillerParameter

SHAPE = (40, 30, 5, 4)
FAN_IN, FAN_OUT = 30 * 5 * 4, 40 * 5 * 4


def filled(
    shape: tuple[int, ...] = SHAPE, seed: int = 7, name: str = "a/0", **settings: object
) -> fillers.Floats:
    tensor = np.full(shape, np.nan, np.float32)
    fillers.fill(tensor, name, FillerParameter(**settings), seed)  # type: ignore[arg-type]
    return tensor


def test_seed_and_name_decide_the_values() -> None:
    """The same twice for the same keys; another seed or name draws other values."""
    first = filled(type="gaussian")
    np.testing.assert_array_equal(first, filled(type="gaussian"))
    assert not np.array_equal(first, filled(type="gaussian", seed=8))
    assert not np.array_equal(first, filled(type="gaussian", name="a/1"))


def test_constant() -> None:
    """Zero unless a value is given."""
    assert not filled().any()
    np.testing.assert_array_equal(filled(type="constant", value=0.1), np.float32(0.1))


def test_uniform() -> None:
    """Within the bounds, and all over them."""
    values = filled(type="uniform", min=-2, max=3)
    assert -2 <= values.min() < -1.99
    assert 2.99 < values.max() <= 3
    assert abs(values.mean() - 0.5) < 5 * 5 / sqrt(12 * values.size)


def test_gaussian_and_its_sparsity() -> None:
    """Mean and deviation; with `sparse` the share that is kept is sparse / outputs."""
    values = filled(type="gaussian", mean=1, std=2)
    assert abs(values.mean() - 1) < 5 * 2 / sqrt(values.size)
    assert abs(values.std() / 2 - 1) < 0.02
    sparse = filled(type="gaussian", sparse=10)
    assert abs(np.mean(sparse != 0) - 10 / 40) < 0.02


@pytest.mark.parametrize(
    ("norm", "n"),
    [("FAN_IN", FAN_IN), ("FAN_OUT", FAN_OUT), ("AVERAGE", (FAN_IN + FAN_OUT) / 2)],
)
def test_xavier_and_msra_scale_with_the_fan(norm: str, n: float) -> None:
    """Xavier is uniform up to sqrt(3/n), msra normal with deviation sqrt(2/n)."""
    xavier = filled(type="xavier", variance_norm=norm)
    assert 0.99 * sqrt(3 / n) < np.abs(xavier).max() <= np.float32(sqrt(3 / n))
    assert abs(xavier.std() / sqrt(1 / n) - 1) < 0.02
    assert abs(filled(type="msra", variance_norm=norm).std() / sqrt(2 / n) - 1) < 0.02


def test_positive_unitball() -> None:
    """Each output's weights are positive and sum to one."""
    values = filled(type="positive_unitball").reshape(40, -1)
    assert values.min() >= 0
    np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("size", "line"), [(1, [1]), (3, [0.5, 1, 0.5]), (5, [1 / 3, 2 / 3, 1, 2 / 3, 1 / 3])]
)
def test_bilinear_of_an_odd_size_is_symmetric(size: int, line: list[float]) -> None:
    """As in Caffe 1.0, whose earlier versions shifted the image."""
    values = filled((1, 1, size, size), type="bilinear")
    np.testing.assert_allclose(values[0, 0], np.outer(line, line), rtol=1e-6)


@pytest.mark.parametrize("kind", sorted(set(fillers.FILLERS) - {"bilinear"}))
def test_a_tensor_without_axes_is_filled(kind: str) -> None:
    """Such as the only slope of a PReLU."""
    assert np.isfinite(filled((), type=kind, sparse=1))


@pytest.mark.parametrize(
    ("filler", "error"),
    [
        ({"type": "bilinear"}, "filler bilinear: expected a tensor of four axes, got (3, 2)"),
        ({"type": "uniform", "min": 2}, "filler uniform: expected a min of at most max, got 2 and"),
        ({"type": "gaussian", "std": -1}, "filler gaussian: expected a std of at least 0, got -1"),
    ],
)
def test_a_filler_that_does_not_fit(filler: dict[str, Any], error: str) -> None:
    """It is refused before anything is drawn."""
    with pytest.raises(BadInput, match=re.escape(f"here: {error}")):
        fillers.check(FillerParameter(**filler), (3, 2), "here")


def test_bilinear_interpolates() -> None:
    """The kernel of size 4 that doubles an image, the same for every channel."""
    line = np.array([0.25, 0.75, 0.75, 0.25])
    values = filled((3, 2, 4, 4), type="bilinear")
    np.testing.assert_allclose(values, np.broadcast_to(np.outer(line, line), (3, 2, 4, 4)))
