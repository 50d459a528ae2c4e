"""The update formulas, and the loops that run them over an arena.

Each rule's formula is written once, in float32, on values that may be scalars or arrays. When
compiled, it is inlined into one pass over memory that reads weights and gradient, advances the
slots in place and writes the new weights elsewhere, without holding the interpreter's lock. Without
numba `updates` runs the same formula on short blocks of NumPy arrays.

The invariant: both give the same bits. So the compiler may neither contract a multiply and an add
into one rounding nor reorder anything. No fastmath flag is set for a formula, and none is needed,
because each formula is elementwise and vectorises anyway. Splitting an arena in two changes
nothing. Only a norm, which is a sum, may be computed in any order, and has such a flag.

Formulas are those of Caffe's solvers; `rate` already includes the tensor's multiplier and, for
Adam, the bias correction. Formulas and loops share this file because numba's cache checks for
changes only the file of the outermost function.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from cupy_kernels.compilation import COMPILED, compile_loop, plain
from cupy_kernels.types import BLOCK

Value = Any  # a float32 scalar inside a compiled loop, a float32 array on the NumPy path
Array = Any  # a flat float32 array; numba infers the loops' types, not these annotations

__all__ = ["COMPILED"]


@compile_loop
def add_decay(g: Value, w: Value, decay: Value, l1: bool) -> Value:
    """The gradient with weight decay: g + decay*w (L2), g + decay*sign(w) (L1), g for decay 0."""
    if decay == 0:
        return g
    if l1:
        return g + decay * np.sign(w)
    return g + decay * w


@compile_loop
def sgd(w: Value, g: Value, rate: Value) -> Value:
    return w - rate * g


@compile_loop
def momentum(w: Value, g: Value, h: Value, rate: Value, mu: Value) -> Value:
    h = mu * h + rate * g
    return w - h, h


@compile_loop
def nesterov(w: Value, g: Value, h: Value, rate: Value, mu: Value, ahead: Value) -> Value:
    new = mu * h + rate * g
    return w - (ahead * new - mu * h), new


@compile_loop
def adagrad(w: Value, g: Value, h: Value, rate: Value, delta: Value) -> Value:
    h = h + g * g
    return w - rate * (g / (np.sqrt(h) + delta)), h


@compile_loop
def rmsprop(
    w: Value, g: Value, h: Value, rate: Value, keep: Value, take: Value, delta: Value
) -> Value:
    h = keep * h + take * (g * g)
    return w - rate * (g / (np.sqrt(h) + delta)), h


@compile_loop
def adadelta(
    w: Value, g: Value, h: Value, d: Value, rate: Value, keep: Value, take: Value, delta: Value
) -> Value:
    h = keep * h + take * (g * g)
    step = g * np.sqrt((d + delta) / (h + delta))
    return w - rate * step, h, keep * d + take * (step * step)


@compile_loop
def adam(
    w: Value,
    g: Value,
    m: Value,
    v: Value,
    rate: Value,
    keep1: Value,
    take1: Value,
    keep2: Value,
    take2: Value,
    delta: Value,
) -> Value:
    m = keep1 * m + take1 * g
    v = keep2 * v + take2 * (g * g)
    return w - rate * (m / (np.sqrt(v) + delta)), m, v


@compile_loop
def adamw(
    w: Value,
    g: Value,
    m: Value,
    v: Value,
    rate: Value,
    keep1: Value,
    take1: Value,
    keep2: Value,
    take2: Value,
    delta: Value,
    fade: Value,
) -> Value:
    m = keep1 * m + take1 * g
    v = keep2 * v + take2 * (g * g)
    return w - rate * (m / (np.sqrt(v) + delta) + fade * w), m, v


@compile_loop
def delayed_nesterov(
    w: Value, g: Value, m: Value, s: Value, rate: Value, mu: Value, part: Value, last: Value
) -> Value:
    s = s + g
    if last == 0:
        return w - rate * (part * g), m, s
    m = mu * m + part * s
    return w - rate * (part * g + mu * m), m, s - s


@compile_loop
def mla(w: Value, g: Value, m: Value, rate: Value, keep: Value, take: Value) -> Value:
    ahead = keep * m
    return w - rate * (ahead + g), ahead + take * g


@compile_loop
def dc_asgd(w: Value, g: Value, old: Value, rate: Value, strength: Value) -> Value:
    g = g + strength * (g * g) * (w - old)
    new = w - rate * g
    return new, new


@compile_loop
def dc_asgd_adaptive(
    w: Value,
    g: Value,
    old: Value,
    v: Value,
    rate: Value,
    keep: Value,
    take: Value,
    strength: Value,
    delta: Value,
) -> Value:
    v = keep * v + take * (g * g)
    g = g + strength / np.sqrt(v + delta) * (g * g) * (w - old)
    new = w - rate * g
    return new, new, v


# The loops; `runs` is an updates.Runs. Each run is sliced out first, so that indices start at 0 and
# are never negative; otherwise the compiler would handle wrap-around and could not vectorise.


@compile_loop
def run_at(runs: Any, run: int) -> tuple[slice, Value, Value]:
    return slice(runs.bounds[run, 0], runs.bounds[run, 1]), runs.rates[run], runs.decays[run]


@compile_loop
def sgd_loop(
    w: Array,
    g: Array,
    slots: Any,  # noqa: ARG001  # all loops share one signature
    out: Array,
    runs: Any,
    constants: Any,
) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new = w[part], g[part], out[part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i] = sgd(x[i], grad, rate, *constants)


@compile_loop
def momentum_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, h = w[part], g[part], out[part], slots[0][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], h[i] = momentum(x[i], grad, h[i], rate, *constants)


@compile_loop
def nesterov_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, h = w[part], g[part], out[part], slots[0][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], h[i] = nesterov(x[i], grad, h[i], rate, *constants)


@compile_loop
def adagrad_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, h = w[part], g[part], out[part], slots[0][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], h[i] = adagrad(x[i], grad, h[i], rate, *constants)


@compile_loop
def rmsprop_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, h = w[part], g[part], out[part], slots[0][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], h[i] = rmsprop(x[i], grad, h[i], rate, *constants)


@compile_loop
def adadelta_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, h, s = w[part], g[part], out[part], slots[0][part], slots[1][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], h[i], s[i] = adadelta(x[i], grad, h[i], s[i], rate, *constants)


@compile_loop
def adam_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, m, v = w[part], g[part], out[part], slots[0][part], slots[1][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], m[i], v[i] = adam(x[i], grad, m[i], v[i], rate, *constants)


@compile_loop
def adamw_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, m, v = w[part], g[part], out[part], slots[0][part], slots[1][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], m[i], v[i] = adamw(x[i], grad, m[i], v[i], rate, *constants)


@compile_loop
def delayed_nesterov_loop(
    w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any
) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, m, v = w[part], g[part], out[part], slots[0][part], slots[1][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], m[i], v[i] = delayed_nesterov(x[i], grad, m[i], v[i], rate, *constants)


@compile_loop
def mla_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, m = w[part], g[part], out[part], slots[0][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], m[i] = mla(x[i], grad, m[i], rate, *constants)


@compile_loop
def dc_asgd_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, h = w[part], g[part], out[part], slots[0][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], h[i] = dc_asgd(x[i], grad, h[i], rate, *constants)


@compile_loop
def dc_asgd_adaptive_loop(
    w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any
) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, m, v = w[part], g[part], out[part], slots[0][part], slots[1][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], m[i], v[i] = dc_asgd_adaptive(x[i], grad, m[i], v[i], rate, *constants)


def _sgd_measured(w: Array, g: Array, out: Array, bounds: Array, rates: Array) -> Value:
    squares: Value = 0.0
    for run in range(len(rates)):
        part, rate = slice(bounds[run, 0], bounds[run, 1]), rates[run]
        x, d, new = w[part], g[part], out[part]
        for start in range(0, len(x), BLOCK):
            bx, bd, bnew = x[start : start + BLOCK], d[start : start + BLOCK], new[start:]
            block: Value = np.float32(0)
            for i in range(len(bx)):
                block += bd[i] * bd[i]
                bnew[i] = sgd(bx[i], bd[i], rate)
            squares += block
    return squares


ANY_ORDER = {"reassoc", "nsz"}  # `sgd` is a product and a difference, which leave no choice
sgd_measured = compile_loop(_sgd_measured, fastmath=ANY_ORDER)
"""What `sgd_loop` does without decay, and the sum of the gradient's squares, in one pass."""


class Update(NamedTuple):
    """A formula, for blocks of arrays, and its loop over a whole arena."""

    formula: Callable[..., Any]
    loop: Callable[..., None]


UPDATES = {
    "sgd": Update(plain(sgd), sgd_loop),
    "momentum": Update(plain(momentum), momentum_loop),
    "nesterov": Update(plain(nesterov), nesterov_loop),
    "adagrad": Update(plain(adagrad), adagrad_loop),
    "rmsprop": Update(plain(rmsprop), rmsprop_loop),
    "adadelta": Update(plain(adadelta), adadelta_loop),
    "adam": Update(plain(adam), adam_loop),
    "adamw": Update(plain(adamw), adamw_loop),
    "delayed_nesterov": Update(plain(delayed_nesterov), delayed_nesterov_loop),
    "mla": Update(plain(mla), mla_loop),
    "dc_asgd": Update(plain(dc_asgd), dc_asgd_loop),
    "dc_asgd_adaptive": Update(plain(dc_asgd_adaptive), dc_asgd_adaptive_loop),
}
