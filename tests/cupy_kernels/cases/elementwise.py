"""Cases of `activation.cu` and `eltwise.cu`."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from cupy_kernels.ops.activation.spec import DERIVATIVE, FORWARD
from cupy_kernels.types import Array
from tests.support.kernel_check import Case

SIZES = (0, 1, 31, 257, 1000)

# Powers of a negative base and logarithms of negative numbers are NaN on both sides.
SETTINGS: dict[str, tuple[dict[str, float], ...]] = {
    "relu": ({"slope": 0.0}, {"slope": 0.1}),
    "elu": ({"alpha": 1.0}, {"alpha": 0.3}),
    "swish": ({"beta": 1.0}, {"beta": 2.0}),
    "power": (
        {"power": 1.0, "scale": 2.0, "shift": 1.0},
        {"power": 2.0, "scale": -1.5, "shift": 0.25},
        {"power": 0.0, "scale": 1.0, "shift": 3.0},
        {"power": 0.75, "scale": 0.5, "shift": 9.0},
        {"power": 3.0, "scale": 0.0, "shift": 2.0},
    ),
    "exp": ({"inner": 1.0, "outer": 0.0}, {"inner": 0.6931472, "outer": -0.5}),
    "log": ({"scale": 0.5, "shift": 9.0, "factor": 1.0}, {"scale": 1, "shift": 8, "factor": 0.4}),
    "clip": ({"low": -0.5, "high": 1.0},),
    "threshold": ({"limit": 0.25},),
}


def cases() -> Iterator[Case]:
    generator = np.random.default_rng(31)
    for n in SIZES:
        x, other = edgy(generator, n)
        for name in FORWARD:
            for values in SETTINGS.get(name, ({},)):
                yield Case(f"{name}_forward", {"x": x, "y": x, "n": n, **values}, grid=(2, 1, 1))
        for name, (seen, _) in DERIVATIVE.items():
            for values in SETTINGS.get(name, ({},)):
                yield backward(name, seen, x, other, values)
        yield from blobs(generator, n)


def edgy(generator: np.random.Generator, n: int) -> tuple[Array, Array]:
    """Two random arrays, the first with zeros, kinks and large values in it."""
    x, other = generator.standard_normal((2, n), np.float32)
    x[::7] = 0
    x[1::11] = -0.5
    x[2::13] *= 2
    return x, other


def backward(name: str, seen: str, x: Array, dy: Array, values: dict[str, float]) -> Case:
    values = {k: v for k, v in values.items() if (name, k) != ("exp", "outer")}
    with np.errstate(all="ignore"):
        found = (
            FORWARD[name](x.astype(np.float64), **values) if seen == "y" and name != "exp" else x
        )
    arguments = {"dy": dy, seen: np.asarray(found, np.float32), "dx": dy, "n": x.size}
    return Case(f"{name}_backward", arguments | values)


def blobs(generator: np.random.Generator, n: int) -> Iterator[Case]:
    x, dy = edgy(generator, n)
    y = np.where(np.arange(n) % 3, dy, x)
    for channels in (1, 3):
        slope = generator.random(channels, np.float32)
        shape: dict[str, Any] = {"slope": slope, "channels": channels, "n": n}
        yield Case("prelu_forward", {"x": x, "y": x, **shape})
        yield Case("prelu_backward", {"dy": dy, "x": x, "dx": x, **shape})
    yield Case("prelu_slope_terms", {"dy": dy, "x": x, "terms": x, "n": n})
    yield Case("add_scaled", {"x": x, "y": y, "a": 1.5, "b": -0.5, "n": n})
    fresh = np.full(n, np.nan, np.float32)
    yield Case("add_scaled", {"x": x, "y": fresh, "a": 2.0, "b": 0.0, "n": n}, label="fresh")
    yield Case("multiply", {"a": x, "b": y, "y": x, "n": n})
    yield Case("quotient", {"a": y, "b": x, "y": y, "n": n})
    came = generator.integers(0, 3, n).astype(np.uint8)
    yield Case("keep_larger", {"x": x, "y": y, "from": came, "number": 3, "n": n})
    holes, others = x.copy(), y.copy()
    holes[::3], others[1::4] = np.nan, np.nan
    arrays = {"x": holes, "y": others, "from": came}
    yield Case("keep_larger", {**arrays, "number": 3, "n": n}, label="NaN")
    arguments = {"dy": dy, "from": came, "dx": dy, "number": 2, "n": n}
    yield Case("keep_larger_backward", arguments)
