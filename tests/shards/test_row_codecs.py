"""Rows in fewer bits: sizes, rounding, and frames that are none."""

import numpy as np
import pytest

from cupy_kernels.ops import rows as row_functions
from shards import row_codecs
from shards.errors import BadMessage
from shards.messages import Kind
from shards.row_codecs import PUSHED, decode, encode, row_bytes

ROWS = np.array([[1.0, -2.0, 0.5], [0.0, -0.0, 0.0], [1e-20, 3e-20, -1e-22]], np.float32)


def encoded(kind: Kind, rows: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> bytes:
    payload = np.empty(rows.shape[0] * row_bytes(kind, rows.shape[1]), np.uint8)
    encode(kind, rows, payload)
    return payload.tobytes()


@pytest.mark.parametrize("kind", PUSHED)
def test_rows_come_back_rounded(kind: Kind) -> None:
    """Each float is as near as its kind allows, alone of its row; NumPy and numba agree."""
    dice = np.random.default_rng(5)
    exponents = dice.integers(-30, 30, (70, 1))
    rows = (dice.standard_normal((70, 5)) * 10.0**exponents).astype(np.float32)
    payloads, decoded = set(), []
    for compiled in (False, True):
        row_functions.use(compiled=compiled)
        payloads.add(encoded(kind, rows))
        # At an odd address, as a short frame may be.
        frame = memoryview(b"x" + max(payloads))[1:]
        decoded.append(decode("push 1", kind, frame, 70, 5))
    assert len(payloads) == 1
    assert decoded[0].tobytes() == decoded[1].tobytes()
    most = np.abs(rows).max(axis=1, keepdims=True)
    error = np.abs(decoded[0] - rows)
    allowed = {Kind.F4: 0 * most, Kind.BF16: np.abs(rows) / 256, Kind.INT8: most / 253}[kind]
    assert (error <= allowed).all()
    assert kind is Kind.F4 or error.max() > 0
    # A row does not depend on the others.
    assert (
        encoded(kind, rows[3:4])
        == {
            Kind.F4: rows[3].tobytes(),
            Kind.BF16: max(payloads)[3 * 10 :][:10],
            Kind.INT8: max(payloads)[3 * 4 :][:4] + max(payloads)[280 + 15 :][:5],
        }[kind]
    )


def test_zeros_and_ties() -> None:
    """Zeros stay zeros, ties go to the even code, and a scale below the normal numbers is zero."""
    rows = np.array([[127, 0.5, 1.5, -2.5], [0, 0, -0.0, 0], [1e-42, 0, 0, 0]], np.float32)
    assert decode("", Kind.INT8, encoded(Kind.INT8, rows), 3, 4).tolist() == [
        [127, 0, 2, -2],
        [0, 0, 0, 0],
        [0, 0, 0, 0],
    ]
    assert encoded(Kind.BF16, ROWS[:0]) == b""
    assert decode("", Kind.INT8, b"", 0, 3).shape == (0, 3)


@pytest.mark.parametrize("kind", PUSHED)
def test_frames_of_another_length(kind: Kind) -> None:
    """A frame that is a byte too long or too short is refused in one line."""
    frame = encoded(kind, ROWS)
    for wrong in (frame[:-1], frame + b"x", b""):
        with pytest.raises(BadMessage, match=f"push 1: expected 3 rows of 3 floats as {kind}, "):
            decode("push 1", kind, wrong, 3, 3)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_scales_that_are_none(scale: float) -> None:
    """A scale that is negative or not finite is refused."""
    frame = np.array([1, scale, 1], np.float32).tobytes() + bytes(9)
    with pytest.raises(BadMessage, match="push 1: expected scales that are finite"):
        decode("push 1", Kind.INT8, frame, 3, 3)


def test_kinds_that_are_compiled_in_advance() -> None:
    """Every pair of kinds of pushes and pulls can be prepared."""
    for pushed in PUSHED:
        for pulled in row_codecs.PULLED:
            row_codecs.prepare(pushed, pulled)
        assert decode("", pushed, encoded(pushed, ROWS), 3, 3).shape == ROWS.shape
