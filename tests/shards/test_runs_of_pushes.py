"""Pushes that arrive together: they share one pass, and each still counts separately."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupy_kernels.backends import HOST
from shards import dense_part
from shards.dense_part import DensePart
from shards.messages import Ack, Pull, Push, Remedy
from shards.rules import RULES, SGD, Decay
from shards.schedules import Step
from shards.tables import DenseTable, Layout, TensorSpec, cut_evenly
from shards.transition_io import Arrival
from shards.update_records import RECORD
from tests.support.shard_dsl import (
    REAL,
    SIZE,
    Said,
    Talk,
    gradient,
    pull,
    push,
    refusal,
    served,
    spec,
)

WORKERS = "abcd"


def talk_of(**options: Any) -> Talk:
    talk = Talk(bound=None, workers=4, **options)
    talk.enter(*WORKERS)
    return talk


def together(talk: Talk, *said: tuple[Push | Pull, list[bytes]]) -> Said:
    """The shard's answers to messages that arrive together."""
    arrivals = [Arrival(one.worker.encode(), one, frames) for one, frames in said]
    return talk.heard(talk.shard.handle_together(arrivals, talk.now))


def test_every_push_of_a_run_counts_by_itself() -> None:
    """Each has a version, a staleness and a record; pulls among them see all pushes."""
    talk = talk_of()
    assert together(
        talk,
        (push("a", 1), gradient(1)),
        (pull("a", 1), []),
        (push("b", 1), gradient(2)),
        (pull("b", 1), []),
        (push("c", 1), gradient(4)),
    ) == [
        ("a", Ack(101, 0, 1, 1, 1, 0, False)),
        ("b", Ack(101, 0, 1, 1, 2, 1, False)),
        ("c", Ack(101, 0, 1, 1, 3, 2, False)),
        served("a", 3),
        served("b", 3),
    ]
    assert set(talk.weights()[REAL]) == {-7}
    assert len(talk.shard.parameters._buffers) == 2, "no version in between was ever written"
    _, rows = talk.shard.metrics.since(0)
    assert rows.dtype == RECORD
    assert rows["apply_version"].tolist() == [1, 2, 3]
    assert rows["pass_pushes"].tolist() == [3, 3, 3]
    talk.say(push("d", 1), gradient(1))
    assert talk.shard.metrics.since(3)[1]["pass_pushes"].tolist() == [1]
    np.testing.assert_allclose(rows["gradient_norm"], np.array([1, 2, 4]) * REAL.size**0.5)
    assert (talk.shard.updates.steps, talk.shard.metrics.bytes_in) == (4, 16 * SIZE)


@pytest.mark.parametrize(
    "rule", [rule() for rule in RULES.values()], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_run_equals_one_after_another(rule: SGD, decay: float) -> None:
    """Whatever the rule, up to rounding; where sums are not allowed, bit for bit."""
    rng = np.random.default_rng(3)
    said = [
        (push(worker, seq), [rng.standard_normal(SIZE, np.float32).tobytes()])
        for seq in (1, 2)
        for worker in WORKERS
    ]
    talks = [
        talk_of(rule=rule, decay=Decay(decay), schedule=Step(base_rate=1.0, gamma=0.5, step_size=1))
        for _ in range(2)
    ]
    for one, frames in said:
        talks[0].say(one, frames)
    for start in (0, 3, 6):
        together(talks[1], *said[start : start + 3])
    results = []
    for talk in talks:
        talk.say(pull("a", 2))
        results.append(talk.weights()[REAL])
    if rule.additive and not decay:
        np.testing.assert_allclose(results[0], results[1], rtol=1e-5, atol=1e-6)
    else:
        np.testing.assert_array_equal(results[0], results[1])


def test_one_that_is_not_finite_is_refused_alone() -> None:
    """The others of its run are applied as if it had not arrived, and it may be repeated."""
    talk = talk_of()
    poisoned = gradient(1)
    poisoned[0] = poisoned[0][:-4] + np.float32(np.inf).tobytes()
    first, bad, last = together(
        talk, (push("a", 1), gradient(1)), (push("b", 1), poisoned), (push("c", 1), gradient(2))
    )
    assert (first, last) == (
        ("a", Ack(101, 0, 1, 1, 1, 0, False)),
        ("c", Ack(101, 0, 1, 1, 2, 1, False)),
    )
    assert refusal([bad]).remedy is Remedy.BAD_INPUT
    assert talk.say(push("b", 1), gradient(8)) == [("b", Ack(101, 0, 1, 1, 3, 2, False))]
    talk.say(pull("a", 1))
    assert set(talk.weights()[REAL]) == {-11}


def test_a_worker_has_one_push_in_a_run() -> None:
    """Its second push is judged after the first, a copy is a duplicate, and a gap is named."""
    talk = talk_of()
    answers = together(
        talk,
        (push("a", 1), gradient(1)),
        (push("a", 1), gradient(1)),
        (push("b", 2), gradient(1)),
        (push("a", 2), gradient(1)),
        (push("b", 1), gradient(1)),
    )
    assert [answer for _, answer in answers if isinstance(answer, Ack)] == [
        Ack(101, 0, 1, 1, 1, 0, False),
        Ack(101, 0, 1, 1, 1, 0, True),
        Ack(102, 0, 1, 2, 2, 1, False),
        Ack(101, 0, 1, 1, 3, 2, False),
    ]
    assert refusal([answers[2]]).remedy is Remedy.GAP
    assert together(talk) == []


def part_of_three_tensors() -> tuple[DensePart, NDArray[np.float32]]:
    """A part under plain SGD with gaps between its tensors, and the multiplier of each float."""
    tensors = tuple(
        TensorSpec(name, (size,), lr_mult=factor)
        for name, size, factor in (("a", 37, 1.0), ("b", 40, 2.0), ("c", 19, 0.5))
    )
    table = DenseTable("net", tensors)
    shard = spec(table=table, map=cut_evenly(Layout((table,)), 1))
    (section,) = shard.layout.sections(shard.keys)
    factors = np.zeros(table.size, np.float32)
    for tensor, start in zip(tensors, table.offsets, strict=True):
        factors[start : start + tensor.size] = tensor.lr_mult
    return DensePart(shard, shard.tables[0], section, HOST), factors


def test_a_lone_push_is_measured_as_it_is_applied() -> None:
    """The bits equal those of the rule itself, gaps are copied, and the norm covers all of it."""
    rng = np.random.default_rng(5)
    part, factors = part_of_three_tensors()
    weights, gradient, out = rng.standard_normal((3, len(factors)), np.float32)
    (squares,) = part.apply(weights, [gradient], out, 0.5, None)
    assert out.tobytes() == (weights - 0.5 * factors * gradient).tobytes()
    assert squares == pytest.approx(float(gradient @ gradient), rel=1e-5)


@pytest.mark.parametrize("piece", [1, 7, 64, 100, 1000])
def test_pieces_change_nothing(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However the array is cut, each float is updated with its own multiplier, or only copied."""
    monkeypatch.setattr(dense_part, "_SUM_PIECE", piece)
    rng = np.random.default_rng(4)
    part, factors = part_of_three_tensors()
    weights, out = rng.standard_normal((2, len(factors)), np.float32)
    gradients = list(rng.standard_normal((3, len(factors)), np.float32))
    squares = part.apply(weights, gradients, out, 0.5, None)
    total = gradients[0] + gradients[1] + gradients[2]
    np.testing.assert_array_equal(out, weights - 0.5 * factors * total)
    np.testing.assert_allclose(squares, [float(g @ g) for g in gradients], rtol=1e-5)
