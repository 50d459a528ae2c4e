"""Mean-variance normalisation of rows in kernels, see `mvn.cu`."""

from cupy_kernels.launch import launch
from cupy_kernels.ops.reduction.gpu import sum_rows
from cupy_kernels.ops.reduction.spec import Term
from cupy_kernels.types import Array, Kept
from cupy_kernels.workspace import Workspace


def forward(x: Array, epsilon: float | None, work: Workspace) -> tuple[Array, Kept]:
    y = work.take("y", x.shape, x)
    _normalise(x, _mean(x, None, "mean", work), None, 0.0, y)
    if epsilon is None:
        return y, ()
    variance = _mean(y, None, "variance", work, Term.SQUARES)
    _normalise(y, None, variance, epsilon, y)
    return y, (y, variance)


def backward(dy: Array, saved: Kept, epsilon: float | None, work: Workspace) -> Array:
    dx, mean = work.take("dx", dy.shape, dy), _mean(dy, None, "mean", work)
    if epsilon is None:
        _normalise(dy, mean, None, 0.0, dx)
        return dx
    y, variance = saved
    rows, width = dy.shape
    launch(
        "mvn_backward",
        dy=dy,
        y=y,
        mean=mean,
        inner=_mean(dy, y, "inner", work),
        variance=variance,
        dx=dx,
        epsilon=epsilon,
        rows=rows,
        width=width,
    )
    return dx


def _normalise(
    x: Array, mean: Array | None, variance: Array | None, epsilon: float, y: Array
) -> None:
    sizes = dict(zip(("rows", "width"), x.shape, strict=True))
    launch("mvn_forward", x=x, mean=mean, variance=variance, y=y, epsilon=epsilon, **sizes)


def _mean(a: Array, b: Array | None, role: str, work: Workspace, term: Term = Term.VALUES) -> Array:
    """Each row's mean of a, of its squares, or of a * b, in memory of this role."""
    out = work.take(role, a.shape[:1], a)
    sum_rows(a, b, out, work, term, 1 / a.shape[1])
    return out
