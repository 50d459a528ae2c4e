"""The frames of a push that a shard decodes, and those that it refuses before decoding."""

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kernels.ops import codecs
from shards import payloads, zstd_frames
from shards.errors import BadInput, BadMessage
from shards.messages import Kind
from shards.payloads import PAYLOADS, ROUNDED
from shards.tables import KeyRange

KEYS = KeyRange(6, 10)
WIDE = (KeyRange(256, 1024), KeyRange(2048, 2305))


def read(kind: Kind, frame: Any, zstd: bool = False, keys: KeyRange = WIDE[0]) -> Any:
    payload = payloads.validate("push 1", kind, zstd, keys, frame)
    assert payload.ctypes.data % 4 == 0, "compiled loops take it for aligned"
    floats = np.full(len(keys), np.nan, np.float32)
    payloads.decode(kind, payload, floats)
    return floats


def written(kind: Kind, part: Any) -> Any:
    """One range's payload, as an array of bytes."""
    if kind is Kind.F4:
        return part.view(np.uint8)
    if kind is Kind.SPARSE:
        left = part.copy()
        most = payloads.max_pairs(part.size)
        return payloads.sparse(*codecs.take_above(None, left, np.float32(1), most))
    payload = np.empty(PAYLOADS[kind].max_bytes(part.size), np.uint8)
    codecs.encode(ROUNDED[kind], part, np.zeros_like(part), payload)
    return payload


def test_payloads_of_plain_floats_are_not_copied() -> None:
    """An aligned frame becomes an array on the same memory."""
    memory = bytearray(16)
    floats = payloads.validate("push 1", Kind.F4, False, KEYS, memory).view(np.float32)
    memory[:4] = b"\x00\x00\x80\x3f"
    assert floats.tolist() == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("size", [0, 1, 15, 17, 32])
def test_payloads_of_another_size(size: int) -> None:
    """A frame's length is checked against its keys."""
    complaint = rf"push 1: keys \[6, 10\) as f4 take 16 bytes, got {size}"
    with pytest.raises(BadMessage, match=complaint):
        payloads.validate("push 1", Kind.F4, False, KEYS, bytes(size))


def test_every_kind_has_its_row() -> None:
    """Every kind that a header can name has a decoder."""
    assert set(PAYLOADS) == set(Kind)


@pytest.mark.parametrize("zstd", [False, True])
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("keys", WIDE, ids=str)
def test_a_payload_is_decoded_at_any_address(kind: Kind, zstd: bool, keys: KeyRange) -> None:
    """Whatever the kind and the number of keys, at odd addresses too."""
    part = np.random.default_rng(1).standard_normal(len(keys)).astype(np.float32)
    frame = written(kind, part)
    wanted = np.full(len(keys), np.nan, np.float32)
    payloads.decode(kind, frame, wanted)
    sent = zstd_frames.pack(frame) if zstd else frame
    shifted = memoryview(b"\x00" + sent.tobytes())[1:]
    np.testing.assert_array_equal(read(kind, shifted, zstd, keys), wanted)
    most = {Kind.SIGN: 4, Kind.SPARSE: 1.01}.get(kind, 0.5)
    assert np.abs(wanted - part).max() < most


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind is not Kind.SPARSE])
@pytest.mark.parametrize("excess", [-1, 1, 8])
def test_a_length_that_the_kind_does_not_have(kind: Kind, excess: int) -> None:
    """Too short, too long: refused by the number alone, naming keys, kind and bytes."""
    frame = bytes(PAYLOADS[kind].max_bytes(len(WIDE[1])) + excess)
    with pytest.raises(BadMessage, match=r"push 1: keys \[2048, 2305\) as"):
        read(kind, frame, keys=WIDE[1])


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf, -1.0, -1e-30])
@pytest.mark.parametrize("kind", [Kind.INT8, Kind.INT4, Kind.SIGN])
def test_an_invalid_scale_is_refused(kind: Kind, scale: float) -> None:
    """Every scale must be finite and not negative."""
    frame = bytearray(PAYLOADS[kind].max_bytes(len(WIDE[0])))
    read(kind, frame)
    frame[-8:-4] = np.float32(scale).tobytes()
    with pytest.raises(BadMessage, match="expected scales that are finite and at least 0"):
        read(kind, frame)


