"""The registry of payload kinds: what each may look like, and the floats that it stands for.

A payload is what travels for one key range, one frame; the bytes of each kind are those of
cupy_kernels/codecs.py. A frame comes from somebody else, so everything that can be known of it
without believing it is checked first: its length, by the kind and the number of keys; of a sparse
one that its indices ascend within the range; of scales that they are finite and not negative.
Whether the decoded floats are finite is the shard's own guard to say.

A sparse payload is count indices, uint32 from the start of the range, then count float32 values.
It has at most half as many as there are keys: beyond that, plain floats are shorter.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels import codecs
from shards import zstd_frames
from shards.errors import BadMessage
from shards.messages import Kind
from shards.tables import KeyRange
from shards.wire_format import Buffer

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

_PAIR_BYTES = 8
_ALIGNED = 4  # bytes, as the largest numbers in a payload are


class Payload(NamedTuple):
    """One kind: how many bytes n keys take (at most, if sparse), what is wrong, what it stands for.

    `fault` looks at a payload of allowed length for n keys and names what must not be, or nothing;
    None where every pattern means something. `decode` writes every float of its second argument.
    """

    most_bytes: Callable[[int], int]
    fault: Callable[[Bytes, int], str] | None
    decode: Callable[[Bytes, Floats], None]
    sparse: bool = False


def most_pairs(keys: int) -> int:
    """How many values a sparse payload of so many keys may hold."""
    return keys // 2


def sparse(indices: NDArray[np.uint32], values: Floats) -> Bytes:
    """The payload of these values."""
    return np.concatenate([indices.view(np.uint8), values.view(np.uint8)])


def pairs_of(share: float, keys: int) -> int:
    """How many values a `share` of so many keys is: at least one, at most what may be sent."""
    return min(most_pairs(keys), max(1, round(share * keys)))


def rounded(kind: Kind, g: Floats, error: Floats) -> Bytes:
    """The payload of g + error in one of the kinds ROUNDED; `error` becomes what it leaves out."""
    codec = ROUNDED[kind]
    payload = np.empty(codecs.payload_bytes(codec, g.size), np.uint8)
    codecs.encode(codec, g, error, payload)
    return payload


def largest(v: Floats, velocity: Floats | None, count: int) -> Bytes:
    """The sparse payload of the `count` largest of `v`, which are taken out of both arrays."""
    # Just below the last one that goes: of equal ones the first are sent.
    tau = np.nextafter(codecs.magnitude(v, count), np.float32(0))
    return sparse(*codecs.take_above(velocity, v, tau, count))


def _pairs(payload: Bytes) -> tuple[NDArray[np.uint32], Floats]:
    both = payload.reshape(2, -1)
    return both[0].view(np.uint32), both[1].view(np.float32)


def _sparse_fault(payload: Bytes, keys: int) -> str:
    if payload.size % _PAIR_BYTES:
        return f"expected indices and values of 4 bytes each, got {payload.size} bytes"
    indices, _ = _pairs(payload)
    if indices.size and int(indices[-1]) >= keys:
        return f"expected indices below {keys}, got {indices[-1]}"
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
        lambda keys: _PAIR_BYTES * most_pairs(keys), _sparse_fault, _scatter, sparse=True
    ),
}


def checked(
    what: str, kind: Kind, zstd: bool, ranges: Sequence[KeyRange], frames: Sequence[Buffer]
) -> tuple[Bytes, ...]:
    """The frames of a message, one a range, as payloads to decode; raises BadMessage.

    Nothing is copied but what zstd unpacks, and what lies at an odd address.
    """
    if len(frames) != len(ranges):
        raise BadMessage(f"{what}: expected {len(ranges)} frames, got {len(frames)}")
    row, plain = PAYLOADS[kind], kind is Kind.F4 and not zstd
    payloads = []
    for keys, frame in zip(ranges, frames, strict=True):
        # The usual case without a call: of plain floats only the length can be wrong.
        if plain and memoryview(frame).nbytes == 4 * (keys.stop - keys.start):
            payload = np.frombuffer(frame, np.uint8)
            if payload.__array_interface__["data"][0] % _ALIGNED:
                payload = _aligned(payload)
        else:
            payload = _checked(what, kind, row, zstd, keys, memoryview(frame).cast("B"))
        payloads.append(payload)
    return tuple(payloads)


def _checked(
    what: str, kind: Kind, row: Payload, zstd: bool, keys: KeyRange, frame: memoryview
) -> Bytes:
    count = keys.stop - keys.start
    most = row.most_bytes(count)
    if zstd:
        frame = zstd_frames.unpack(f"{what}: keys {keys}", frame, most)
    if frame.nbytes > most or (frame.nbytes < most and not row.sparse):
        raise BadMessage(
            f"{what}: keys {keys} as {kind} take {'up to ' * row.sparse}{most} bytes,"
            f" got {frame.nbytes}"
        )
    payload = _aligned(np.frombuffer(frame, np.uint8))
    if row.fault is not None and (fault := row.fault(payload, count)):
        raise BadMessage(f"{what}: keys {keys} as {kind}: {fault}")
    return payload


def _aligned(payload: Bytes) -> Bytes:
    """ZeroMQ hands out short frames at odd addresses; compiled loops take any array for aligned."""
    return payload.copy() if payload.__array_interface__["data"][0] % _ALIGNED else payload


def prepare(kind: Kind) -> None:
    """Compile what decodes payloads of this kind."""
    keys = 2
    decode(kind, np.zeros(PAYLOADS[kind].most_bytes(keys), np.uint8), np.empty(keys, np.float32))


def decode(kind: Kind, payload: Bytes, y: Floats) -> None:
    """Write what a checked payload stands for into `y`, float32 of the range's length."""
    PAYLOADS[kind].decode(payload, y)


def values(
    kind: Kind,
    payloads: Sequence[Bytes],
    ranges: Sequence[KeyRange],
    take: Callable[[], Floats],
) -> Floats:
    """What checked payloads stand for, one behind the other, aligned.

    Unless that is one payload of plain floats already, it is decoded into an array from `take`.
    """
    if kind is Kind.F4 and len(payloads) == 1:
        return payloads[0].view(np.float32)
    whole, base = take(), 0
    for payload, keys in zip(payloads, ranges, strict=True):
        decode(kind, payload, whole[base : base + len(keys)])
        base += len(keys)
    return whole
