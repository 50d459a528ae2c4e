"""Operations on blobs of any shape: activations, batch norm, scale, concatenation, eltwise, ids."""

from typing import Any

import numpy as np

from cupy_kernels.ops import activation, batch_norm, channels, dropout, eltwise, embedding
from cupy_kernels.ops.activation import functions as f
from cupy_kernels.ops.activation.spec import DERIVATIVE, FORWARD
from cupy_kernels.ops.batch_norm.running_statistics import RunningStatistics
from cupy_kernels.ops.dropout.rng_keys import RngKey, limit
from cupy_kernels.registry import KERNELS
from tests.cupy_kernels.operations import Operation, Results, There, Works, draw, unwritten, wide

FUNCTIONS: tuple[f.Function, ...] = (
    f.Relu(), f.Relu(0.1), f.Sigmoid(), f.Tanh(), f.Elu(0.5), f.Swish(1.5), f.Bnll(),
    f.Power(2, 0.5, -1), f.Power(1, 3, 2), f.Power(0, 1, 1), f.Exp(0.7, 0.2), f.Log(0.1, 3, 1.4),
    f.Abs(), f.Clip(-0.5, 0.75), f.Threshold(0.2),
)  # fmt: skip


def operations(dice: np.random.Generator) -> list[Operation]:
    return [
        *(activate(dice, function) for function in FUNCTIONS),
        *(prelu(dice, slopes) for slopes in (6, 1)),
        *(standardise(dice, *numbers) for numbers in ((70, 5, True), (6, 33, False))),
        scale(dice),
        *(join(dice, axis, sizes) for axis, sizes in ((3, (2, 5, 1)), (0, (3, 1)), (1, (1, 4)))),
        combine(dice),
        look_up(dice),
        drop(dice),
    ]


def activate(dice: np.random.Generator, function: f.Function) -> Operation:
    x, dy = 2 * draw(dice, 3, 5, 7), draw(dice, 3, 5, 7)
    x.flat[0] = 0.0
    name, settings = type(function).__name__.lower(), list(vars(function).values())
    y = wide(np.asarray(FORWARD[name](wide(x), *settings)))
    expected = {"y": y}
    if name in DERIVATIVE:
        seen, derivative = DERIVATIVE[name]
        fields = settings[:1] if name == "exp" else settings
        expected["dx"] = dy * derivative(y if seen == "y" else wide(x), *fields)

    def run(there: There, works: Works) -> Results:
        a = there(x)
        y = activation.forward(a, function, works["a"])
        if isinstance(function, f.Threshold):
            return {"y": y}
        return {"y": y, "dx": activation.backward(there(dy), a, y, function, works["a"])}

    return Operation(str(function), run, expected)


def prelu(dice: np.random.Generator, slopes: int) -> Operation:
    x, dy, slope = draw(dice, 2, 3, 6), draw(dice, 2, 3, 6), draw(dice, slopes)
    below = np.where(x > 0, 0, wide(dy) * x)

    def run(there: There, works: Works) -> Results:
        a, b, dslope = there(x), there(slope), there(unwritten(slope))
        y = activation.prelu(a, b, works["a"])
        dx = activation.prelu_backward(there(dy), a, b, dslope, works["a"])
        return {"y": y, "dx": dx, "dslope": dslope}

    expected = {
        "y": np.where(x > 0, x, slope * wide(x)),
        "dx": np.where(x > 0, dy, slope * wide(dy)),
        "dslope": below.reshape(-1, slopes).sum(axis=0),
    }
    return Operation(f"prelu {slopes}", run, expected)


def standardise(dice: np.random.Generator, rows: int, count: int, learnt: bool) -> Operation:
    x, dy = 3 + 2 * draw(dice, rows, count), draw(dice, rows, count)
    scale, shift, before = draw(dice, 3, count)
    ones, two = np.ones_like(before), np.full(1, 2.0, np.float32)

    def run(there: There, works: Works) -> Results:
        a, gradient = there(x), there(dy)
        factors, offsets = (there(scale), there(shift)) if learnt else (None, None)
        running = RunningStatistics(there(before), there(ones), there(two), 0.9)
        mean, deviate = batch_norm.statistics(a, 1e-5, running, works["a"])
        dscale, dshift = there(unwritten(scale)), there(unwritten(shift))
        y = batch_norm.forward(a, mean, deviate, factors, offsets, works["a"])
        dx = batch_norm.backward(gradient, a, mean, deviate, factors, dscale, dshift, works["a"])
        test_mean, test_deviate = batch_norm.running_statistics(running, 1e-5, works["b"])
        return {
            "mean": mean,
            "deviate": deviate,
            "y": y,
            "dx": dx,
            "dscale": dscale,
            "dshift": dshift,
            "running_mean": running.mean,
            "running_variance": running.variance,
            "test_mean": test_mean,
            "test_deviate": test_deviate,
        }

    expected = _standardised(wide(x), wide(dy), before, scale if learnt else 1, shift * learnt)
    return Operation(f"batch norm {rows}x{count}", run, expected, 2e-5, 5e-5)


