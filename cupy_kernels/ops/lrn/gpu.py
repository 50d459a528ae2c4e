"""Local response normalisation in kernels, see `lrn.cu`."""

from math import prod
from typing import Any

from cupy_kernels.launch import launch
from cupy_kernels.ops.lrn.window import Lrn
from cupy_kernels.types import Array
from cupy_kernels.workspace import Workspace


def across(x: Array, rule: Lrn, work: Workspace) -> Array:
    y = work.take("y", x.shape, x)
    launch("lrn_across_forward", x=x, y=y, **_across(x, rule))
    return y


def across_backward(dy: Array, x: Array, rule: Lrn, work: Workspace) -> Array:
    dx = work.take("dx", x.shape, dy)
    launch("lrn_across_backward", dy=dy, x=x, dx=dx, **_across(x, rule))
    return dx


def within(x: Array, rule: Lrn, work: Workspace) -> tuple[Array, Array]:
    y, scale = work.take("y", x.shape, x), work.take("scale", x.shape, x)
    launch("lrn_within_forward", x=x, scale=scale, y=y, **_within(x, rule))
    return y, scale


def within_backward(dy: Array, x: Array, scale: Array, rule: Lrn, work: Workspace) -> Array:
    dx = work.take("dx", x.shape, dy)
    launch("lrn_within_backward", dy=dy, x=x, scale=scale, dx=dx, **_within(x, rule))
    return dx


def _across(x: Array, rule: Lrn) -> dict[str, Any]:
    sizes = {"pixels": prod(x.shape[:-1]), "channels": x.shape[-1], "size": rule.size}
    return sizes | {"share": rule.alpha / rule.size, "beta": rule.beta, "k": rule.k}


def _within(x: Array, rule: Lrn) -> dict[str, Any]:
    sizes = dict(zip(("n", "h", "w", "channels"), x.shape, strict=True))
    share = rule.alpha / rule.size**2
    return sizes | {"size": rule.size, "share": share, "beta": rule.beta}
