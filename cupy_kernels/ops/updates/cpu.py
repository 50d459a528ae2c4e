"""The update formulas, and the loops that run them over an arena.

Each rule's formula is written once, in float32, on values that may be scalars or arrays. When
compiled, it is inlined into one pass over memory that reads weights and gradient, advances the
slots in place and writes the new weights elsewhere, without holding the interpreter's lock. Without
numba `updates` runs the same formula on short blocks of NumPy arrays. Loops over the rows of a
sparse table, in any order of slots, are below those over an arena.

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

from cupy_kernels.compilation import COMPILED, compile_loop, plain, prefetch
from cupy_kernels.types import BLOCK, ROW_COUNT, ROW_SLOT

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
def ftrl(
    w: Value,
    g: Value,
    z: Value,
    n: Value,
    rate: Value,
    beta: Value,
    l1: Value,
    l2: Value,
) -> Value:
    zero = np.float32(0)
    z = z - np.float32((n == 0) & (z == 0)) * (beta * w)  # at the first update
    new = n + g * g
    z = z + rate * g - (np.sqrt(new) - np.sqrt(n)) * w
    shrunk = np.maximum(np.abs(z) - rate * l1, zero)
    return zero - np.copysign(shrunk, z) / (beta + np.sqrt(new) + rate * l2), z, new


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
def heloco(
    w: Value,
    g: Value,
    m: Value,
    rate: Value,
    keep: Value,
    take: Value,
    part: Value,
    along: Value,
) -> Value:
    g = part * g + along * m
    m = keep * m + take * g
    return w - rate * (g + keep * m), m


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
def heloco_loop(w: Array, g: Array, slots: Any, out: Array, runs: Any, constants: Any) -> None:
    for run in range(len(runs.rates)):
        part, rate, decay = run_at(runs, run)
        x, d, new, m = w[part], g[part], out[part], slots[0][part]
        for i in range(len(x)):
            grad = add_decay(d[i], x[i], decay, runs.l1)
            new[i], m[i] = heloco(x[i], grad, m[i], rate, *constants)


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


# Loops over rows; `rows` is a row_updates.RowMemory. A row is a miss of every cache, so a loop asks
# for it some rows before.

_AHEAD = 12
_LINE = 16  # floats of a cache line


@compile_loop
def begin_row(rows: Any, slots: Array, number: int) -> int:
    """Count an update of a row, and return the index of its first float in the slab."""
    later = number + _AHEAD
    if later < len(slots):
        first = slots[later] * rows.stride
        for line in range(first, first + rows.width, _LINE):
            prefetch(rows.slab, line)
        prefetch(rows.counts, slots[later] * rows.meta_words)
    word = slots[number] * rows.meta_words + ROW_COUNT
    count = rows.counts[word]
    rows.counts[word] = count + np.uint32(count != MOST_UPDATES)
    return slots[number] * rows.stride  # type: ignore[no-any-return]


MOST_UPDATES = np.uint32(2**32 - 1)
"""The count of a row's updates stays at this number."""


@compile_loop
def sgd_rows(rows: Any, slots: Array, gradient: Array, rate: Value, constants: Any) -> None:
    rate32, dim = np.float32(rate), rows.dim
    for i in range(len(slots)):
        start = begin_row(rows, slots, i)
        w, d = rows.slab[start : start + dim], gradient[i]
        for j in range(dim):
            grad = add_decay(d[j], w[j], rows.decay, rows.l1)
            w[j] = sgd(w[j], grad, rate32, *constants)


@compile_loop
def momentum_rows(rows: Any, slots: Array, gradient: Array, rate: Value, constants: Any) -> None:
    rate32, dim = np.float32(rate), rows.dim
    for i in range(len(slots)):
        start = begin_row(rows, slots, i)
        w, d = rows.slab[start : start + dim], gradient[i]
        h = rows.slab[start + dim : start + 2 * dim]
        for j in range(dim):
            grad = add_decay(d[j], w[j], rows.decay, rows.l1)
            w[j], h[j] = momentum(w[j], grad, h[j], rate32, *constants)


@compile_loop
def nesterov_rows(rows: Any, slots: Array, gradient: Array, rate: Value, constants: Any) -> None:
    rate32, dim = np.float32(rate), rows.dim
    for i in range(len(slots)):
        start = begin_row(rows, slots, i)
        w, d = rows.slab[start : start + dim], gradient[i]
        h = rows.slab[start + dim : start + 2 * dim]
        for j in range(dim):
            grad = add_decay(d[j], w[j], rows.decay, rows.l1)
            w[j], h[j] = nesterov(w[j], grad, h[j], rate32, *constants)


@compile_loop
def adagrad_rows(rows: Any, slots: Array, gradient: Array, rate: Value, constants: Any) -> None:
    rate32, dim = np.float32(rate), rows.dim
    for i in range(len(slots)):
        start = begin_row(rows, slots, i)
        w, d = rows.slab[start : start + dim], gradient[i]
        h = rows.slab[start + dim : start + 2 * dim]
        for j in range(dim):
            grad = add_decay(d[j], w[j], rows.decay, rows.l1)
            w[j], h[j] = adagrad(w[j], grad, h[j], rate32, *constants)


