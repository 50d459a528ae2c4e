"""The residual: what is sent and what is kept add up to the gradients, push after push."""

import math
from typing import Any

import numpy as np
import pytest

from ps.session.compression import NAMES, Compression
from ps.session.error_feedback import ERROR, VELOCITY, ErrorFeedback
from shards import payloads
from shards.errors import BadInput
from shards.tables import DenseTable, KeyRange, Layout, TensorSpec

RANGES = (KeyRange(0, 512), KeyRange(512, 1024), KeyRange(1024, 1280))
SIZE = 1280
TABLE = DenseTable("net", (TensorSpec("w", (SIZE,)),))
KEPT, MOVING = f"net/{ERROR}", f"net/{VELOCITY}"
PUSHES = (*NAMES, "topk:0.01", "topk:0.5", "threshold:1.5")


def feedback(push: str) -> ErrorFeedback:
    writer = ErrorFeedback.of(Layout((TABLE,)), {"net": Compression.parse(push)})
    assert writer is not None
    return writer


def encoded(writer: ErrorFeedback, gradient: Any, seq: int) -> list[Any]:
    """The payload of each range, as push `seq` has them."""
    writer.begin({"net": gradient}, seq)
    return [writer.encode("net", gradient[k.start : k.stop], k) for k in RANGES]


def gradients(count: int) -> Any:
    return np.random.default_rng(count).standard_normal((count, SIZE)).astype(np.float32)


def decoded(writer: ErrorFeedback, written: Any) -> Any:
    """The floats that the shards decode from these payloads, as one array."""
    arena = np.full(SIZE, np.nan, np.float32)
    kind = Compression(push=writer.tables["net"].writing).push_kind
    for keys, frame in zip(RANGES, written, strict=True):
        payload = payloads.validate("push", kind, False, keys, frame.data)
        payloads.decode(kind, payload, arena[keys.start : keys.stop])
    return arena


@pytest.mark.parametrize("push", PUSHES)
def test_every_push_adds_up(push: str) -> None:
    """g + e, rounded once, is dq + e': to the bit in each of 30 pushes; to a rounding for signs."""
    writer = feedback(push)
    for seq, gradient in enumerate(gradients(30), 1):
        whole = gradient + writer.state()[KEPT]
        before = gradient.copy()
        sent = decoded(writer, encoded(writer, gradient, seq))
        left = writer.state()[KEPT]
        gap = np.abs(sent.astype(np.float64) + left - whole)
        assert (gap <= (np.spacing(np.abs(left)) / 2 if push == "1bit" else 0)).all()
        assert np.array_equal(gradient, before)


@pytest.mark.parametrize("push", PUSHES)
def test_in_the_long_run_everything_arrives(push: str) -> None:
    """Over 40 pushes the sum of what arrived differs from the gradients' by the residual alone."""
    writer, total, all_of_it = feedback(push), np.zeros(SIZE), gradients(40)
    for seq, gradient in enumerate(all_of_it, 1):
        total += decoded(writer, encoded(writer, gradient, seq))
    left = writer.state()[KEPT]
    np.testing.assert_allclose(total + left, all_of_it.sum(0, dtype=np.float64), atol=1e-4)


@pytest.mark.parametrize("share", [0.004, 0.01, 0.3])
def test_topk_sends_the_largest_of_each_range(share: float) -> None:
    """Each range sends as many values as the share allows, and keeps none that is larger."""
    writer, gradient = feedback(f"topk:{share}"), gradients(1)[0]
    sent = decoded(writer, encoded(writer, gradient, 1))
    for keys in RANGES:
        part, whole = sent[keys.start : keys.stop], gradient[keys.start : keys.stop]
        count = max(1, round(share * len(keys)))
        chosen = np.argsort(-np.abs(whole), kind="stable")[:count]
        assert sorted(chosen) == np.flatnonzero(part).tolist()


def test_topk_of_equal_values_sends_the_first() -> None:
    """Ties lead neither to none being sent, nor to all."""
    writer = feedback("topk:0.25")
    sent = decoded(writer, encoded(writer, np.full(SIZE, -3, np.float32), 1))
    assert np.flatnonzero(sent[:512]).tolist() == list(range(128))
    again = decoded(writer, encoded(writer, np.zeros(SIZE, np.float32), 2))
    assert np.flatnonzero(again[:512]).tolist() == list(range(128, 256))


