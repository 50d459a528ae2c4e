"""What the kernels of layers promise beyond their float64 references."""

from typing import Any

import numpy as np
import pytest

from cupy_kernels import sources
from cupy_kernels.backends import EmulatorBackend, as_host, copy_to
from cupy_kernels.emulator import Emulator
from cupy_kernels.kernel_spec import Kernel, one_block, reads, writes
from cupy_kernels.launch import launch
from cupy_kernels.ops import dropout, pooling
from cupy_kernels.ops.dropout import cpu
from cupy_kernels.ops.dropout import spec as rows_of_dropout
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.ops.pooling.window import Pooling
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


PUBLISHED = (  # from the known-answer file of Random123, the authors' own library
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


@pytest.mark.parametrize(("counter", "key", "words"), PUBLISHED)
def test_philox_gives_the_published_words(
    counter: tuple[int, int, int, int], key: tuple[int, int], words: tuple[int, ...]
) -> None:
    """The CUDA function, the CPU's and the reference give the authors' words, ten rounds each."""
    assert tuple(cpu.philox(counter, key).tolist()) == words
    assert rows_of_dropout.philox(counter, key) == words
    source = sources.expand(KNOWN_ANSWER)
    row = Kernel(
        "known_answer",
        "known_answer.cu",
        (reads("counter", "4", "u4"), reads("key", "2", "u4"), writes("words", "4", "u4")),
        one_block(32),
        lambda **_: {"words": words},
        bytes_each=1,
    )
    found = np.zeros(4, np.uint32)
    launch(
        row,
        engine=Emulator(source=source),
        counter=np.array(counter, np.uint32),
        key=np.array(key, np.uint32),
        words=found,
    )
    assert tuple(found.tolist()) == words


KNOWN_ANSWER = """
#include "philox.cuh"
extern "C" __global__ void known_answer(const u32* counter, const u32* key, u32* words) {
  if (first_index() > 0) return;
  Words found = philox({counter[0], counter[1], counter[2], counter[3]}, key[0], key[1]);
  for (int k = 0; k < 4; ++k) words[k] = found.w[k];
}
"""


@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("counted", [False, True])
def test_both_backends_drop_the_same_elements(ratio: float, counted: bool) -> None:
    """Bit for bit, both ways, for odd sizes and large numbers, with the step here or there."""
    there = EmulatorBackend(Emulator())
    step = 2**33 + 1
    draw = RngKey(2**63 + 5, step, 2**40 + 0xDEADBEEF)
    x, dy = np.random.default_rng(3).standard_normal((2, 9001), np.float32)
    y, kept = dropout.forward(x, ratio, draw, Workspace())
    dx = dropout.backward(dy, kept, Workspace())
    if counted:
        draw = draw._replace(step=copy_to(np.array([step], np.uint64), there))
    emulated_y, kept = dropout.forward(copy_to(x, there), ratio, draw, Workspace())
    emulated_dx = dropout.backward(copy_to(dy, there), kept, Workspace())
    np.testing.assert_array_equal(as_host(emulated_y), y)
    np.testing.assert_array_equal(as_host(emulated_dx), dx)
    assert abs((y == 0).mean() - ratio) < 0.02
