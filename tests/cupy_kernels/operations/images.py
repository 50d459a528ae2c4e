"""Operations on images: convolution, pooling, local response normalisation, memory orders."""

from typing import Any

import numpy as np

from cupy_kernels.ops import convolution, image_layout, lrn, pooling
from cupy_kernels.ops.convolution import reference as convolution_reference
from cupy_kernels.ops.convolution.window import Convolution
from cupy_kernels.ops.dropout.rng_keys import RngKey
from cupy_kernels.ops.lrn.window import Lrn
from cupy_kernels.ops.pooling import reference as pooling_reference
from cupy_kernels.ops.pooling.window import Pooling
from cupy_kernels.registry import KERNELS
from tests.cupy_kernels.cases.pooling import pairs
from tests.cupy_kernels.operations import (
    Operation,
    Results,
    There,
    Works,
    draw,
    first,
    last,
    unwritten,
    wide,
)

CONVOLUTIONS = (
    (Convolution((5, 5)), (2, 9, 8, 1), 5),
    (Convolution((3, 2), (2, 1), (1, 1)), (1, 7, 6, 4), 6),
    (Convolution((3, 3), (1, 1), (2, 2), (2, 2), 2), (2, 6, 7, 6), 4),
    (Convolution((1, 1)), (9, 9, 9, 3), 4),  # enough pixels for the sum to be cut
)
POOLINGS = (
    (Pooling((2, 2), (2, 2)), (2, 6, 4, 5)),
    (Pooling((3, 2), (2, 2), (1, 0)), (1, 7, 6, 4)),
    (Pooling((17, 17)), (2, 17, 18, 3)),  # a maximum's place needs two bytes
)


def operations(dice: np.random.Generator) -> list[Operation]:
    return [
        *(convolve(dice, *numbers) for numbers in CONVOLUTIONS),
        *(pool_max(dice, *numbers) for numbers in POOLINGS),
        *(pool_average(dice, *numbers) for numbers in POOLINGS),
        *(pool_stochastic(dice, *numbers) for numbers in POOLINGS if not any(numbers[0].pad)),
        *(normalise(dice, rule) for rule in (Lrn(5, 0.3), Lrn(3, 0.5, 0.6, 2.0))),
        turn(dice),
    ]


