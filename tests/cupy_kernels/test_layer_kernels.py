"""What the kernels of layers promise beyond their float64 references."""

from typing import Any

import numpy as np
import pytest

from cupy_kernels import pooling
from cupy_kernels.emulator import Emulator
from cupy_kernels.launch import launch
from cupy_kernels.pooling import Pooling
from cupy_kernels.types import AnyArray, Array
from cupy_kernels.workspace import Workspace
from tests.cupy_kernels.cases.pooling import pairs

pytestmark = pytest.mark.usefixtures("emulated")


def max_pool(x: Array, shape: Pooling) -> tuple[Array, AnyArray, dict[str, Any]]:
    """y and `where` of x (n, h, w, c), and the numbers that say the pooling."""
    n, h, w, c = x.shape
    oh, ow = shape.output(h, w)
    numbers = {"n": n, "h": h, "w": w, "c": c, "oh": oh, "ow": ow, **pairs(shape)}
    y = np.empty((n, oh, ow, c), np.float32)
    where = np.empty(y.shape, np.uint8)
    launch("max_pool_forward", engine=Emulator(), x=x, y=y, where=where, **numbers)
    return y, where, numbers


def test_a_window_past_the_image_holds_nothing() -> None:
    """Without padding Caffe may add such a window: -infinity, and no gradient from it."""
    x = np.ones((1, 6, 6, 4), np.float32)
    y, where, numbers = max_pool(x, Pooling((2, 2), (3, 3)))
    assert y.shape == (1, 3, 3, 4)
    assert (y[:, :2, :2] == 1).all()
    assert (y[:, 2] == -np.inf).all()
    dx = np.empty_like(x)
    launch(
        "max_pool_backward", engine=Emulator(), dy=np.ones_like(y), where=where, dx=dx, **numbers
    )
    assert dx.sum() == 4 * 4


@pytest.mark.parametrize("c", [3, 4])
def test_nan_in_a_window_is_its_maximum(c: int) -> None:
    """A NaN is never dropped, wherever in the window it stands, as on the CPU."""
    x = np.random.default_rng(c).standard_normal((1, 6, 6, c), np.float32)
    x[0, 0, 0], x[0, 3, 3], x[0, 4, 5] = np.nan, np.nan, np.nan
    shape = Pooling((3, 3), (1, 1))
    y, _, _ = max_pool(x, shape)
    twin, _ = pooling.max_forward(x, shape, Workspace())
    np.testing.assert_array_equal(y, twin)
    assert np.isnan(y).any()
    assert not np.isnan(y).all()