def pairs(*indices: int) -> bytes:
    return np.array(indices, np.uint32).tobytes() + bytes(4 * len(indices))


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (pairs(0, 768), "expected indices below 768, got 768"),
        (pairs(5, 2**32 - 1), "expected indices below 768, got 4294967295"),
        (pairs(2**32 - 1, 5), "expected indices that ascend"),
        (pairs(3, 3), "expected indices that ascend"),
        (pairs(0, 4, 2, 7), "expected indices that ascend"),
        (bytes(12), "expected indices and values of 4 bytes each, got 12 bytes"),
        (pairs(*range(385)), r"as sparse take up to 3072 bytes, got 3080"),
    ],
)
def test_invalid_indices_are_refused(frame: bytes, complaint: str) -> None:
    """Sparse indices ascend within the range, and are not more than half of it."""
    with pytest.raises(BadMessage, match=complaint):
        read(Kind.SPARSE, frame)


def test_a_sparse_payload_may_be_empty_or_half_full() -> None:
    """An empty payload is valid too; values without an index are zero."""
    assert not read(Kind.SPARSE, b"").any()
    some = payloads.sparse(np.array([1, 767], np.uint32), np.array([2, -3], np.float32))
    got = read(Kind.SPARSE, some)
    assert {i: got[i] for i in np.flatnonzero(got)} == {1: 2.0, 767: -3.0}
    read(Kind.SPARSE, pairs(*range(384)))


def bomb(size: int) -> bytes:
    return zstandard.ZstdCompressor().compress(bytes(size))


def unlabelled(size: int) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(bytes(size))


@pytest.mark.parametrize(
    "frame",
    [
        bomb(200 << 20),
        unlabelled(3072),
        bomb(3072)[:-1],
        bomb(3072) + b"\0",
        bomb(3072) * 2,
        b"",
        b"(\xb5/\xfd",
        bytes(50),
        zstandard.ZstdCompressor(level=22).compress(bytes(3073)),
    ],
    ids=["bomb", "unlabelled", "cut", "longer", "two", "empty", "magic", "zeros", "too much"],
)
def test_a_packed_frame_with_a_false_size_allocates_nothing(frame: bytes) -> None:
    """Its stated size is compared with the kind's limit first, so a bomb costs no memory."""
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage, match=r"push 1: keys"):
            read(Kind.F4, frame, zstd=True)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_label_that_promises_less_than_follows() -> None:
    """A frame whose content is longer than its label is refused, and writes no further."""
    honest = bytearray(bomb(3072))
    assert honest[5:7] == (3072 - 256).to_bytes(2, "little")  # the label, as RFC 8878 has it
    honest[5:7] = (2048 - 256).to_bytes(2, "little")
    with pytest.raises(BadMessage, match="push 1: keys"):
        read(Kind.F4, bytes(honest), zstd=True)


def test_without_zstandard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base install names the missing package."""
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    with pytest.raises(BadInput, match=r"expected the package zstandard .*got none"):
        read(Kind.F4, b"", zstd=True)


MUTATIONS: tuple[Callable[[bytearray, Any], None], ...] = (
    lambda frame, dice: frame.extend(dice.bytes(int(dice.integers(1, 20)))),
    lambda frame, dice: frame.__delitem__(slice(int(dice.integers(0, len(frame) + 1)), None)),
    lambda frame, dice: frame.__setitem__(
        slice(0, 4 * (len(frame) // 8)), dice.bytes(4 * (len(frame) // 8))
    ),
    lambda frame, dice: frame.__setitem__(slice(-4, None), dice.bytes(4)),
)


@settings(max_examples=400)
@given(
    kind=st.sampled_from(Kind),
    seed=st.integers(0, 2**32 - 1),
    mutation=st.sampled_from(MUTATIONS),
    zstd=st.booleans(),
)
def test_hostile_payloads_are_refused_or_decode(
    kind: Kind, seed: int, mutation: Callable[[bytearray, Any], None], zstd: bool
) -> None:
    """A mutated frame either raises BadMessage or decodes to the right number of floats."""
    dice = np.random.default_rng(seed)
    payload = written(kind, dice.standard_normal(len(WIDE[0])).astype(np.float32))
    frame = bytearray((zstd_frames.pack(payload) if zstd else payload).tobytes())
    mutation(frame, dice)
    try:
        floats = read(kind, frame, zstd)
    except BadMessage as error:
        complaint = str(error)
    else:
        complaint = "push 1: keys"
        assert (floats.shape, floats.dtype) == ((len(WIDE[0]),), np.dtype(np.float32))
    assert complaint.startswith("push 1: keys")
    assert len(complaint) < 256
