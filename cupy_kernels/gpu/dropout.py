"""Dropout in kernels: no mask is stored, the backward pass draws it again."""

from typing import Any

import numpy as np

from cupy_kernels import backends
from cupy_kernels.launch import launch
from cupy_kernels.rng_keys import WORD, RngKey, limit
from cupy_kernels.types import AnyArray, Array, Kept
from cupy_kernels.workspace import Workspace


def forward(x: Array, ratio: float, draw: RngKey, work: Workspace) -> tuple[Array, Kept]:
    kept: dict[str, Any] = {
        "step": _step(x, draw, work),
        "seed": draw.seed % WORD**2,
        "layer": draw.layer % WORD,
        "limit": limit(ratio),
        "scale": 1.0 / (1.0 - ratio),
        "n": x.size,
    }
    y = work.take("y", x.shape, x)
    launch("dropout_apply", x=x, y=y, **kept)
    return y, (kept,)


def backward(dy: Array, kept: Kept, work: Workspace) -> Array:
    dx = work.take("dx", dy.shape, dy)
    launch("dropout_apply", x=dy, y=dx, **kept[0])
    return dx


def _step(x: Array, draw: RngKey, work: Workspace) -> AnyArray:
    """The step number in device memory; copied there, unless it is there already."""
    if not isinstance(draw.step, int):
        return draw.step
    step = work.take_as("step", (1,), np.uint64, x)
    backends.copy(np.array([draw.step % WORD**2], np.uint64), step)
    return step
