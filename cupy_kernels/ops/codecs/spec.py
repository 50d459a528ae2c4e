"""Rows of `codecs.cu`: casts, block quantisation and sparse pushes, each with its error feedback.

Format: a block is 256 floats with one float32 scale. int8 is a signed byte for each float; int4 is
code + 8, two to a byte, the low half first; sign is one bit, lowest first, set if negative. The
last block is padded with the codes of zeros. Casts are 16 bits each. A sparse push is ascending u32
indices and their float32 values. `apply_*` adds what the decoder of that name would write.

A reference rounds to float32 wherever the kernel documents a rounding, so most codes and errors
must be equal bit for bit. Only a block's mean is summed in a different order.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import (
    EXACT,
    ROUNDED,
    Geometry,
    Kernel,
    Sizes,
    Tolerance,
    changes,
    over,
    reads,
    scalar,
    writes,
)
from cupy_kernels.ops.updates.spec import VERDICT
from cupy_kernels.types import Wide

BLOCK = 256
"""Floats that share a scale."""

GREATEST_FP16, LEAST_FP16 = 65504.0, 2.0**-14
GREATEST_BF16 = (2 - 2.0**-7) * 2.0**127


def blocks(sizes: Sizes) -> int:
    """Quantisation blocks of an arena of n floats."""
    return -(-sizes["n"] // BLOCK)


def _single(x: Any) -> Wide:
    """x rounded to float32, as float64."""
    return np.asarray(x).astype(np.float32).astype(np.float64)


def _correct(g: Wide, error: Any, verdict: Any) -> Wide:
    carried: Wide = np.zeros_like(g) if error is None else error
    if verdict is None:
        return _single(g + carried)
    if verdict["skip"][0]:
        return carried
    return _single(_single(float(verdict["scale"][0]) * g) + carried)


def _blockwise(v: Wide) -> Wide:
    """The floats as (blocks, 256), the last block padded with zeros."""
    return np.pad(v, (0, -len(v) % BLOCK)).reshape(-1, BLOCK)


def _quantise(levels: int) -> Callable[..., dict[str, Any]]:
    def evaluate(g: Wide, error: Wide, verdict: Any, n: int, **_: Any) -> dict[str, Any]:
        v = _blockwise(_correct(g[:n], error[:n], verdict))
        scales = _single(np.abs(v).max(axis=1, initial=0) / levels)
        steps = np.where(scales > 0, scales, 1)[:, None]
        q = np.rint(_single(v / steps)).astype(np.int64)
        dq = _single(q * scales[:, None])
        flat = q.reshape(-1)
        codes = (flat[1::2] + 8) << 4 | (flat[::2] + 8) if levels == 7 else flat & 255
        return {"error": _single(v - dq).reshape(-1)[:n], "q": codes, "scales": scales}

    return evaluate


def _quantise_sign(g: Wide, error: Wide, verdict: Any, n: int, **_: Any) -> dict[str, Any]:
    v = _blockwise(_correct(g[:n], error[:n], verdict))
    lengths = np.minimum(BLOCK, n - BLOCK * np.arange(len(v)))
    scales = np.abs(v).sum(axis=1) / lengths
    dq = np.where(v < 0, -scales[:, None], scales[:, None])
    bits = np.packbits((v < 0).reshape(-1), bitorder="little")
    return {"error": (v - dq).reshape(-1)[:n], "q": bits, "scales": scales}


def _dequantise_int8(q: Any, scales: Wide, n: int, **_: Any) -> dict[str, Any]:
    return {"y": _single(q[:n].view(np.int8) * np.repeat(scales, BLOCK)[:n])}


def _dequantise_int4(q: Any, scales: Wide, n: int, **_: Any) -> dict[str, Any]:
    codes = np.stack([q & 15, q >> 4], axis=1).reshape(-1)[:n].astype(np.int64) - 8
    return {"y": _single(codes * np.repeat(scales, BLOCK)[:n])}


def _dequantise_sign(q: Any, scales: Wide, n: int, **_: Any) -> dict[str, Any]:
    negative = np.unpackbits(q, bitorder="little")[:n]
    return {"y": (1.0 - 2.0 * negative) * np.repeat(scales, BLOCK)[:n]}


def _to_bf16(v: Wide) -> tuple[Wide, Any]:
    """Rounded to bf16, a significand of 8 bits, ties to even."""
    fraction, exponent = np.frexp(v)
    dq = np.ldexp(np.rint(np.ldexp(fraction, 8)), exponent - 8)
    dq = np.clip(dq, -GREATEST_BF16, GREATEST_BF16)
    return dq, dq.astype(np.float32).view(np.uint32) >> 16


def _to_fp16(v: Wide) -> tuple[Wide, Any]:
    flushed = np.where(np.abs(v) < LEAST_FP16, np.copysign(0.0, v), v)
    half = np.clip(flushed, -GREATEST_FP16, GREATEST_FP16).astype(np.float16)
    return half.astype(np.float64), half.view(np.uint16)


def _cast(convert: Callable[[Wide], tuple[Wide, Any]]) -> Callable[..., dict[str, Any]]:
    def evaluate(g: Wide, error: Any, verdict: Any, n: int, **_: Any) -> dict[str, Any]:
        v = _correct(g[:n], None if error is None else error[:n], verdict)
        dq, codes = convert(v)
        return {"error": _single(v - dq), "q": codes}

    return evaluate


def _uncast_bf16(q: Any, n: int, **_: Any) -> dict[str, Any]:
    return {"y": (q[:n].astype(np.uint32) << 16).view(np.float32)}


def _uncast_fp16(q: Any, n: int, **_: Any) -> dict[str, Any]:
    return {"y": q[:n].view(np.float16)}


def _sparse_count(
    g: Wide, u: Wide, v: Wide, verdict: Any, mu: float, tau: float, n: int, **_: Any
) -> dict[str, Any]:
    new = _correct(g[:n], _single(_single(mu) * u[:n]), verdict)
    sums = _single(v[:n] + new)
    above = (np.abs(sums) > _single(tau)).astype(np.float64)
    return {"u": new, "v": sums, "counts": _blockwise(above).sum(axis=1)}


def _sparse_starts(counts: Any, blocks: int, **_: Any) -> dict[str, Any]:
    return {"starts": np.concatenate([[0], np.cumsum(counts[:blocks])])}


def _sparse_send(
    u: Wide, v: Wide, indices: Any, values: Wide, tau: float, capacity: int, n: int, **_: Any
) -> dict[str, Any]:
    sent = np.flatnonzero(np.abs(v[:n]) > _single(tau))[:capacity]
    left_u, left_v, positions, amounts = u.copy(), v.copy(), indices.copy(), values.copy()
    positions[: len(sent)], amounts[: len(sent)] = sent, v[sent]
    left_u[sent] = left_v[sent] = 0
    return {"u": left_u, "v": left_v, "indices": positions, "values": amounts}


def _sparse_add(
    indices: Any, values: Wide, y: Wide, count: int, n: int, **_: Any
) -> dict[str, Any]:
    total = y.copy()
    valid = indices[:count] < n
    total[indices[:count][valid]] += values[:count][valid]
    return {"y": _single(total)}


_N = scalar("n")
_VERDICT = reads("verdict", "1", VERDICT, optional=True)
_SCALES = reads("scales", blocks)
_G = reads("g", "n", align=16)


def _quantiser(
    kind: str, bits: int, expected: Callable[..., dict[str, Any]], tolerance: Tolerance
) -> Kernel:
    q = writes("q", lambda sizes: blocks(sizes) * BLOCK * bits // 8, "u1", align=max(bits // 2, 1))
    arrays = (_G, changes("error", "n", align=16), q, writes("scales", blocks), _VERDICT)
    bytes_each = 12 + bits / 8 + 4 / BLOCK
    return _warps(f"quantise_{kind}", (*arrays, _N), expected, bytes_each, tolerance)


def _warps(
    name: str,
    parameters: Any,
    expected: Callable[..., dict[str, Any]],
    bytes_each: float,
    tolerance: Tolerance,
) -> Kernel:
    """A warp for each 256 floats, 8 floats a thread."""
    shape = over("n", per_thread=8)
    return Kernel(name, "codecs.cu", parameters, shape, expected, bytes_each, tolerance)


def _quadruples(
    name: str, parameters: Any, expected: Callable[..., dict[str, Any]], bytes_each: float
) -> Kernel:
    shape = over("n", per_thread=4)
    return Kernel(name, "codecs.cu", parameters, shape, expected, bytes_each, EXACT)


def _onto(expected: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """y plus the decoded values, rounded once."""

    def apply(y: Wide, n: int, **arguments: Any) -> dict[str, Any]:
        return {"y": _single(y[:n] + expected(n=n, **arguments)["y"])}

    return apply


def _decoders(
    names: tuple[str, str], codes: Any, expected: Callable[..., dict[str, Any]], bytes_each: float
) -> tuple[Kernel, Kernel]:
    """The kernel that writes the decoded values, and the one that adds them to the output."""
    fresh, onto = writes("y", "n", align=16), changes("y", "n", align=16)
    return (
        _quadruples(names[0], (*codes, fresh, _N), expected, 4 + bytes_each),
        _quadruples(names[1], (*codes, onto, _N), _onto(expected), 8 + bytes_each),
    )


def _dequantisers(
    kind: str, bits: int, expected: Callable[..., dict[str, Any]]
) -> tuple[Kernel, Kernel]:
    align = max(bits // 2, 1)
    q = reads("q", lambda sizes: blocks(sizes) * BLOCK * bits // 8, "u1", align=align)
    names = f"dequantise_{kind}", f"apply_{kind}"
    return _decoders(names, (q, _SCALES), expected, bits / 8)


def _casts(
    kind: str,
    convert: Callable[[Wide], tuple[Wide, Any]],
    back: Callable[..., dict[str, Any]],
) -> tuple[Kernel, ...]:
    error = changes("error", "n", align=16, optional=True)
    parameters = (_G, error, writes("q", "n", "u2", align=8), _VERDICT, _N)
    codes = (reads("q", "n", "u2", align=8),)
    return (
        _quadruples(f"cast_{kind}", parameters, _cast(convert), 14),
        *_decoders((f"uncast_{kind}", f"apply_{kind}"), codes, back, 2),
    )


ROWS = (
    _quantiser("int8", 8, _quantise(127), EXACT),
    _quantiser("int4", 4, _quantise(7), EXACT),
    _quantiser("sign", 1, _quantise_sign, ROUNDED),
    *_dequantisers("int8", 8, _dequantise_int8),
    *_dequantisers("int4", 4, _dequantise_int4),
    *_dequantisers("sign", 1, _dequantise_sign),
    *_casts("bf16", _to_bf16, _uncast_bf16),
    *_casts("fp16", _to_fp16, _uncast_fp16),
    _warps(
        "sparse_count",
        (
            _G,
            changes("u", "n", align=16),
            changes("v", "n", align=16),
            writes("counts", blocks, "u4"),
            _VERDICT,
            scalar("mu", "f4"),
            scalar("tau", "f4"),
            _N,
        ),
        _sparse_count,
        20,
        EXACT,
    ),
    Kernel(
        "sparse_starts",
        "codecs.cu",
        (
            reads("counts", "blocks", "u4"),
            writes("starts", lambda sizes: sizes["blocks"] + 1, "u4"),
            scalar("blocks"),
        ),
        Geometry((1024, 1, 1), lambda sizes: (-(-sizes["blocks"] // 1024), 1, 1)),
        _sparse_starts,
        bytes_each=8,
        tolerance=EXACT,
    ),
    _warps(
        "sparse_send",
        (
            changes("u", "n", align=16),
            changes("v", "n", align=16),
            reads("starts", blocks, "u4"),
            changes("indices", "capacity", "u4"),
            changes("values", "capacity"),
            scalar("tau", "f4"),
            scalar("capacity"),
            _N,
        ),
        _sparse_send,
        4,
        EXACT,
    ),
    Kernel(
        "sparse_add",
        "codecs.cu",
        (
            reads("indices", "count", "u4"),
            reads("values", "count"),
            changes("y", "n"),
            scalar("count"),
            _N,
        ),
        over("count"),
        _sparse_add,
        bytes_each=16,
        tolerance=EXACT,
    ),
)