@compile_loop
def adam_rows(rows: Any, slots: Array, gradient: Array, rate: Value, constants: Any) -> None:
    beta1, beta2, constants32 = constants[0], constants[1], constants[2:]
    dim = rows.dim
    for i in range(len(slots)):
        start = begin_row(rows, slots, i)
        count = rows.counts[slots[i] * rows.meta_words + ROW_COUNT]
        rate32 = np.float32(
            rate * (np.sqrt(1.0 - power(beta2, count)) / (1.0 - power(beta1, count)))
        )
        w, d = rows.slab[start : start + dim], gradient[i]
        m = rows.slab[start + dim : start + 2 * dim]
        v = rows.slab[start + 2 * dim : start + 3 * dim]
        for j in range(dim):
            grad = add_decay(d[j], w[j], rows.decay, rows.l1)
            w[j], m[j], v[j] = adam(w[j], grad, m[j], v[j], rate32, *constants32)


@compile_loop
def power(base: Value, exponent: Value) -> Value:
    """A float64 to the power of a whole number, by squares: the same bits on every machine."""
    result = 1.0
    while exponent != 0:
        if exponent & np.uint32(1):
            result *= base
        base *= base
        exponent >>= np.uint32(1)
    return result


@compile_loop
def ftrl_rows(rows: Any, slots: Array, gradient: Array, rate: Value, constants: Any) -> None:
    rate32, dim = np.float32(rate), rows.dim
    for i in range(len(slots)):
        start = begin_row(rows, slots, i)
        w, d = rows.slab[start : start + dim], gradient[i]
        z = rows.slab[start + dim : start + 2 * dim]
        n = rows.slab[start + 2 * dim : start + 3 * dim]
        for j in range(dim):
            grad = add_decay(d[j], w[j], rows.decay, rows.l1)
            w[j], z[j], n[j] = ftrl(w[j], grad, z[j], n[j], rate32, *constants)


@compile_loop
def row_adagrad_rows(rows: Any, slots: Array, gradient: Array, rate: Value, constants: Any) -> None:
    rate32, dim, (delta,) = np.float32(rate), rows.dim, constants
    share = np.float32(1) / np.float32(dim)
    for i in range(len(slots)):
        start = begin_row(rows, slots, i)
        w, d = rows.slab[start : start + dim], gradient[i]
        word = slots[i] * rows.meta_words + ROW_SLOT
        h = rows.row_slots[word] + sum_squares(w, d, rows.decay, rows.l1) * share
        rows.row_slots[word] = h
        factor = rate32 / (np.sqrt(h) + delta)
        for j in range(dim):
            w[j] = w[j] - factor * add_decay(d[j], w[j], rows.decay, rows.l1)


@compile_loop
def sum_squares(w: Array, d: Array, decay: Value, l1: bool) -> Value:
    """The sum of squares of a row's gradient: eight sums by column modulo 8, then a fixed tree."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = np.float32(0)
    dim, whole = len(d), len(d) - len(d) % 8
    for j in range(0, whole, 8):
        g, x = d[j : j + 8], w[j : j + 8]
        s0 += square(g[0], x[0], decay, l1)
        s1 += square(g[1], x[1], decay, l1)
        s2 += square(g[2], x[2], decay, l1)
        s3 += square(g[3], x[3], decay, l1)
        s4 += square(g[4], x[4], decay, l1)
        s5 += square(g[5], x[5], decay, l1)
        s6 += square(g[6], x[6], decay, l1)
        s7 += square(g[7], x[7], decay, l1)
    for j in range(whole, dim):  # the last, incomplete eight
        value = square(d[j], w[j], decay, l1)
        lane = j - whole
        if lane == 0:
            s0 += value
        elif lane == 1:
            s1 += value
        elif lane == 2:
            s2 += value
        elif lane == 3:
            s3 += value
        elif lane == 4:
            s4 += value
        elif lane == 5:
            s5 += value
        else:
            s6 += value
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))


@compile_loop
def square(g: Value, w: Value, decay: Value, l1: bool) -> Value:
    g = add_decay(g, w, decay, l1)
    return g * g


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
    "heloco": Update(plain(heloco), heloco_loop),
    "dc_asgd": Update(plain(dc_asgd), dc_asgd_loop),
    "dc_asgd_adaptive": Update(plain(dc_asgd_adaptive), dc_asgd_adaptive_loop),
}

ROW_LOOPS: dict[str, Callable[..., None]] = {
    "sgd": sgd_rows,
    "momentum": momentum_rows,
    "nesterov": nesterov_rows,
    "adagrad": adagrad_rows,
    "row_adagrad": row_adagrad_rows,
    "adam": adam_rows,
    "ftrl": ftrl_rows,
}
"""The loops over the rows of a sparse table. A rule's formula has its name, but for `row_adagrad`,
which needs the sum over a row first."""
