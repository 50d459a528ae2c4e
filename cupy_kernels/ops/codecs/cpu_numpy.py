"""The codecs in plain NumPy: the base install runs them, and the compiled loops must equal them.

Everything is float32 and rounded exactly where `codecs.cu` rounds, so that the bytes are the
same from a GPU, from numba and from here. The one exception are denormals, which a GPU treats as
zeros and drops, and which stay in the error here. A scale is never denormal, so no decoded value
is.

Arenas are processed in pieces of some blocks, which keeps the temporaries in the caches.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.types import Array

BLOCK = 256  # floats that share a scale
LANES, EACH = 32, 8  # a block is summed in the order of a warp: 8 floats a lane, then a tree
PIECE = 64 * BLOCK
LEAST_NORMAL = np.float32(2.0**-126)
GREATEST_FP16, LEAST_FP16 = np.float32(65504), np.float32(2.0**-14)

Bytes = NDArray[np.uint8]


def quantise(
    g: Array, error: Array, q: Bytes, scales: Array, levels: int, factor: np.float32
) -> None:
    """Codes in [-levels, levels]: a byte each for 127 levels, half a byte each for 7."""
    for part, blocks in _pieces(len(g)):
        v = _correct(g[part], error[part], factor)
        scale = _normal(np.abs(v).max(axis=1) / np.float32(levels))
        scales[blocks] = scale
        steps = np.where(scale > 0, scale, np.float32(1))[:, None]
        codes = np.clip(np.rint(v / steps), -levels, levels).astype(np.int8)
        v -= codes.astype(np.float32) * scale[:, None]
        error[part] = v.reshape(-1)[: part.stop - part.start]
        flat = codes.reshape(-1)
        if levels == 127:
            q[blocks.start * BLOCK :][: flat.size] = flat.view(np.uint8)
        else:
            halves = (flat + 8).astype(np.uint8)
            q[blocks.start * BLOCK // 2 :][: flat.size // 2] = halves[1::2] << 4 | halves[::2]


def quantise_sign(g: Array, error: Array, q: Bytes, scales: Array, factor: np.float32) -> None:
    """One bit for each value, set if it is negative; the scale is the mean magnitude."""
    for part, blocks in _pieces(len(g)):
        v = _correct(g[part], error[part], factor)
        lengths = np.minimum(BLOCK, len(g) - BLOCK * np.arange(blocks.start, blocks.stop))
        scale = _normal(_warp_sums(np.abs(v)) / lengths.astype(np.float32))
        scales[blocks] = scale
        negative = v < 0
        v -= np.where(negative, -scale[:, None], scale[:, None])
        error[part] = v.reshape(-1)[: part.stop - part.start]
        bits = np.packbits(negative.reshape(-1), bitorder="little")
        q[blocks.start * BLOCK // 8 :][: bits.size] = bits


def dequantise_int8(q: Bytes, scales: Array, y: Array) -> None:
    for part, blocks in _pieces(len(y)):
        codes = q[blocks.start * BLOCK : blocks.stop * BLOCK].view(np.int8)
        _scale(codes, scales[blocks], y[part])


def dequantise_int4(q: Bytes, scales: Array, y: Array) -> None:
    for part, blocks in _pieces(len(y)):
        pairs = q[blocks.start * BLOCK // 2 : blocks.stop * BLOCK // 2]
        codes = np.stack([pairs & 15, pairs >> 4], axis=1).astype(np.int8) - np.int8(8)
        _scale(codes, scales[blocks], y[part])


def dequantise_sign(q: Bytes, scales: Array, y: Array) -> None:
    for part, blocks in _pieces(len(y)):
        negative = np.unpackbits(
            q[blocks.start * BLOCK // 8 : blocks.stop * BLOCK // 8], bitorder="little"
        )
        _scale(1 - 2 * negative.astype(np.int8), scales[blocks], y[part])


def cast_bf16(g: Array, error: Array | None, q: NDArray[np.uint16], factor: np.float32) -> None:
    for part, _ in _pieces(len(g)):
        v = _flat(g[part], error, part, factor)
        bits = v.view(np.uint32)
        rounded = bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))
        most = np.uint32(0x7F7FFFFF)  # values beyond the largest bf16 are clipped to it
        beyond = (rounded & 0x7FFFFFFF) > most
        rounded = np.where(beyond, bits & 0x80000000 | most, rounded)
        half = (rounded >> 16).astype(np.uint16)
        q[part] = half
        if error is not None:
            error[part] = v - (half.astype(np.uint32) << 16).view(np.float32)


def cast_fp16(g: Array, error: Array | None, q: NDArray[np.uint16], factor: np.float32) -> None:
    for part, _ in _pieces(len(g)):
        v = _flat(g[part], error, part, factor)
        flushed = np.where(np.abs(v) < LEAST_FP16, np.copysign(np.float32(0), v), v)
        half = np.clip(flushed, -GREATEST_FP16, GREATEST_FP16).astype(np.float16)
        q[part] = half.view(np.uint16)
        if error is not None:
            error[part] = v - half.astype(np.float32)


def uncast_bf16(q: NDArray[np.uint16], y: Array) -> None:
    for part, _ in _pieces(len(y)):
        np.left_shift(q[part], 16, out=y[part].view(np.uint32), dtype=np.uint32)


def uncast_fp16(q: NDArray[np.uint16], y: Array) -> None:
    """By the kernel's formula, without denormals and infinity: the encoders write neither."""
    for part, _ in _pieces(len(y)):
        half = q[part].astype(np.uint32)
        rest = half & 0x7FFF
        bits = np.where(rest > 0, (rest << 13) + 0x38000000, 0)
        bits = np.where(rest > 0x7C00, 0x7FFFFFFF, (half & 0x8000) << 16 | bits)
        y[part] = bits.astype(np.uint32).view(np.float32)


