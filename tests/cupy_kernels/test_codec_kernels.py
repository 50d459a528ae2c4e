"""A codec loses nothing of a gradient: the part that is not sent stays in the error."""

from typing import Any

import numpy as np
import pytest

from cupy_kernels.emulator import Emulator, Schedule
from cupy_kernels.launch import launch
from tests.cupy_kernels.cases.codecs import BITS, values

pytestmark = pytest.mark.usefixtures("emulated")

SIZES = (64, 257, 777)


def run(name: str, **arguments: Any) -> None:
    launch(name, engine=Emulator(Schedule.RANDOM), **arguments)


def quantised(kind: str, g: Any, error: Any) -> Any:
    """What the receiver reads; `error` changes."""
    n, blocks = len(g), -(-len(g) // 256)
    q, scales = np.empty(blocks * 32 * BITS[kind], np.uint8), np.empty(blocks, np.float32)
    y = np.empty(n, np.float32)
    run(f"quantise_{kind}", g=g, error=error, q=q, scales=scales, verdict=None, n=n)
    run(f"dequantise_{kind}", q=q, scales=scales, y=y, n=n)
    return y


def cast(kind: str, g: Any, error: Any) -> Any:
    q, y = np.empty(len(g), np.uint16), np.empty(len(g), np.float32)
    run(f"cast_{kind}", g=g, error=error, q=q, verdict=None, n=len(g))
    run(f"uncast_{kind}", q=q, y=y, n=len(g))
    return y


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("kind", ["int8", "int4", "bf16", "fp16"])
def test_what_is_sent_and_what_is_kept_add_up_exactly(kind: str, n: int) -> None:
    """g + e, rounded once, is dq + e' without any rounding at all, in every element.

    That holds beyond fp16's range too, where all but 65504 is kept.
    """
    g, error = values(n)
    whole = (g + error).astype(np.float64)
    sent = (cast if kind in {"bf16", "fp16"} else quantised)(kind, g, error)
    np.testing.assert_array_equal(sent.astype(np.float64) + error, whole)
    within = np.abs(whole) <= 65504
    assert np.abs(error[within]).max() < np.abs(whole).max() / 10


@pytest.mark.parametrize("n", SIZES)
def test_a_sign_keeps_the_rest_to_one_rounding(n: int) -> None:
    """With a mean for every value, dq + e' is g + e to half a unit of the error's last place."""
    g, error = values(n)
    whole = (g + error).astype(np.float64)
    sent = quantised("sign", g, error)
    gap = np.abs(sent.astype(np.float64) + error - whole)
    assert (gap <= np.spacing(np.abs(error)) / 2).all()


@pytest.mark.parametrize("kind", BITS)
def test_a_gradient_repeated_arrives_whole_in_the_long_run(kind: str) -> None:
    """With error feedback, the mean of what is sent over 20 pushes nears the gradient itself."""
    g = np.random.default_rng(8).standard_normal(300, np.float32)
    error, total = np.zeros_like(g), np.zeros(300)
    for _ in range(20):
        total += quantised(kind, g, error)
    np.testing.assert_allclose(total + error, 20 * g.astype(np.float64), rtol=1e-5, atol=2e-5)
    assert np.abs(total / 20 - g).max() <= np.abs(error).max() / 20 + 1e-5


@pytest.mark.parametrize("capacity", [3, 1000])
def test_a_sparse_push_moves_values_and_loses_none(capacity: int) -> None:
    """What arrives plus what stays in v is v + u', to the bit, also when there is no room for all.

    The indices come in order; where a value was sent, u and v are zero.
    """
    n, blocks, mu, tau = 777, 4, np.float32(0.9), np.float32(1.5)
    generator = np.random.default_rng(9)
    g, u, v = (generator.standard_normal(n, np.float32) for _ in range(3))
    whole = v + (g + mu * u)
    counts, starts = np.empty(blocks, np.uint32), np.empty(blocks + 1, np.uint32)
    indices, amounts = np.empty(capacity, np.uint32), np.empty(capacity, np.float32)
    run("sparse_count", g=g, u=u, v=v, counts=counts, verdict=None, mu=mu, tau=tau, n=n)
    run("sparse_starts", counts=counts, starts=starts, blocks=blocks)
    send = {"indices": indices, "values": amounts, "capacity": capacity}
    run("sparse_send", u=u, v=v, starts=starts, tau=tau, n=n, **send)
    above = np.flatnonzero(np.abs(whole) > tau)
    count = min(int(starts[-1]), capacity)
    assert int(starts[-1]) == len(above)
    assert indices[:count].tolist() == above[:count].tolist()
    assert not u[indices[:count]].any()
    arrived = np.zeros(n, np.float32)
    run("sparse_add", indices=indices, values=amounts, y=arrived, count=count, n=n)
    assert not (arrived * v).any()
    np.testing.assert_array_equal(arrived + v, whole)