def convolve(
    dice: np.random.Generator, shape: Convolution, size: tuple[int, ...], outputs: int
) -> Operation:
    n, h, w, c = size
    x, weight = draw(dice, *size), draw(dice, outputs, c // shape.group, *shape.kernel)
    bias, dy = draw(dice, outputs), draw(dice, n, *shape.output(h, w), outputs)
    rules = (shape.stride, shape.pad, shape.dilation, shape.group)
    wide_x, wide_weight, wide_dy = wide(first(x)), wide(weight), wide(first(dy))
    y = last(convolution_reference.convolution(wide_x, wide_weight, wide(bias), *rules))
    dx, dw, db = convolution_reference.convolution_backward(wide_dy, wide_x, wide_weight, *rules)

    def run(there: There, works: Works) -> Results:
        a, b, gradient = there(x), there(weight), there(dy)
        y, kept = convolution.forward(a, b, there(bias), shape, works["a"])
        dw, db = there(unwritten(weight)), there(unwritten(bias))
        dx = convolution.backward(
            gradient, kept, a.shape, b, dw, db, shape, works["a"], needs_dx=True
        )
        turned = convolution.transpose(gradient, size, b, shape, works["t"])
        cut, _ = convolution.forward(a, b, None, shape, works["b"], relu=True)
        return {"y": y, "dx": dx, "dw": dw, "db": db, "relu": cut, "transposed": turned}

    found = {"y": y, "dx": last(dx), "dw": dw, "db": db, "relu": np.maximum(y - bias, 0)}
    found["transposed"] = found["dx"]
    return Operation(f"convolution {shape.kernel}", run, found, 2e-5, 1e-4)


def pool_max(dice: np.random.Generator, shape: Pooling, size: tuple[int, ...]) -> Operation:
    x, y, dy, dx = _pooled(dice, "max", shape, size)

    def run(there: There, works: Works) -> Results:
        y, kept = pooling.max_forward(there(x), shape, works["a"])
        return {"y": y, "dx": pooling.max_backward(there(dy), kept, size, shape, works["a"])}

    return Operation(f"max pooling {shape.kernel}", run, {"y": y, "dx": dx})


def pool_average(dice: np.random.Generator, shape: Pooling, size: tuple[int, ...]) -> Operation:
    x, y, dy, dx = _pooled(dice, "average", shape, size)

    def run(there: There, works: Works) -> Results:
        y = pooling.average_forward(there(x), shape, works["a"])
        return {"y": y, "dx": pooling.average_backward(there(dy), size, shape, works["a"])}

    return Operation(f"average pooling {shape.kernel}", run, {"y": y, "dx": dx})


def pool_stochastic(dice: np.random.Generator, shape: Pooling, size: tuple[int, ...]) -> Operation:
    x, key = dice.integers(0, 4, size).astype(np.float32), RngKey(2**40 + 3, 2**35, 77)
    n, h, w, c = size
    oh, ow = shape.output(h, w)
    numbers = {"n": n, "h": h, "w": w, "c": c, "oh": oh, "ow": ow, **pairs(shape)}
    moment: dict[str, Any] = {"step": [key.step], "seed": key.seed, "layer": key.layer}
    drawn = KERNELS["stochastic_pool_forward"].reference(x=wide(x), **moment, **numbers)
    dy = draw(dice, n, oh, ow, c)
    back = KERNELS["max_pool_backward_wide"].reference(dy=wide(dy), where=drawn["where"], **numbers)

    def run(there: There, works: Works) -> Results:
        y, kept = pooling.stochastic_forward(there(x), shape, key, works["a"])
        return {"y": y, "dx": pooling.stochastic_backward(there(dy), kept, size, shape, works["a"])}

    return Operation(f"stochastic pooling {shape.kernel}", run, {"y": drawn["y"], "dx": back["dx"]})


def _pooled(dice: np.random.Generator, mode: str, shape: Pooling, size: tuple[int, ...]) -> Any:
    """x with many ties, y, dy and dx."""
    x = dice.integers(-2, 3, size).astype(np.float32)
    y, share = pooling_reference.pooling(
        wide(first(x)), mode, shape.kernel, shape.stride, shape.pad, shape.round_up
    )
    dy = draw(dice, *last(y).shape)
    return x, last(y), dy, last(pooling_reference.pooling_backward(wide(first(dy)), share))


def normalise(dice: np.random.Generator, rule: Lrn) -> Operation:
    x, dy = 2 * draw(dice, 2, 4, 5, 7), draw(dice, 2, 4, 5, 7)
    settings: dict[str, Any] = {"size": rule.size, "beta": rule.beta, "channels": 7}
    across = settings | {"share": rule.alpha / rule.size, "k": rule.k}
    within = settings | {"share": rule.alpha / rule.size**2, "n": 2, "h": 4, "w": 5}
    known = {"x": wide(x), "dy": wide(dy)}
    inside = KERNELS["lrn_within_forward"].reference(x=wide(x), **within)
    back = KERNELS["lrn_within_backward"].reference(scale=inside["scale"], **known, **within)
    expected = {
        "across": KERNELS["lrn_across_forward"].reference(x=wide(x), **across)["y"],
        "across_dx": KERNELS["lrn_across_backward"].reference(**known, **across)["dx"],
        "within": inside["y"],
        "within_dx": back["dx"],
    }

    def run(there: There, works: Works) -> Results:
        a, gradient = there(x), there(dy)
        y, scale = lrn.within(a, rule, works["b"])
        return {
            "across": lrn.across(a, rule, works["a"]),
            "across_dx": lrn.across_backward(gradient, a, rule, works["a"]),
            "within": y,
            "within_dx": lrn.within_backward(gradient, a, scale, rule, works["b"]),
        }

    shaped = {name: np.reshape(values, x.shape) for name, values in expected.items()}
    return Operation(f"lrn {rule.size}", run, shaped)


def turn(dice: np.random.Generator) -> Operation:
    x, pixels = draw(dice, 2, 3, 5, 7), dice.integers(0, 256, (2, 3, 5, 7), np.uint8)
    mean = np.array([100, 120, 7.5], np.float32)

    def run(there: There, works: Works) -> Results:
        a, roles = there(x), ("last", "image", "plain")
        found = {role: works["a"].take(role, (2, 5, 7, 3), a) for role in roles}
        image_layout.channels_last(a, found["last"])
        image_layout.images(there(pixels), there(mean), 0.125, found["image"])
        image_layout.images(a, None, 2.0, found["plain"])
        back = works["a"].take("first", x.shape, a)
        image_layout.channels_first(found["last"], back)
        strided = works["a"].take("strided", (2, 3, 7, 3), a)
        image_layout.channels_last(a[:, :, ::2], strided)
        return {**found, "first": back, "strided": strided}

    scaled = (wide(last(pixels)) - mean) * 0.125
    expected = {"last": last(x), "image": scaled, "plain": 2.0 * last(x), "first": x}
    return Operation("layout", run, {**expected, "strided": last(x[:, :, ::2])})