def _standardised(x: Any, dy: Any, before: Any, scale: Any, shift: Any) -> Results:
    rows, mean, variance = len(x), x.mean(axis=0), x.var(axis=0)
    deviate = 1 / np.sqrt(variance + 1e-5)
    xhat = (x - mean) * deviate
    dshift, dscale = dy.sum(axis=0), (dy * xhat).sum(axis=0)
    kept = 0.9 * before + mean, 0.9 + variance * rows / (rows - 1)
    return {
        "mean": mean,
        "deviate": deviate,
        "y": xhat * scale + shift,
        "dx": scale * deviate * (dy - dshift / rows - xhat * dscale / rows),
        "dscale": dscale,
        "dshift": dshift,
        "running_mean": kept[0],
        "running_variance": kept[1],
        "test_mean": kept[0] / 2.8,
        "test_deviate": 1 / np.sqrt(kept[1] / 2.8 + 1e-5),
    }


def scale(dice: np.random.Generator) -> Operation:
    x, dy, factors, bias = draw(dice, 4, 9, 6), draw(dice, 4, 9, 6), draw(dice, 6), draw(dice, 6)

    def run(there: There, works: Works) -> Results:
        a, b, c = there(x), there(factors), there(bias)
        dfactors, dbias = there(unwritten(factors)), there(unwritten(bias))
        dx = channels.scale_backward(there(dy), a, b, dfactors, dbias, works["a"])
        y, plain = channels.scale(a, b, c, works["a"]), channels.scale(a, None, c, works["b"])
        return {"y": y, "plain": plain, "dx": dx, "dfactors": dfactors, "dbias": dbias}

    expected = {
        "y": wide(x) * factors + bias,
        "plain": wide(x) + bias,
        "dx": wide(dy) * factors,
        "dfactors": (wide(dy) * x).sum(axis=(0, 1)),
        "dbias": wide(dy).sum(axis=(0, 1)),
    }
    return Operation("scale", run, expected)


def join(dice: np.random.Generator, axis: int, sizes: tuple[int, ...]) -> Operation:
    shape = (2, 3, 4, 6)
    parts = [draw(dice, *shape[:axis], size, *shape[axis + 1 :]) for size in sizes]
    whole = np.concatenate(parts, axis)

    def run(there: There, works: Works) -> Results:
        y = channels.concatenate([there(part) for part in parts], axis, works["a"])
        cut = channels.split(there(whole), sizes, axis, works["b"])
        return {"y": y, **{f"part{number}": part for number, part in enumerate(cut)}}

    expected = {"y": whole, **{f"part{number}": part for number, part in enumerate(parts)}}
    return Operation(f"concatenate along {axis}", run, expected, 0, 0)


def combine(dice: np.random.Generator) -> Operation:
    parts = [dice.integers(-2, 3, (3, 5)).astype(np.float32) for _ in range(3)]
    dy, factors, stack = draw(dice, 3, 5), (1.0, -0.5, 2.0), wide(np.stack(parts))

    def run(there: There, works: Works) -> Results:
        a, gradient, total = [there(part) for part in parts], there(dy), there(parts[0])
        greatest, kept = eltwise.maximum(a, works["max"])
        eltwise.accumulate(a[1], total, 3.0)
        return {
            "sum": eltwise.weighted_sum(a, factors, works["sum"]),
            "sum_d1": eltwise.weighted_sum_backward(gradient, factors[1], 1, works["sum"]),
            "product": eltwise.product(a, works["product"]),
            "product_d1": eltwise.product_backward(gradient, a, 1, works["product"]),
            "quotient": eltwise.quotient(gradient, a[1], works["quotient"]),
            "maximum": greatest,
            "maximum_d1": eltwise.maximum_backward(gradient, kept, 1, works["max"]),
            "total": total,
        }

    expected = {
        "sum": np.tensordot(factors, stack, 1),
        "sum_d1": -0.5 * dy,
        "product": stack.prod(axis=0),
        "product_d1": dy * stack[0] * stack[2],
        "quotient": np.divide(dy, stack[1], where=stack[1] != 0, out=0 * stack[1]),
        "maximum": stack.max(axis=0),
        "maximum_d1": np.where(stack.argmax(axis=0) == 1, dy, 0),
        "total": stack[0] + 3 * stack[1],
    }
    return Operation("eltwise", run, expected)


def look_up(dice: np.random.Generator) -> Operation:
    table, ids, dy = draw(dice, 9, 5), dice.integers(-1, 10, 40), draw(dice, 40, 5)

    def run(there: There, works: Works) -> Results:
        rows, gradient = there(ids), there(unwritten(table))
        y = embedding.gather(there(table), rows, works["a"])
        embedding.gather_backward(there(dy), rows, gradient, works["a"])
        return {"y": y, "dtable": gradient}

    expected = {
        "y": [table[i] if 0 <= i < 9 else np.zeros(5) for i in ids],
        "dtable": [wide(dy)[ids == row].sum(axis=0) for row in range(9)],
    }
    return Operation("embedding", run, expected)


def drop(dice: np.random.Generator) -> Operation:
    x, dy, seed, step, layer = draw(dice, 5, 33), draw(dice, 5, 33), 2**40 + 3, 2**35, 77

    def run(there: There, works: Works) -> Results:
        y, kept = dropout.forward(there(x), 0.3, RngKey(seed, step, layer), works["a"])
        return {"y": y, "dx": dropout.backward(there(dy), kept, works["a"])}

    def kept(values: Any) -> Any:
        key = {"step": np.array([step]), "seed": seed, "layer": layer, "limit": limit(0.3)}
        flat = wide(values.reshape(-1))
        found = KERNELS["dropout_apply"].reference(x=flat, scale=1 / 0.7, n=flat.size, **key)
        return found["y"].reshape(values.shape)

    return Operation("dropout", run, {"y": kept(x), "dx": kept(dy)})