def test_nothing_to_send_is_an_empty_frame() -> None:
    """Zeros are not sent, even where the share leaves room for them."""
    written = encoded(feedback("topk:0.1"), np.zeros(SIZE, np.float32), 1)
    assert [frame.size for frame in written] == [0, 0, 0]


def test_the_warm_up_sends_more_at_first() -> None:
    """A quarter of the first push is sent, less of each later one, and finally the share."""
    writer, gradient = feedback("topk:0.01,warm_up=3"), gradients(1)[0]
    sizes = [encoded(writer, gradient, seq)[0].size // 8 for seq in (1, 2, 3, 4, 5)]
    assert sizes == [128, 44, 15, 5, 5]


def test_momentum_is_kept_where_nothing_is_sent() -> None:
    """u = 0.5 u + g, v += u, as in the paper; both restart from zero where a value was sent."""
    writer, g = feedback("threshold:5,momentum=0.5"), np.zeros(SIZE, np.float32)
    g[[3, 700]] = 2, 4
    arrived = [decoded(writer, encoded(writer, g, seq))[[3, 700]] for seq in (1, 2, 3)]
    # At 3: v = 2, 2 + 3, 5 + 3.5; at 700: v = 4, then 4 + 6 is sent, then 4 again.
    assert [values.tolist() for values in arrived] == [[0, 0], [0, 10], [8.5, 0]]
    assert writer.state()[MOVING][[3, 700]].tolist() == [0, 4]


def test_a_gradient_is_clipped_before_it_is_added() -> None:
    """A norm of 50 under `clip=5` is scaled by a tenth; a smaller norm is not scaled."""
    writer, g = feedback("threshold:100,clip=5"), np.zeros(SIZE, np.float32)
    g[[1, 2]] = 30, 40
    encoded(writer, g, 1)
    assert writer.state()[KEPT][[1, 2]].tolist() == [3, 4]
    encoded(writer, g / np.float32(50), 2)
    np.testing.assert_allclose(writer.state()[KEPT][[1, 2]], [3.6, 4.8], rtol=1e-6)


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 3e38])
@pytest.mark.parametrize("push", PUSHES)
def test_what_is_not_finite_is_refused_and_leaves_no_trace(push: str, poison: float) -> None:
    """The gradient is refused with the shard's text, before the residual changes."""
    writer, good = feedback(push), gradients(1)[0]
    encoded(writer, good, 1)
    before = {name: array.copy() for name, array in writer.state().items()}
    bad = good.copy()
    bad[600] = poison
    with pytest.raises(
        BadInput,
        match=r"push 2: table net (holds NaN or infinity|has a norm beyond 1\.8e\+19): expected ",
    ):
        encoded(writer, bad, 2)
    for name, array in writer.state().items():
        assert np.array_equal(array, before[name])


@pytest.mark.parametrize("push", [*PUSHES, "topk:0.01,momentum=0.9"])
def test_a_restored_residual_goes_on_as_if_nothing_had_been(push: str) -> None:
    """The frames after a restart equal those without it, byte for byte."""
    first, second = feedback(push), feedback(push)
    series = gradients(6)
    for seq in range(1, 4):
        encoded(first, series[seq - 1], seq)
    second.restore({name: array.copy() for name, array in first.state().items()})
    for seq in range(4, 7):
        ours, theirs = (encoded(one, series[seq - 1], seq) for one in (first, second))
        assert [frame.tobytes() for frame in ours] == [frame.tobytes() for frame in theirs]


def test_a_residual_that_does_not_fit_is_refused() -> None:
    """Another codec's arrays are refused, and another table's."""
    with pytest.raises(BadInput, match="residual: expected net/error, got net/error, net/velocity"):
        feedback("int8").restore(feedback("topk:0.1,momentum=0.5").state())
    with pytest.raises(
        BadInput, match=r"residual: net/error: expected float32 of shape \(1280,\), got"
    ):
        feedback("int8").restore({KEPT: np.zeros(256, np.float32)})
