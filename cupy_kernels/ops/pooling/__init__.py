"""Max, average and stochastic pooling with Caffe's rules for the border.

The output size is rounded up (or down, on request). With padding on any side, a last window that
would start past the image (at or past size + pad, counted from the padding's edge) is dropped. A
maximum is taken over the window clipped to the image. An average is the sum over the window clipped
to the image, divided by the size of the window clipped to the image *with* its padding.

The forward pass of the maximum records the position of each maximum; among equal values the first
in reading order wins. The backward pass adds each gradient at that position.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.ops.pooling import cpu, gpu
from cupy_kernels.ops.pooling.window import Pooling
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def max_forward(x: Array, shape: Pooling, work: Workspace) -> tuple[Array, Kept]:
    """Returns y (n, oh, ow, c) for x (n, h, w, c), and the positions for `max_backward`."""
    return pick(x, cpu.max_forward, gpu.max_forward)(x, shape, work)


def max_backward(
    dy: Array, where: Kept, x_shape: tuple[int, ...], shape: Pooling, work: Workspace
) -> Array:
    """dx (n, h, w, c): each gradient is added at the position of its maximum."""
    body = pick(dy, cpu.max_backward, gpu.max_backward)
    return body(dy, where, x_shape, shape, work)


def average_forward(x: Array, shape: Pooling, work: Workspace) -> Array:
    """Returns y (n, oh, ow, c) for x (n, h, w, c)."""
    return pick(x, cpu.average_forward, gpu.average_forward)(x, shape, work)


def average_backward(dy: Array, x_shape: tuple[int, ...], shape: Pooling, work: Workspace) -> Array:
    """dx (n, h, w, c): each gradient is spread evenly over its window."""
    body = pick(dy, cpu.average_backward, gpu.average_backward)
    return body(dy, x_shape, shape, work)


def stochastic_forward(
    x: Array, shape: Pooling, draw: RngKey, work: Workspace
) -> tuple[Array, Kept]:
    """Returns y (n, oh, ow, c) for x without negative values, and the places for the backward pass.

    One element of each window, with a probability proportional to its value (Zeiler and Fergus
    2013). Window i takes the word of element i in `draw` (see `dropout`), so both implementations
    draw the same elements. There is no padding.
    """
    return pick(x, cpu.stochastic_forward, gpu.stochastic_forward)(x, shape, draw, work)


def stochastic_backward(
    dy: Array, where: Kept, x_shape: tuple[int, ...], shape: Pooling, work: Workspace
) -> Array:
    """dx (n, h, w, c): each gradient is added at the drawn element."""
    body = pick(dy, cpu.stochastic_backward, gpu.stochastic_backward)
    return body(dy, where, x_shape, shape, work)
