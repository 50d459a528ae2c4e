"""Cases of `lrn.cu`, `batch_norm.cu` and `mvn.cu`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.ops.reduction.column_sums_spec import chunks
from tests.support.kernel_check import Case

ACROSS = ((0, 4, 5), (3, 1, 3), (7, 10, 5), (50, 96, 5), (3, 1, 5), (6, 8, 3), (2, 1500, 3))
WITHIN = ((0, 2, 2, 2, 3), (2, 5, 4, 3, 3), (1, 3, 7, 2, 5))
MATRICES = ((1, 3), (6, 40), (133, 5), (70, 64))


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(71)
    for pixels, channels, size in ACROSS:
        for beta, k in ((0.75, 1.0), (0.6, 2.0)):
            yield from across(generator, pixels, channels, size, beta, k)
    for n, h, w, channels, size in WITHIN:
        yield from within(generator, n, h, w, channels, size)
    for rows, channels in MATRICES:
        yield from batch_norm(generator, rows, channels)
        yield from mvn(generator, rows, channels)


def across(generator: Any, pixels: int, channels: int, *numbers: Any) -> Iterator[Case]:
    size, beta, k = numbers
    x, dy = (3 * generator.standard_normal(pixels * channels, np.float32) for _ in range(2))
    settings = {"size": size, "share": 0.5 / size, "beta": beta, "k": k}
    shape = {"pixels": pixels, "channels": channels}
    yield Case("lrn_across_forward", {"x": x, "y": x, **shape, **settings} | {"y": dy})
    backward = {"dy": dy, "x": x, "dx": np.empty_like(x), **shape, **settings}
    yield Case("lrn_across_backward", backward, grid=(1, 1, 1))


def within(generator: Any, n: int, h: int, w: int, channels: int, size: int) -> Iterator[Case]:
    x, dy = 3 * generator.standard_normal((2, n * h * w * channels), np.float32)
    scale = 1 + generator.random(x.size, np.float32)
    shape = {"n": n, "h": h, "w": w, "channels": channels}
    numbers = {**shape, "size": size, "share": 0.4 / size**2, "beta": 0.75}
    yield Case("lrn_within_forward", {"x": x, "scale": scale, "y": dy, **numbers})
    yield Case(
        "lrn_within_backward", {"dy": dy, "x": x, "scale": scale, "dx": dy.copy(), **numbers}
    )


def batch_norm(generator: Any, rows: int, channels: int) -> Iterator[Case]:
    x, dy = generator.standard_normal((2, rows * channels), np.float32)
    x = 2 * x + 3
    mean, shift, scale, one, other = generator.standard_normal((5, channels), np.float32)
    deviate = 0.5 + generator.random(channels, np.float32)
    partials = np.empty(2 * chunks(rows) * channels, np.float32)
    shape = {"rows": rows, "channels": channels}
    known = {"mean": mean, "deviate": deviate, **shape}
    yield Case("batch_norm_moments", {"x": x, "partials": partials, **shape})
    yield Case("batch_norm_gradients", {"dy": dy, "x": x, "partials": partials, **known})
    for a, b in ((None, None), (scale, shift)):
        yield Case("batch_norm_forward", {"x": x, "scale": a, "shift": b, "y": x, **known})
        sums = {"shift_sum": one, "scale_sum": other}
        yield Case("batch_norm_backward", {"dy": dy, "x": x, "scale": a, "dx": dy, **sums, **known})
    yield from statistics(generator, rows, channels)


def statistics(generator: Any, rows: int, channels: int) -> Iterator[Case]:
    x, mean, variance, out, more = 1 + generator.random((5, channels), np.float32)
    count = chunks(rows)
    sums = generator.standard_normal((count, channels), np.float32)
    squares = rows * (2 + generator.random((count, channels), np.float32)) / count
    partials = np.concatenate([sums, squares.astype(np.float32)]).reshape(-1)
    blobs = {"running_mean": mean, "running_variance": variance}
    numbers = {"fraction": 0.999, "epsilon": 1e-5, "rows": rows, "chunks": count}
    given = {"x": x, "partials": partials, "mean": out, "deviate": more, "channels": channels}
    for factor in (0.0, 2.5):
        running = {**blobs, "running_factor": np.array([factor], np.float32)}
        yield Case("batch_norm_statistics", {**given, **running, **numbers})
        test = {"mean": out, "deviate": more, "epsilon": 1e-5, "channels": channels}
        yield Case("batch_norm_running", {**running, **test})
    nothing = dict.fromkeys(("running_mean", "running_variance", "running_factor"))
    yield Case("batch_norm_statistics", {**given, **nothing, **numbers}, label="no blobs")


def mvn(generator: Any, rows: int, width: int) -> Iterator[Case]:
    """With and without a mean and a variance; a row without variance."""
    x, dy = generator.standard_normal((2, rows * width), np.float32)
    mean, inner, variance = generator.random((3, rows), np.float32)
    variance[0], x[:width] = 0, 0
    shape = {"epsilon": 0.01, "rows": rows, "width": width}
    for a, b in ((mean, None), (None, variance), (mean, variance)):
        yield Case("mvn_forward", {"x": x, "mean": a, "variance": b, "y": x, **shape})
    known = {"mean": mean, "inner": inner, "variance": variance}
    yield Case("mvn_backward", {"dy": dy, "y": x, **known, "dx": dy, **shape}, grid=(1, 1, 1))
