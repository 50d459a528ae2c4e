"""Inverted dropout, with the same mask when a step is repeated.

Srivastava et al. 2014, "Dropout"; scaled by 1 / (1 - ratio) while training, so that a test needs no
scaling. The mask comes from a counter-based generator, Philox4x32-10 (Salmon et al. 2011), keyed by
seed, step and layer: there is no generator state that a restart could lose, and both
implementations draw the same mask.

Element i takes word i % 4 of philox(counter = (i / 4, step >> 32, step, layer), key = seed), and is
dropped where the word is below `limit(ratio)`.
"""

from cupy_kernels.backends import pick
from cupy_kernels.ops.dropout import cpu, gpu
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def forward(x: Array, ratio: float, draw: RngKey, work: Workspace) -> tuple[Array, Kept]:
    """x with each element dropped with probability `ratio`, and the values for `backward`."""
    return pick(x, cpu.forward, gpu.forward)(x, ratio, draw, work)


def backward(dy: Array, saved: Kept, work: Workspace) -> Array:
    """dy, dropped and scaled in the same way as x."""
    return pick(dy, cpu.backward, gpu.backward)(dy, saved, work)
