"""The registry of payload kinds: how each is checked and decoded.

A payload is the frame for one key range; `cupy_kernels.ops.codecs` defines the bytes of each kind.
A frame comes from another process, so it is checked before it is decoded: its length follows from
the kind and the number of keys, the indices of a sparse payload must ascend within the range, and
scales must be finite and not negative. The shard's guard checks that the decoded floats are finite.

A sparse payload is n uint32 indices, relative to the start of the range, then n float32 values. n
is at most half the number of keys: beyond that, plain floats are shorter.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops import codecs
from shards import zstd_frames
from shards.errors import BadMessage
from shards.messages import Kind
from shards.tables import KeyRange
from shards.wire_format import Buffer

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_PAIR_BYTES = 8
_ALIGNED = 4  # bytes: the size of the largest numbers in a payload


class Payload(NamedTuple):
    """One kind of payload: its size, its check and its decoder.

    `max_bytes` gives the size for n keys, which for a sparse payload is the maximum. `fault`
    describes what is wrong with a payload of valid length for n keys, or returns ""; it is None if
    every bit pattern is valid. `decode` writes every float of its second argument.
    """

    max_bytes: Callable[[int], int]
    fault: Callable[[Bytes, int], str] | None
    decode: Callable[[Bytes, Floats], None]
    sparse: bool = False


def max_pairs(keys: int) -> int:
    """The most values that a sparse payload for this number of keys may hold."""
    return keys // 2


def sparse(indices: NDArray[np.uint32], values: Floats) -> Bytes:
    """The sparse payload of these indices and values."""
    return np.concatenate([indices.view(np.uint8), values.view(np.uint8)])


def pairs_of(share: float, keys: int) -> int:
    """The number of values in a `share` of the keys: at least 1, at most `max_pairs`."""
    return min(max_pairs(keys), max(1, round(share * keys)))


def encode_rounded(kind: Kind, g: Floats, error: Floats) -> Bytes:
    """The payload of g + error in a kind of ROUNDED; `error` becomes the rounding error."""
    codec = ROUNDED[kind]
    payload = np.empty(codecs.payload_bytes(codec, g.size), np.uint8)
    codecs.encode(codec, g, error, payload)
    return payload


def largest(v: Floats, velocity: Floats | None, count: int) -> Bytes:
    """The sparse payload of the `count` largest values of `v`; they are zeroed in both arrays."""
    # Just below the smallest value that is sent; among equal values the first are sent.
    tau = np.nextafter(codecs.magnitude(v, count), np.float32(0))
    return sparse(*codecs.take_above(velocity, v, tau, count))


def _pairs(payload: Bytes) -> tuple[NDArray[np.uint32], Floats]:
    both = payload.reshape(2, -1)
    return both[0].view(np.uint32), both[1].view(np.float32)


def _sparse_fault(payload: Bytes, keys: int) -> str:
    if payload.size % _PAIR_BYTES:
        return f"expected indices and values of 4 bytes each, got {payload.size} bytes"
    indices, _ = _pairs(payload)
    # The last index is the largest, as the next check shows; it alone is compared with the range.
    if indices.size and int(indices[-1]) >= keys:
        return f"expected indices below {keys}, got {indices[-1]}"
    # Strictly, so that no key comes twice: of two values `_scatter` would keep either one.
    if not (indices[1:] > indices[:-1]).all():
        return "expected indices that ascend"
    return ""


def _scatter(payload: Bytes, y: Floats) -> None:
    indices, values = _pairs(payload)
    y[:] = 0
    y[indices] = values


def _copy(payload: Bytes, y: Floats) -> None:
    y.view(np.uint8)[:] = payload


def _dense(kind: codecs.Dense) -> Payload:
    def fault(payload: Bytes, keys: int) -> str:
        _, scales = codecs.parts(kind, payload, keys)
        # NaN fails both comparisons.
        if scales is None or ((scales >= 0) & (scales <= np.finfo(np.float32).max)).all():
            return ""
        return "expected scales that are finite and at least 0"

    return Payload(
        lambda keys: codecs.payload_bytes(kind, keys),
        fault,
        lambda payload, y: codecs.decode(kind, payload, y),
    )


ROUNDED: dict[Kind, codecs.Dense] = {
    Kind.FP16: "fp16",
    Kind.BF16: "bf16",
    Kind.INT8: "int8",
    Kind.INT4: "int4",
    Kind.SIGN: "sign",
}
"""The kinds that hold every value in fewer bits, and their codecs."""

PAYLOADS: dict[Kind, Payload] = {kind: _dense(codec) for kind, codec in ROUNDED.items()} | {
    Kind.F4: Payload(lambda keys: 4 * keys, None, _copy),
    Kind.SPARSE: Payload(
        lambda keys: _PAIR_BYTES * max_pairs(keys), _sparse_fault, _scatter, sparse=True
    ),
}


def validate(label: str, kind: Kind, zstd: bool, keys: KeyRange, frame: Buffer) -> Bytes:
    """The frame for a key range as a payload to decode; raises BadMessage.

    It is copied only if zstd decompresses it or its address is not aligned.
    """
    count = keys.stop - keys.start
    plain = memoryview(frame)
    # The usual case without a further call: of plain floats only the length can be wrong.
    if kind is Kind.F4 and not zstd and plain.nbytes == 4 * count:
        floats = np.frombuffer(plain, np.float32)
        # NumPy knows whether floats are aligned; asking it for their address costs ten times more.
        return (floats if floats.flags.aligned else floats.copy()).view(np.uint8)
    row = PAYLOADS[kind]
    most = row.max_bytes(count)
    packed = plain.cast("B")
    if zstd:
        packed = zstd_frames.unpack(f"{label}: keys {keys}", packed, most)
    # The decoders are compiled loops, which do not check bounds: the length must be right here.
    if packed.nbytes > most or (packed.nbytes < most and not row.sparse):
        raise BadMessage(
            f"{label}: keys {keys} as {kind} take {'up to ' * row.sparse}{most} bytes,"
            f" got {packed.nbytes}"
        )
    payload = _align(np.frombuffer(packed, np.uint8))
    if row.fault is not None and (fault := row.fault(payload, count)):
        raise BadMessage(f"{label}: keys {keys} as {kind}: {fault}")
    return payload


def _align(payload: Bytes) -> Bytes:
    """Copy an unaligned payload, as ZeroMQ's short frames may be; compiled loops need alignment."""
    return payload.copy() if payload.__array_interface__["data"][0] % _ALIGNED else payload


def prepare(kind: Kind) -> None:
    """Compile the decoder of this kind."""
    keys = 2
    decode(kind, np.zeros(PAYLOADS[kind].max_bytes(keys), np.uint8), np.empty(keys, np.float32))


def decode(kind: Kind, payload: Bytes, y: Floats) -> None:
    """Decode a checked payload into `y`, float32 of the range's length."""
    PAYLOADS[kind].decode(payload, y)