def accumulate(g: Array, u: Array | None, v: Array, mu: np.float32, factor: np.float32) -> None:
    """u = mu * u + factor * g; v += u."""
    for part, _ in _pieces(len(v)):
        new = factor * g[part]
        if u is not None:
            new += mu * u[part]
            u[part] = new
        v[part] += new


def magnitude(v: Array, count: int) -> np.float32:
    """The `count`-th largest magnitude."""
    least: np.float32 = np.partition(np.abs(v), v.size - count)[v.size - count]
    return least


def take_above(
    u: Array | None, v: Array, tau: np.float32, capacity: int
) -> tuple[NDArray[np.uint32], Array]:
    """The first `capacity` indices with |v| > tau, and the values there, which are taken out."""
    indices = np.flatnonzero(np.abs(v) > tau)[:capacity]
    values = v[indices]
    v[indices] = 0
    if u is not None:
        u[indices] = 0
    return indices.astype(np.uint32), values


def _pieces(n: int) -> Iterator[tuple[slice, slice]]:
    """The slices of floats and of blocks to process, piece by piece."""
    for start in range(0, n, PIECE):
        stop = min(n, start + PIECE)
        yield slice(start, stop), slice(start // BLOCK, -(-stop // BLOCK))


def _correct(g: Array, error: Array, factor: np.float32) -> Array:
    """factor * g + error as (blocks, 256), the last block padded with zeros."""
    v = factor * g + error
    if v.size % BLOCK:
        v = np.pad(v, (0, -v.size % BLOCK))
    return v.reshape(-1, BLOCK)


def _flat(g: Array, error: Array | None, part: slice, factor: np.float32) -> Array:
    return factor * g if error is None else factor * g + error[part]


def _normal(scale: Array) -> Array:
    return np.where(scale < LEAST_NORMAL, np.float32(0), scale)


def _warp_sums(magnitudes: Array) -> Array:
    """Each row's sum, in the kernel's order."""
    lanes = magnitudes.reshape(-1, LANES, EACH)
    sums: Array = lanes[:, :, 0].copy()
    for i in range(1, EACH):
        sums += lanes[:, :, i]
    half = LANES // 2
    while half:
        sums = sums[:, :half] + sums[:, half : 2 * half]
        half //= 2
    return sums[:, 0]


def _scale(codes: Any, scales: Array, y: Array) -> None:
    whole = codes.reshape(-1, BLOCK).astype(np.float32)
    whole *= scales[:, None]
    y[:] = whole.reshape(-1)[: y.size]
