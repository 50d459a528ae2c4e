"""The codecs as compiled loops: one pass over each block while it is in the caches.

The rule of `ops/updates/cpu.py` holds: no fastmath, so that every result equals that of
`cpu_numpy.py`, bit for bit. Two methods replace the flag. The largest magnitude is found among
the bits of the floats, read as integers, because a maximum of floats that respects NaN is not
vectorised. The k-th largest is found by counting bits, in two passes and without a sort.
"""

from typing import Any

import numpy as np

from cupy_kernels.compilation import COMPILED, compile_loop
from cupy_kernels.ops.codecs.cpu_numpy import BLOCK, EACH, LANES, LEAST_NORMAL

Array = Any  # numba infers the loops' types, not these annotations

__all__ = ["COMPILED"]

MAGNITUDE = np.uint32(0x7FFFFFFF)
ONE, ZERO = np.float32(1), np.float32(0)


@compile_loop
def _load(g: Array, error: Array, factor: Any, v: Array) -> None:
    """v = factor * g + error, padded with zeros."""
    for i in range(len(g)):
        v[i] = factor * g[i] + error[i]
    for i in range(len(g), BLOCK):
        v[i] = ZERO


@compile_loop
def _codes(v: Array, bits: Array, word: Array, levels: int, codes: Array, error: Array) -> Any:
    """Write the codes and the error of a block; returns its scale."""
    most = np.int32(0)
    for i in range(BLOCK):
        most = max(most, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    word[0] = most
    scale = word.view(np.float32)[0] / np.float32(levels)
    if scale < LEAST_NORMAL:
        scale = ZERO
    step = scale if scale > ZERO else ONE
    limit = np.float32(levels)
    for i in range(BLOCK):
        code = np.rint(v[i] / step)
        codes[i] = np.int8(min(max(code, -limit), limit))
    for i in range(len(error)):
        error[i] = v[i] - np.float32(codes[i]) * scale
    return scale


@compile_loop
def quantise_int8(g: Array, error: Array, q: Array, scales: Array, factor: Any) -> None:
    v, word = np.empty(BLOCK, np.float32), np.empty(1, np.int32)
    bits, codes = v.view(np.int32), q.view(np.int8)
    for block in range(len(scales)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        _load(g[part], error[part], factor, v)
        scales[block] = _codes(v, bits, word, 127, codes[part], error[part])


@compile_loop
def quantise_int4(g: Array, error: Array, q: Array, scales: Array, factor: Any) -> None:
    v, word = np.empty(BLOCK, np.float32), np.empty(1, np.int32)
    bits, codes = v.view(np.int32), np.empty(BLOCK, np.int8)
    for block in range(len(scales)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        _load(g[part], error[part], factor, v)
        scales[block] = _codes(v, bits, word, 7, codes, error[part])
        pairs = q[block * BLOCK // 2 : (block + 1) * BLOCK // 2]
        for i in range(BLOCK // 2):
            pairs[i] = np.uint8(codes[2 * i] + 8) | np.uint8(codes[2 * i + 1] + 8) << 4


@compile_loop
def quantise_sign(g: Array, error: Array, q: Array, scales: Array, factor: Any) -> None:
    v, sums = np.empty(BLOCK, np.float32), np.empty(LANES, np.float32)
    for block in range(len(scales)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        rest = error[part]
        _load(g[part], rest, factor, v)
        for lane in range(LANES):
            total = ZERO
            for i in range(EACH):
                total += abs(v[lane * EACH + i])
            sums[lane] = total
        half = LANES // 2
        while half:
            for lane in range(half):
                sums[lane] += sums[lane + half]
            half //= 2
        scale = sums[0] / np.float32(len(rest))
        if scale < LEAST_NORMAL:
            scale = ZERO
        scales[block] = scale
        for i in range(len(rest)):
            rest[i] = v[i] - (-scale if v[i] < ZERO else scale)
        signs = q[block * LANES : (block + 1) * LANES]
        for lane in range(LANES):
            byte = 0
            for i in range(EACH):
                byte |= (v[lane * EACH + i] < ZERO) << i
            signs[lane] = byte


@compile_loop
def dequantise_int8(q: Array, scales: Array, y: Array) -> None:
    codes = q.view(np.int8)
    for block in range(len(scales)):
        part = slice(block * BLOCK, (block + 1) * BLOCK)
        block_codes, out, scale = codes[part], y[part], scales[block]
        for i in range(len(out)):
            out[i] = np.float32(block_codes[i]) * scale


@compile_loop
def dequantise_int4(q: Array, scales: Array, y: Array) -> None:
    for block in range(len(scales)):
        pairs = q[block * BLOCK // 2 : (block + 1) * BLOCK // 2]
        out, scale = y[block * BLOCK : (block + 1) * BLOCK], scales[block]
        for i in range(len(out) // 2):
            out[2 * i] = np.float32(np.int32(pairs[i] & 15) - 8) * scale
            out[2 * i + 1] = np.float32(np.int32(pairs[i] >> 4) - 8) * scale
        if len(out) % 2:
            out[len(out) - 1] = np.float32(np.int32(pairs[len(out) // 2] & 15) - 8) * scale


@compile_loop
def dequantise_sign(q: Array, scales: Array, y: Array) -> None:
    whole, bits, sizes = np.empty(BLOCK, np.uint32), y.view(np.uint32), scales.view(np.uint32)
    for block in range(len(scales)):
        signs, size = q[block * LANES : (block + 1) * LANES], sizes[block]
        for lane in range(LANES):
            byte, eight = np.uint32(signs[lane]), whole[lane * EACH : (lane + 1) * EACH]
            for i in range(EACH):
                eight[i] = size ^ (byte >> np.uint32(i) & np.uint32(1)) << np.uint32(31)
        out = bits[block * BLOCK : (block + 1) * BLOCK]
        out[:] = whole[: len(out)]


@compile_loop
def _bf16(bits: Any) -> Any:
    """The nearest bf16, ties to even; values beyond the largest are clipped to it."""
    rounded = np.uint32(bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1)))
    if rounded & MAGNITUDE > np.uint32(0x7F7FFFFF):
        rounded = np.uint32(bits & np.uint32(0x80000000) | np.uint32(0x7F7FFFFF))
    return np.uint32(rounded & np.uint32(0xFFFF0000))


@compile_loop
def _fp16(bits: Any) -> Any:
    sign, rest = bits >> np.uint32(16) & np.uint32(0x8000), bits & MAGNITUDE
    if rest >= np.uint32(0x477FE000):
        return np.uint32(sign | np.uint32(0x7BFF))
    if rest < np.uint32(0x38800000):
        return np.uint32(sign)
    odd = rest >> np.uint32(13) & np.uint32(1)
    half = rest - np.uint32(0x38000000) + np.uint32(0xFFF) + odd
    return np.uint32(sign | half >> np.uint32(13))


@compile_loop
def _from_fp16(half: Any) -> Any:
    """The bits of the float32 that an fp16 encodes."""
    sign, rest = (half & np.uint32(0x8000)) << np.uint32(16), half & np.uint32(0x7FFF)
    bits = (rest << np.uint32(13)) + np.uint32(0x38000000) if rest else np.uint32(0)
    bits = sign | bits
    return np.uint32(0x7FFFFFFF if rest > np.uint32(0x7C00) else bits)


# Conversions between floats and their bits go through a small buffer with views of both types.


@compile_loop
def cast_bf16(g: Array, error: Array, q: Array, factor: Any) -> None:
    v, back = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    bits, stored = v.view(np.uint32), back.view(np.uint32)
    for start in range(0, len(g), BLOCK):
        part = slice(start, start + BLOCK)
        rest, out = error[part], q[part]
        _load(g[part], rest, factor, v)
        for i in range(len(rest)):
            stored[i] = _bf16(bits[i])
        for i in range(len(rest)):
            out[i] = stored[i] >> np.uint32(16)
            rest[i] = v[i] - back[i]


@compile_loop
def cast_fp16(g: Array, error: Array, q: Array, factor: Any) -> None:
    v, back = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    bits, stored = v.view(np.uint32), back.view(np.uint32)
    for start in range(0, len(g), BLOCK):
        part = slice(start, start + BLOCK)
        rest, out = error[part], q[part]
        _load(g[part], rest, factor, v)
        for i in range(len(rest)):
            half = _fp16(bits[i])
            out[i] = half
            stored[i] = _from_fp16(half)
        for i in range(len(rest)):
            rest[i] = v[i] - back[i]


@compile_loop
def plain_bf16(x: Array, q: Array) -> None:
    """`cast_bf16` without keeping an error."""
    bits = x.view(np.uint32)
    for i in range(len(bits)):
        q[i] = _bf16(bits[i]) >> np.uint32(16)


@compile_loop
def plain_fp16(x: Array, q: Array) -> None:
    bits = x.view(np.uint32)
    for i in range(len(bits)):
        q[i] = _fp16(bits[i])


@compile_loop
def uncast_bf16(q: Array, y: Array) -> None:
    bits = y.view(np.uint32)
    for i in range(len(bits)):
        bits[i] = np.uint32(q[i]) << np.uint32(16)


@compile_loop
def uncast_fp16(q: Array, y: Array) -> None:
    bits = y.view(np.uint32)
    for i in range(len(bits)):
        bits[i] = _from_fp16(np.uint32(q[i]))


@compile_loop
def accumulate_plain(g: Array, v: Array, factor: Any) -> None:
    for i in range(len(v)):
        v[i] += factor * g[i]


@compile_loop
def accumulate_momentum(g: Array, u: Array, v: Array, mu: Any, factor: Any) -> None:
    for i in range(len(v)):
        new = factor * g[i] + mu * u[i]
        u[i] = new
        v[i] += new


@compile_loop
def magnitude(v: Array, count: int) -> Any:
    """The `count`-th largest magnitude: counting finds its upper 16 bits, then its lower ones."""
    bits = v.view(np.uint32)
    magnitude_bits, remaining = np.empty(1, np.uint32), count
    highs = np.zeros(1 << 15, np.int64)
    for i in range(len(bits)):
        highs[(bits[i] & MAGNITUDE) >> np.uint32(16)] += 1
    high = len(highs) - 1
    while highs[high] < remaining:
        remaining -= highs[high]
        high -= 1
    lows = np.zeros(1 << 16, np.int64)
    for i in range(len(bits)):
        if (bits[i] & MAGNITUDE) >> np.uint32(16) == high:
            lows[bits[i] & np.uint32(0xFFFF)] += 1
    low = len(lows) - 1
    while lows[low] < remaining:
        remaining -= lows[low]
        low -= 1
    magnitude_bits[0] = high << 16 | low
    return magnitude_bits.view(np.float32)[0]


@compile_loop
def count_above(v: Array, tau: Any) -> int:
    count = 0
    for i in range(len(v)):
        count += abs(v[i]) > tau
    return count


@compile_loop
def take_above(u: Array, v: Array, tau: Any, indices: Array, values: Array) -> None:
    """Fill `indices` and `values` with the first |v| > tau; zero u (which may be empty) and v."""
    at = 0
    for i in range(len(v)):
        if at == len(indices):
            return
        if abs(v[i]) > tau:
            indices[at], values[at] = i, v[i]
            v[i] = ZERO
            if len(u):
                u[i] = ZERO
            at += 1
