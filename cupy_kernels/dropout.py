"""Inverted dropout, with a mask that a repeated step draws again.

Srivastava et al. 2014, "Dropout"; scaled by 1 / (1 - ratio) while training, so that nothing
remains to be done in test. The mask comes from a counter-based generator (Philox, Salmon et al.
2011) keyed by seed, step and layer: no generator state exists that a restart could lose.
"""

import numpy as np

from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace

_WORD = 2**64


def mask(
    shape: tuple[int, ...], ratio: float, *, seed: int, step: int, layer: int, work: Workspace
) -> Array:
    """0 with probability `ratio`, else 1 / (1 - ratio); `layer` is any number of its own."""
    key = np.array([seed % _WORD, layer % _WORD], np.uint64)
    counter = np.array([0, 0, 0, step % _WORD], np.uint64)
    draw = work.take("draw", shape)
    np.random.Generator(np.random.Philox(key=key, counter=counter)).random(
        out=draw, dtype=np.float32
    )
    kept = work.take_as("kept", shape, np.bool_)
    np.greater_equal(draw, np.float32(ratio), out=kept)
    scaled = work.take("mask", shape)
    np.multiply(kept, np.float32(1.0 / (1.0 - ratio)), out=scaled)
    return scaled


def apply(x: Array, scaled_mask: Array, work: Workspace, role: str = "y") -> Array:
    """x * mask: the forward pass, and with dy for x the backward pass (under another role)."""
    return np.multiply(x, scaled_mask, out=work.take(role, x.shape))
