"""The CPU's codecs against the CUDA kernels, against themselves, and against exact arithmetic."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cupy_kernels.backends import EmulatorBackend, as_host, copy_to
from cupy_kernels.emulator import Emulator
from cupy_kernels.launch import launch
from cupy_kernels.ops import codecs
from cupy_kernels.ops.codecs import Dense
from cupy_kernels.ops.codecs import cpu as codec_loops
from cupy_kernels.ops.codecs import cpu_numpy as codecs_numpy

KINDS: tuple[Dense, ...] = ("fp16", "bf16", "int8", "int4", "sign")
SIZES = (1, 7, 255, 256, 257, 777, 16_384, 20_011)
LEAST = float(codecs_numpy.LEAST_NORMAL)


@pytest.fixture(params=["numba", "numpy"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs the test on both forms; the compiled one only where numba is installed."""
    if request.param == "numba":
        pytest.importorskip("numba")
    monkeypatch.setattr(codec_loops, "COMPILED", request.param == "numba")
    return str(request.param)


def inputs(n: int) -> Iterator[tuple[Any, Any]]:
    """Gradients with errors: ordinary, wide, zeros, one sign, huge, and ties."""
    dice = np.random.default_rng(n)
    g, error = dice.standard_normal((2, n), np.float32)
    yield g, error
    yield g * np.exp(dice.uniform(-60, 20, n)).astype(np.float32), error * np.float32(1e-9)
    yield np.zeros(n, np.float32), np.zeros(n, np.float32)
    yield -np.abs(g), np.zeros(n, np.float32)
    yield g * np.float32(1e30), np.zeros(n, np.float32)
    yield np.rint(4 * g) / 2, np.zeros(n, np.float32)
    yield g * np.float32(3e-37), np.zeros(n, np.float32)


def encoded(kind: Dense, g: Any, error: Any, factor: float = 1.0) -> tuple[Any, Any]:
    """The payload and the new error; its bytes start as 0xFF, so that what is left out shows."""
    left, payload = error.copy(), np.full(codecs.payload_bytes(kind, len(g)), 0xFF, np.uint8)
    codecs.encode(kind, g, left, payload, np.float32(factor))
    return payload, left


