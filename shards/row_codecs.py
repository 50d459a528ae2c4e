"""The encodings of rows on the wire, and their decoders.

    f4     float32, as they are
    bf16   the nearest 16-bit floats, ties to even
    int8   a float32 scale for each row, then a signed byte for each float

An int8 row has whole multiples of its scale, its largest magnitude over 127, rounded to the
nearest, ties to even. There is no error feedback: a worker would need a residual of every row that
it ever pushed. There are no dice either, so the bytes follow from the rows alone. They are made
once, at the worker; what is logged, replicated and replayed are these bytes, and every copy decodes
them to the same floats.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops import codecs
from cupy_kernels.ops.rows import dequantise_rows, quantise_rows
from shards.errors import BadMessage
from shards.messages import Kind
from shards.wire_format import Buffer

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

PUSHED = (Kind.F4, Kind.BF16, Kind.INT8)
PULLED = (Kind.F4, Kind.BF16)
_SCALE_BYTES = 4


def row_bytes(kind: Kind, dim: int) -> int:
    """The bytes of an encoded row."""
    match kind:
        case Kind.BF16:
            return 2 * dim
        case Kind.INT8:
            return _SCALE_BYTES + dim
    return 4 * dim


def encode(kind: Kind, rows: Floats, out: Bytes) -> None:
    """Write finite rows, (n, dim), in a kind of `PUSHED`; `out` has just their bytes."""
    match kind:
        case Kind.BF16:
            codecs.cast("bf16", rows.reshape(-1), out)
        case Kind.INT8:
            quantise_rows(rows, *_split(out, *rows.shape))
        case _:
            out.view(np.float32).reshape(rows.shape)[...] = rows


def decode(label: str, kind: Kind, frame: Buffer, count: int, dim: int) -> Floats:
    """The rows in a frame, (count, dim); plain floats are not copied. Raises BadMessage."""
    size, expected = memoryview(frame).nbytes, count * row_bytes(kind, dim)
    # The decoders are compiled loops, which do not check bounds: the length must be right here.
    if size != expected:
        raise BadMessage(
            f"{label}: expected {count} rows of {dim} floats as {kind}, {expected} bytes,"
            f" got {size}"
        )
    if kind is Kind.F4:
        # In place: a gradient in a worker's memory stays there until its push is acknowledged.
        return np.frombuffer(frame, np.float32).reshape(count, dim)
    payload = np.frombuffer(frame, np.uint8)
    if payload.__array_interface__["data"][0] % _SCALE_BYTES:
        payload = payload.copy()  # short frames may be anywhere, and the loops assume alignment
    rows = np.empty((count, dim), np.float32)
    if kind is Kind.BF16:
        codecs.decode("bf16", payload, rows.reshape(-1))
        return rows
    codes, scales = _split(payload, count, dim)
    # NaN fails both comparisons.
    if not ((scales >= 0) & (scales <= np.finfo(np.float32).max)).all():
        raise BadMessage(f"{label}: expected scales that are finite and at least 0")
    dequantise_rows(codes, scales, rows)
    return rows


def round_rows(kind: Kind, rows: Floats) -> Floats:
    """Finite rows, (n, dim), as a shard decodes them; plain floats are not copied."""
    if kind is Kind.F4:
        return rows
    payload = np.empty(len(rows) * row_bytes(kind, rows.shape[1]), np.uint8)
    encode(kind, rows, payload)
    return decode("", kind, payload.data, *rows.shape)


def prepare(pushed: Kind, pulled: Kind) -> None:
    """Compile the decoder of pushes and the encoder of answers."""
    for kind in (pushed, pulled):
        payload = np.zeros(row_bytes(kind, 1), np.uint8)
        encode(kind, decode("", kind, payload.data, 1, 1), payload)


def _split(payload: Bytes, count: int, dim: int) -> tuple[NDArray[Any], Floats]:
    """The codes (count, dim) and the scales of int8 rows, as views."""
    # Scales come first, where they are aligned whatever the number of codes.
    ends = _SCALE_BYTES * count
    return payload[ends:].view(np.int8).reshape(count, dim), payload[:ends].view(np.float32)
