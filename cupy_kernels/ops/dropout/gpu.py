"""Dropout in kernels: no mask is stored, the backward pass draws it again."""

from typing import Any

import numpy as np

from cupy_kernels import backends
from cupy_kernels.launch import launch
from cupy_kernels.ops.dropout.rng_keys import WORD, RngKey, limit
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def forward(x: Array, ratio: float, draw: RngKey, work: Workspace) -> tuple[Array, Kept]:
    saved: dict[str, Any] = {
        **random_key(x, draw, work),
        "limit": limit(ratio),
        "scale": 1.0 / (1.0 - ratio),
        "n": x.size,
    }
    y = work.take("y", x.shape, x)
    launch("dropout_apply", x=x, y=y, **saved)
    return y, (saved,)


def backward(dy: Array, saved: Kept, work: Workspace) -> Array:
    dx = work.take("dx", dy.shape, dy)
    launch("dropout_apply", x=dy, y=dx, **saved[0])
    return dx


def random_key(x: Array, draw: RngKey, work: Workspace) -> dict[str, Any]:
    """A kernel's arguments for a draw; the step's number is copied to the device of x."""
    step = draw.step
    if isinstance(step, int):
        device_step = work.take_as("step", (1,), np.uint64, x)
        backends.copy(np.array([step % WORD**2], np.uint64), device_step)
        step = device_step
    return {"step": step, "seed": draw.seed % WORD**2, "layer": draw.layer % WORD}