def decoded(kind: Dense, payload: Any, n: int) -> Any:
    y = np.full(n, np.nan, np.float32)
    codecs.decode(kind, payload, y)
    return y


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.usefixtures("engine")
def test_what_is_sent_and_what_is_kept_add_up(kind: Dense, n: int) -> None:
    """dq + e' is factor * g + e, rounded once: exactly.

    A sign's error is rounded once more, and so is that of an fp16 beyond 2^29.
    """
    for g, error in inputs(n):
        for factor in (1.0, 0.3):
            payload, left = encoded(kind, g, error, factor)
            sent = decoded(kind, payload, n).astype(np.float64)
            whole = np.float32(factor) * g + error
            gap = np.abs(sent + left - whole.astype(np.float64))
            rounded = (kind == "sign") | ((kind == "fp16") & (np.abs(whole) > 2**29))
            assert (gap <= np.where(rounded, np.spacing(np.abs(left)) / 2, 0)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("engine")
def test_the_least_and_the_greatest_floats_are_kept_whole(kind: Dense) -> None:
    """Denormals stay in the error; what a half cannot hold is sent in parts."""
    for values in ([1e-45, -3e-42, 1.1e-38], [3.4e38, -3.4e38, 70000.0], [LEAST, -LEAST]):
        g = np.resize(np.array(values, np.float32), 300)
        if kind == "sign" and g.max() > 1e38:
            continue  # the sum of 256 of them is no float
        payload, left = encoded(kind, g, np.zeros_like(g))
        sent = decoded(kind, payload, 300)
        assert np.isfinite(left).all()
        gap = np.abs(sent.astype(np.float64) + left - g)
        assert (gap <= (np.spacing(np.abs(left)) / 2 if kind == "sign" else 0)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_both_forms_give_the_same_bytes(kind: Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba and NumPy agree on payload, error and decoded values, bit for bit."""
    pytest.importorskip("numba")
    for n in SIZES:
        for g, error in inputs(n):
            results = []
            for compiled in (True, False):
                monkeypatch.setattr(codec_loops, "COMPILED", compiled)
                payload, left = encoded(kind, g, error, 0.7)
                arrays = [payload, left, decoded(kind, payload, n)]
                results.append([array.tobytes() for array in arrays])
            assert results[0] == results[1]


@pytest.mark.parametrize("kind", KINDS)
def test_any_bytes_decode_alike(kind: Dense, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that no encoder made come out the same from both forms, whatever they are."""
    pytest.importorskip("numba")
    n = 70_000
    payload = np.random.default_rng(3).integers(0, 256, codecs.payload_bytes(kind, n), np.uint8)
    with np.errstate(all="ignore"):
        monkeypatch.setattr(codec_loops, "COMPILED", True)
        compiled = decoded(kind, payload, n)
        monkeypatch.setattr(codec_loops, "COMPILED", False)
        np.testing.assert_array_equal(compiled, decoded(kind, payload, n))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("emulated")
def test_the_cuda_kernels_write_and_read_the_same_bytes(kind: Dense) -> None:
    """A GPU worker and a CPU shard understand each other: payload, error and values, bit for bit.

    Denormals apart, which a GPU takes for zeros. What computes is asked of the arrays alone.
    """
    place = EmulatorBackend(Emulator(seed=5))
    for n, factor in ((1, 1.0), (257, 1.0), (777, 1.0), (777, 0.5)):
        for g, error in inputs(n):
            kept = np.abs(np.float32(factor) * g + error) > 4 * LEAST
            g, error = np.where(kept, g, 0), np.where(kept, error, 0)
            payload, left = encoded(kind, g, error, factor)
            theirs, their_error = copy_to(np.full_like(payload, 0xFF), place), copy_to(error, place)
            codecs.encode(kind, copy_to(g, place), their_error, theirs, np.float32(factor))
            assert as_host(theirs).tobytes() == payload.tobytes()
            expected = np.where(np.abs(left) < LEAST, 0, left)
            np.testing.assert_array_equal(as_host(their_error), expected)
            y = copy_to(np.full(n, np.nan, np.float32), place)
            codecs.decode(kind, theirs, y)
            assert as_host(y).tobytes() == decoded(kind, payload, n).tobytes()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.usefixtures("emulated")
def test_weights_are_rounded_alike_on_a_device(kind: Any) -> None:
    """A shard on a GPU serves the halves that one on the host does."""
    place, x = (
        EmulatorBackend(Emulator()),
        np.random.default_rng(8).standard_normal(777, np.float32),
    )
    ours, theirs = np.empty(2 * 777, np.uint8), copy_to(np.zeros(2 * 777, np.uint8), place)
    codecs.cast(kind, x, ours)
    codecs.cast(kind, copy_to(x, place), theirs)
    assert as_host(theirs).tobytes() == ours.tobytes()


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
@pytest.mark.usefixtures("engine")
def test_a_cast_without_an_error_is_the_nearest_half(kind: Any) -> None:
    """Weights come as NumPy's own float16, or as float32 with 16 bits rounded away."""
    x = np.random.default_rng(4).standard_normal(5001).astype(np.float32)
    payload = np.empty(codecs.payload_bytes(kind, x.size), np.uint8)
    codecs.cast(kind, x, payload)
    got = decoded(kind, payload, x.size)
    if kind == "fp16":
        normal = np.abs(x) > 1e-4
        assert np.array_equal(got[normal], x.astype(np.float16).astype(np.float32)[normal])
    else:
        assert (np.abs(got - x) <= np.abs(x) / 2**8).all()
        assert not (got.view(np.uint32) & 0xFFFF).any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_payload_is_read_at_any_address(kind: Dense) -> None:
    """A frame may start at an odd byte and be read-only."""
    g = np.random.default_rng(5).standard_normal(513).astype(np.float32)
    payload, _ = encoded(kind, g, np.zeros_like(g))
    frame = np.frombuffer(b"\x01" + payload.tobytes(), np.uint8, offset=1)
    assert np.array_equal(decoded(kind, frame, 513), decoded(kind, payload, 513))


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=600),
    share=st.floats(0, 1),
    compiled=st.booleans(),
)
def test_the_kth_largest_magnitude_is_what_sorting_gives(
    values: list[float], share: float, compiled: bool
) -> None:
    """Counting bits finds the very value, ties and zeros among them."""
    v = np.array(values, np.float32)
    count = 1 + int(share * (len(values) - 1))
    found = (codec_loops if compiled else codecs_numpy).magnitude(v, count)
    assert found == np.sort(np.abs(v))[::-1][count - 1]


@pytest.mark.parametrize("capacity", [0, 3, 1000])
@pytest.mark.parametrize("mu", [None, 0.9])
@pytest.mark.usefixtures("engine")
def test_a_sparse_push_moves_values_and_loses_none(mu: float | None, capacity: int) -> None:
    """What is taken plus what stays is v + u', to the bit; indices ascend; u and v are 0 there."""
    g, u, v = np.random.default_rng(6).standard_normal((3, 777)).astype(np.float32)
    velocity = None if mu is None else u.copy()
    new = g if mu is None else g + np.float32(mu) * u
    whole, tau = v + new, np.float32(1.5)
    codecs.accumulate(g, velocity, v, mu or 0.0)
    assert np.array_equal(v, whole)
    indices, values = codecs.take_above(velocity, v, tau, capacity)
    above = np.flatnonzero(np.abs(whole) > tau)[:capacity]
    assert indices.tolist() == above.tolist()
    assert np.array_equal(values, whole[above])
    assert not v[above].any()
    assert velocity is None or not velocity[above].any()
    v[above] = values
    assert np.array_equal(v, whole)


@pytest.mark.usefixtures("emulated", "engine")
def test_the_cuda_kernels_send_the_same_sparse_push() -> None:
    """Momentum, threshold, indices and values: the three launches give the bytes of the twin."""
    n, blocks, capacity = 777, 4, 90
    mu, tau = np.float32(0.9), np.float32(1.2)
    dice = np.random.default_rng(9)
    g, u, v = (dice.standard_normal(n).astype(np.float32) for _ in range(3))
    ours_u, ours_v = u.copy(), v.copy()
    codecs.accumulate(g, ours_u, ours_v, float(mu))
    ours = codecs.take_above(ours_u, ours_v, tau, capacity)
    counts, starts = np.empty(blocks, np.uint32), np.empty(blocks + 1, np.uint32)
    indices, values = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
    gpu = Emulator()
    first: dict[str, Any] = {"counts": counts, "verdict": None, "mu": mu, "tau": tau}
    launch("sparse_count", engine=gpu, g=g, u=u, v=v, n=n, **first)
    launch("sparse_starts", engine=gpu, counts=counts, starts=starts, blocks=blocks)
    room: dict[str, Any] = {"indices": indices, "values": values, "capacity": capacity}
    launch("sparse_send", engine=gpu, u=u, v=v, starts=starts, tau=tau, n=n, **room)
    count = min(capacity, int(starts[-1]))
    theirs = (indices[:count], values[:count], u, v)
    for mine, other in zip((*ours, ours_u, ours_v), theirs, strict=True):
        assert mine.tobytes() == other.tobytes()
