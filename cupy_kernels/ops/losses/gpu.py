"""Losses other than that of softmax, in kernels, see `losses.cu`."""

from typing import Any

import numpy as np

from cupy_kernels.launch import launch
from cupy_kernels.ops.losses.spec import ClassRule
from cupy_kernels.ops.reduction.gpu import sum_rows
from cupy_kernels.ops.softmax.gpu import (
    fill_scale,
    loss_scale,
    number_of_ignored,
    sum_scaled,
    whole_labels,
)
from cupy_kernels.types import AnyArray, Array, Labels
from cupy_kernels.workspace import Workspace


def by_class(x: Array, labels: Labels, rule: ClassRule, work: Workspace) -> tuple[AnyArray, Array]:
    rows, k = x.shape
    losses, dx = work.take("losses", (1, rows), x), work.take("dx", x.shape, x)
    arrays: dict[str, Any] = {"x": x, "labels": labels, "losses": losses, "dx": dx}
    launch("class_loss", **arrays, rule=int(rule), factor=1 / rows, rows=rows, k=k)
    return _total(losses, 1 / rows, work), dx


def infogain(
    p: Array,
    labels: Labels,
    matrix: Array,
    ignored: int | None,
    divisor: float | None,
    work: Workspace,
) -> tuple[AnyArray, Array]:
    rows, k = p.shape
    losses, dx = work.take("losses", (rows,), p), work.take("dx", p.shape, p)
    scale = loss_scale(labels, ignored, divisor, p, work)
    launch(
        "infogain_loss",
        p=p,
        labels=labels,
        matrix=matrix,
        scale=scale,
        losses=losses,
        dx=dx,
        ignored=number_of_ignored(ignored),
        rows=rows,
        k=k,
    )
    return sum_scaled(losses, scale, work), dx


def sigmoid_cross_entropy(
    x: Array, targets: Array, ignored: int | None, divisor: float | None, work: Workspace
) -> tuple[AnyArray, Array, Array]:
    losses, dx = (work.take(role, x.shape, x) for role in ("losses", "dx"))
    if divisor is None and ignored is not None:
        labels = whole_labels(targets.reshape(-1), 2, ignored, work)
        scale = loss_scale(labels, ignored, None, x, work)
    else:
        scale = fill_scale(x.size if divisor is None else divisor, x, work)
    launch(
        "sigmoid_loss",
        x=x,
        targets=targets,
        scale=scale,
        losses=losses,
        dx=dx,
        ignored=np.nan if ignored is None else float(ignored),
        n=x.size,
    )
    return sum_scaled(losses, scale, work), losses, dx


def contrastive(
    a: Array, b: Array, similar: Array, margin: float, legacy: bool, work: Workspace
) -> tuple[AnyArray, Array]:
    rows, width = a.shape
    losses, da = work.take("losses", (1, rows), a), work.take("da", a.shape, a)
    launch(
        "contrastive_loss",
        a=a,
        b=b,
        similar=similar,
        losses=losses,
        da=da,
        margin=margin,
        legacy=int(legacy),
        factor=1 / rows,
        rows=rows,
        width=width,
    )
    return _total(losses, 0.5 / rows, work), da


def _total(losses: Array, factor: float, work: Workspace) -> AnyArray:
    """The sum of a row of losses times a factor, without axes."""
    total = work.take("total", (1,), losses)
    sum_rows(losses, None, total, work, factor=factor)
    return total.reshape(())
