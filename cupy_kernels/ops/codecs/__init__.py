"""Codecs that compress gradients: the CPU version of `codecs.cu`, equal byte for byte.

A codec turns n floats into one payload, a flat array of bytes that can be sent unchanged:

    fp16, bf16     n halves
    int8           blocks * 256 bytes, then a float32 scale for each block of 256 floats
    int4           blocks * 128 bytes, two codes each, then the scales
    sign           blocks * 32 bytes, eight signs each, then the scales

With v = error + factor * g, the payload decodes to dq, and the error becomes v - dq, to be sent
with the next gradient (error feedback; Seide et al. 2014, Karimireddy et al. 2019). dq + error' is
exactly v, except for `sign`, where the error is rounded once. A sparse push (deep gradient
compression, Lin et al. 2018) takes whole values out of v and leaves the others.

The functions are compiled if numba is installed, and use NumPy otherwise, with the same bits. For
arrays on a device the kernels run instead (gpu.py), except for sparse pushes. All arrays
are flat and contiguous. Inputs must be finite; the caller is responsible for that.
"""

from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import backend_of
from cupy_kernels.ops.codecs import cpu_numpy as codecs_numpy
from cupy_kernels.ops.codecs.cpu_numpy import BLOCK, Bytes
from cupy_kernels.types import Array, freeze

Dense = Literal["fp16", "bf16", "int8", "int4", "sign"]

_BITS: dict[Dense, int] = {"fp16": 16, "bf16": 16, "int8": 8, "int4": 4, "sign": 1}
_CASTS = ("fp16", "bf16")
_LEVELS = {"int8": 127, "int4": 7}
ONE = np.float32(1)


def blocks(n: int) -> int:
    """The number of blocks, and so of scales, for n floats."""
    return -(-n // BLOCK)


def payload_bytes(kind: Dense, n: int) -> int:
    """The size in bytes of the payload of n floats."""
    if kind in _CASTS:
        return 2 * n
    return blocks(n) * (BLOCK * _BITS[kind] // 8 + 4)


def parts(kind: Dense, payload: Any, n: int) -> tuple[Any, Any]:
    """The codes and the scales (None for a cast) in a payload, as views of it."""
    if kind in _CASTS:
        return payload.view(np.uint16), None
    codes = blocks(n) * BLOCK * _BITS[kind] // 8
    return payload[:codes], payload[codes:].view(np.float32)


def encode(kind: Dense, g: Array, error: Array, payload: Bytes, factor: np.float32 = ONE) -> None:
    """Write the payload of error + factor * g, and the remaining error into `error`.

    `g` and `error` are float32 (n,), `payload` uint8 (payload_bytes(kind, n),).
    """
    q, scales = parts(kind, payload, g.size)
    if backend_of(g).runs_kernels:
        from cupy_kernels.ops.codecs import gpu as codec_kernels

        codec_kernels.write(writer(kind), g, error, q, scales, factor)
    elif _has_loops():
        from cupy_kernels.ops.codecs import cpu as codec_loops

        arrays = (freeze(g), error, q, *([] if scales is None else [scales]), factor)
        getattr(codec_loops, writer(kind))(*arrays)
    elif kind in _CASTS:
        getattr(codecs_numpy, writer(kind))(g, error, q, factor)
    elif kind == "sign":
        codecs_numpy.quantise_sign(g, error, q, scales, factor)
    else:
        codecs_numpy.quantise(g, error, q, scales, _LEVELS[kind], factor)


def cast(kind: Literal["fp16", "bf16"], x: Array, payload: Bytes) -> None:
    """Write the nearest halves of x; no error is kept, because weights are sent again."""
    q, _ = parts(kind, payload, x.size)
    if backend_of(x).runs_kernels:
        from cupy_kernels.ops.codecs import gpu as codec_kernels

        codec_kernels.write(writer(kind), x, None, q, None, ONE)
    elif _has_loops():
        from cupy_kernels.ops.codecs import cpu as codec_loops

        getattr(codec_loops, f"plain_{kind}")(freeze(x), q)
    else:
        getattr(codecs_numpy, f"cast_{kind}")(x, None, q, ONE)


def decode(kind: Dense, payload: Bytes, y: Array) -> None:
    """Decode a payload into `y`, float32 (n,). Any bytes decode without an error.

    The payload's address must be a multiple of four: compiled loops assume aligned arrays.
    """
    q, scales = parts(kind, payload, y.size)
    arrays = [q] if scales is None else [q, scales]
    if backend_of(y).runs_kernels:
        from cupy_kernels.ops.codecs import gpu as codec_kernels

        codec_kernels.read(reader(kind), q, scales, y)
    elif _has_loops():
        from cupy_kernels.ops.codecs import cpu as codec_loops

        getattr(codec_loops, reader(kind))(*map(freeze, arrays), y)
    else:
        with np.errstate(all="ignore"):
            getattr(codecs_numpy, reader(kind))(*arrays, y)


def accumulate(
    g: Array, u: Array | None, v: Array, mu: float = 0.0, factor: np.float32 = ONE
) -> None:
    """u = mu * u + factor * g; v += u: momentum before sparsifying. Without u, v += factor * g."""
    if _has_loops():
        from cupy_kernels.ops.codecs import cpu as codec_loops

        if u is None:
            codec_loops.accumulate_plain(freeze(g), v, factor)
        else:
            codec_loops.accumulate_momentum(freeze(g), u, v, np.float32(mu), factor)
    else:
        codecs_numpy.accumulate(g, u, v, np.float32(mu), factor)


def magnitude(v: Array, count: int) -> np.float32:
    """The `count`-th largest magnitude in v, 1 <= count <= v.size."""
    if _has_loops():
        from cupy_kernels.ops.codecs import cpu as codec_loops

        return np.float32(codec_loops.magnitude(v, count))
    return codecs_numpy.magnitude(v, count)


def take_above(
    u: Array | None, v: Array, tau: np.float32, capacity: int
) -> tuple[NDArray[np.uint32], Array]:
    """Take the first `capacity` values with |v| > tau out of `v`; returns their indices and them.

    Both u and v are then zero at these indices; further values stay for the next push.
    """
    if not _has_loops():
        return codecs_numpy.take_above(u, v, tau, capacity)
    from cupy_kernels.ops.codecs import cpu as codec_loops

    count = min(capacity, codec_loops.count_above(v, tau))
    indices, values = np.empty(count, np.uint32), np.empty(count, np.float32)
    codec_loops.take_above(v[:0] if u is None else u, v, tau, indices, values)
    return indices, values


def writer(kind: Dense) -> str:
    """The name of the function that encodes, the same as a kernel, as a loop and in NumPy."""
    return ("cast_" if kind in _CASTS else "quantise_") + kind


def reader(kind: Dense) -> str:
    """The name of the function that decodes; see `writer`."""
    return ("uncast_" if kind in _CASTS else "dequantise_") + kind


def _has_loops() -> bool:
    from cupy_kernels.ops.codecs import cpu as codec_loops

    return codec_loops.COMPILED
