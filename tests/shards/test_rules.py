"""Update rules against a serial NumPy loop, the real Caffe's numbers, and their contracts."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from cupy_kernels.ops.updates import sgd_measured
from shards.errors import BadInput
from shards.rules import (
    FTRL,
    RULES,
    SGD,
    AdaDelta,
    Adagrad,
    Adam,
    AdamW,
    AdaptiveDelayCompensation,
    Decay,
    DecayKind,
    DelayCompensation,
    DelayedNesterov,
    Floats,
    Momentum,
    Nesterov,
    RMSProp,
    Rule,
)
from shards.run_plans import cover_gaps
from shards.schedules import Exp, Fixed, Inv, Schedule, Sigmoid, Step
from shards.tables import DenseTable, KeyRange, RateRun, TensorSpec, segments

Doubles = NDArray[np.float64]
SEED = 1847
NO_DECAY = Decay()


def normal(size: int, seed: int) -> Floats:
    return np.random.default_rng(seed).standard_normal(size, np.float32)


def slots_of(rule: Rule, size: int) -> tuple[Floats, ...]:
    return tuple(np.zeros(size, np.float32) for _ in rule.slot_names)


TABLE = DenseTable(
    "toy",
    (
        TensorSpec("conv", (5, 5, 7)),
        TensorSpec("conv.bias", (7,), lr_mult=2.0, decay_mult=0.0),
        TensorSpec("ip", (12, 31), lr_mult=0.5, decay_mult=2.0),
        TensorSpec("ip.bias", (12,), lr_mult=0.0),
    ),
)


def test_a_serial_loop_and_a_shard_agree_bit_for_bit() -> None:
    """SGD and momentum with multipliers and decay equal a plain loop over NumPy tensors."""
    for rule, mu in ((SGD(), 0.0), (Momentum(0.9), 0.9)):
        arena, rate, weight = TABLE.empty(), 0.05, 0.01
        serial = {}
        for number, (name, view) in enumerate(TABLE.views(arena).items()):
            view[...] = normal(view.size, SEED + number).reshape(view.shape)
            serial[name] = view.copy()
        history = {name: np.zeros_like(view) for name, view in serial.items()}
        slots, pieces = slots_of(rule, TABLE.size), segments(TABLE, KeyRange(0, TABLE.size))
        for count in range(1, 6):
            grad = TABLE.empty()
            for number, view in enumerate(TABLE.views(grad).values()):
                view[...] = normal(view.size, 100 * count + number).reshape(view.shape)
            for tensor in TABLE.tensors:
                own, name = TABLE.views(grad)[tensor.name], tensor.name
                own = own + np.float32(weight) * np.float32(tensor.decay_mult) * serial[name]
                step = np.float32(rate) * np.float32(tensor.lr_mult) * own
                history[name] = np.float32(mu) * history[name] + step
                serial[name] = serial[name] - history[name]
            out = np.full_like(arena, np.nan)
            rule.apply(arena, grad, slots, out, pieces, rate=rate, decay=Decay(weight), count=count)
            arena = out
        for name, view in TABLE.views(arena).items():
            assert view.tobytes() == serial[name].tobytes(), (rule, name)


@pytest.mark.parametrize("name", sorted(RULES))
def test_two_shards_equal_one(name: str) -> None:
    """A table cut between two shards trains to the same bits, even if the cut is through the middle
    of a tensor and the rule allows that."""
    rule, size, decay = RULES[name](), TABLE.size, Decay(0.02)
    trained = []
    first, second = TABLE.offsets[1:3] if rule.whole_tensors else (256, 512)
    for bounds in ((0, size), (0, first, size), (0, first, second, size)):
        parts = []
        for low, high in pairwise(bounds):
            pieces, slots = segments(TABLE, KeyRange(low, high)), slots_of(rule, high - low)
            weights = normal(size, SEED)[low:high]
            for count in range(1, 4):
                out = np.full(high - low, np.nan, np.float32)
                gradient = normal(size, SEED + count)[low:high]
                rule.apply(
                    weights, gradient, slots, out, pieces, rate=0.1, decay=decay, count=count
                )
                weights = out
            parts.append(weights)
        trained.append(np.concatenate(parts).tobytes())
    assert trained[0] == trained[1] == trained[2]


@pytest.mark.parametrize("name", sorted(RULES))
def test_padding_stays_zero_and_every_float_is_written(name: str) -> None:
    """Weights in the padding are copied, zeros to zeros, into an output that started as NaN."""
    rule, arena, grad = RULES[name](), TABLE.empty(), TABLE.empty()
    for view in (*TABLE.views(arena).values(), *TABLE.views(grad).values()):
        view[...] = 1
    padding = arena == 0
    assert padding.any()
    out, slots = np.full_like(arena, np.nan), slots_of(rule, arena.size)
    before = arena.copy()
    pieces = segments(TABLE, KeyRange(0, TABLE.size))
    rule.apply(arena, grad, slots, out, pieces, rate=0.1, decay=Decay(0.1), count=1)
    assert np.array_equal(out[padding], arena[padding])
    assert np.isfinite(out).all()
    assert not any(slot[padding].any() for slot in slots)
    assert np.array_equal(arena, before), "the version that was read has changed"


@pytest.mark.parametrize("name", sorted(RULES))
def test_a_buffer_loses_the_gradient_under_every_rule(name: str) -> None:
    """Whatever the rate, the decay and the slots; other tensors do not notice it."""
    rule, tensors = RULES[name](), (TensorSpec("w", (70,)), TensorSpec("b", (5,), buffer=True))
    results = []
    for table in (DenseTable("t", tensors), DenseTable("t", tensors[:1])):
        arena, grad, out = table.empty(), table.empty(), table.empty()
        for seed, filled in enumerate((arena, grad)):
            for view in table.views(filled).values():
                view[...] = normal(view.size, SEED + view.size + seed)
        pieces = segments(table, KeyRange(0, table.size))
        slots = slots_of(rule, arena.size)
        rule.apply(arena, grad, slots, out, pieces, rate=0.1, decay=Decay(0.1), count=1)
        results.append(table.views(out)["w"])
        if "b" in table.views(out):
            np.testing.assert_array_equal(
                table.views(out)["b"], table.views(arena)["b"] - table.views(grad)["b"]
            )
            measured = np.empty_like(out)
            sgd_measured(arena, grad, measured, cover_gaps(pieces, out.size, 0.1))
            np.testing.assert_array_equal(table.views(measured)["b"], table.views(out)["b"])
    np.testing.assert_array_equal(results[0], results[1])


def test_an_output_that_overlaps_the_weights_is_refused() -> None:
    """A version may be on its way to a worker, so an update in place is a bug of ours."""
    weights, whole = normal(64, SEED), (RateRun(0, 64, 1.0, 1.0),)
    with pytest.raises(AssertionError, match="version"):
        SGD().apply(weights, normal(64, 1), (), weights, whole, rate=0.1, decay=NO_DECAY, count=1)


# The real Caffe's runs of a tiny network, and that network's gradient in float64.

SHAPES = {"conv": (3, 2, 3, 3), "conv.bias": (3,), "ip": (4, 12), "ip.bias": (4,)}
MULTIPLIERS = {"conv": (1, 1), "conv.bias": (2, 0), "ip": (0.5, 2), "ip.bias": (0, 1)}
TINY = DenseTable("tiny", tuple(TensorSpec(n, s, *MULTIPLIERS[n]) for n, s in SHAPES.items()))
CAFFE_RUNS: dict[str, tuple[Rule, Schedule, Decay]] = {
    "sgd_plain": (SGD(), Fixed(base_rate=0.1), NO_DECAY),
    "sgd_mom_wd_inv": (
        Momentum(0.9),
        Inv(base_rate=0.1, gamma=0.1, power=0.75),
        Decay(0.05),
    ),
    "sgd_L1": (Momentum(0.5), Fixed(base_rate=0.1), Decay(0.05, DecayKind.L1)),
    "sgd_step": (Momentum(0.9), Step(base_rate=0.1, gamma=0.5, step_size=2), NO_DECAY),
    "sgd_exp": (SGD(), Exp(base_rate=0.1, gamma=0.8), NO_DECAY),
    "sgd_sigmoid": (SGD(), Sigmoid(base_rate=0.1, gamma=0.5, step_size=3), NO_DECAY),
    "adagrad": (Adagrad(1e-8), Fixed(base_rate=0.1), Decay(0.01)),
    "adam": (Adam(0.9, 0.999, 1e-8), Fixed(base_rate=0.01), Decay(0.01)),
}


def tiny_gradient(
    weights: dict[str, Floats], images: Floats, labels: NDArray[np.int8]
) -> tuple[float, dict[str, Doubles]]:
    """Loss and gradients of convolution 3x3, ReLU, max pooling 2x2, inner product, softmax."""
    conv, bias, ip, ip_bias = (weights[name].astype(np.float64) for name in SHAPES)
    windows = sliding_window_view(images.astype(np.float64), (3, 3), axis=(2, 3))
    raw = np.einsum("nchwij,ocij->nohw", windows, conv) + bias[:, None, None]
    tiles = np.maximum(raw, 0).reshape(8, 3, 2, 2, 2, 2).swapaxes(3, 4).reshape(8, 3, 2, 2, 4)
    flat = tiles.max(axis=-1).reshape(8, 12)
    scores = flat @ ip.T + ip_bias
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    loss = float(-np.log(shares[np.arange(8), labels]).mean())
    d_scores = (shares - np.eye(4)[labels]) / 8
    d_flat = (d_scores @ ip).reshape(8, 3, 2, 2, 1)
    d_tiles = d_flat * (np.arange(4) == tiles.argmax(axis=-1)[..., None])
    d_raw = d_tiles.reshape(8, 3, 2, 2, 2, 2).swapaxes(3, 4).reshape(8, 3, 4, 4) * (raw > 0)
    return loss, {
        "conv": np.einsum("nohw,nchwij->ocij", d_raw, windows),
        "conv.bias": d_raw.sum(axis=(0, 2, 3)),
        "ip": d_scores.T @ flat,
        "ip.bias": d_scores.sum(axis=0),
    }


def fill(flat: NDArray[np.float32]) -> Floats:
    """An arena of TINY with the tensors that `flat` holds consecutively."""
    arena, start = TINY.empty(), 0
    for view in TINY.views(arena).values():
        view[...] = flat[start : start + view.size].reshape(view.shape)
        start += view.size
    return arena


@pytest.mark.parametrize("run", sorted(CAFFE_RUNS))
def test_eight_iterations_follow_the_real_caffe(run: str) -> None:
    """Weights after each update, losses, and the slots after four, are those of BVLC Caffe 1.0."""
    rule, schedule, decay = CAFFE_RUNS[run]
    data = np.load(Path(__file__).parents[1] / "data" / "caffe" / "solver_runs.npz")
    arena, slots = fill(data["start"]), slots_of(rule, TINY.size)
    pieces = segments(TINY, KeyRange(0, TINY.size))
    for step in range(8):
        loss, grads = tiny_gradient(TINY.views(arena), data["X"][step], data["Y"][step])
        assert loss == pytest.approx(data[f"{run}|losses"][step], rel=1e-5)
        gradient, out = TINY.empty(), TINY.empty()
        for name, view in TINY.views(gradient).items():
            if MULTIPLIERS[name][0]:  # Caffe computes no gradient for a frozen tensor
                view[...] = grads[name]
        rate = schedule.rate(step)
        rule.apply(arena, gradient, slots, out, pieces, rate=rate, decay=decay, count=step + 1)
        arena = out
        expected = fill(data[f"{run}|weights"][step])
        np.testing.assert_allclose(arena, expected, rtol=1e-5, atol=2e-6)
        if step == 3 and slots:
            for ours, theirs in zip(slots, data[f"{run}|slots"], strict=True):
                np.testing.assert_allclose(ours, fill(theirs), rtol=2e-4, atol=1e-7)


def test_a_rule_is_found_by_name_and_survives_the_wire() -> None:
    """The registry's names are the tags by which msgspec writes and reads a rule."""
    names = [
        "adadelta",
        "adagrad",
        "adam",
        "adamw",
        "dc_asgd",
        "dc_asgd_adaptive",
        "delayed_nesterov",
        "heloco",
        "mla",
        "momentum",
        "nesterov",
        "rmsprop",
        "sgd",
    ]
    assert sorted(RULES) == names
    for name in names:
        rule = RULES[name]()
        assert msgspec.to_builtins(rule)["rule"] == name
        packed = msgspec.msgpack.encode(rule)
        assert msgspec.msgpack.decode(packed, type=Rule) == rule


@pytest.mark.parametrize(
    ("rule", "fields", "text"),
    [
        (Momentum, {"momentum": 1.0}, "momentum: momentum: expected .0, 1., got 1"),
        (Nesterov, {"momentum": -0.1}, "nesterov: momentum: expected"),
        (RMSProp, {"decay_rate": float("nan")}, "rmsprop: decay_rate: expected"),
        (AdaDelta, {"momentum": 2.0}, "adadelta: momentum: expected"),
        (Adam, {"beta2": 1.0}, "adam: beta2: expected"),
        (AdamW, {"weight_decay": 1.0}, "adamw: weight_decay: expected"),
        (FTRL, {"beta": 0.0}, "ftrl: beta: expected more than 0 in float32, got 0"),
        (FTRL, {"l1": -1.0}, "ftrl: l1: expected 0 or more, got -1"),
        (DelayedNesterov, {"n": 0}, "delayed_nesterov: n: expected at least 1, got 0"),
        (DelayCompensation, {"versions": 65}, "dc_asgd: versions: expected 1 to 64, got 65"),
        (AdaptiveDelayCompensation, {"strength": -1.0}, "dc_asgd_adaptive: strength: expected"),
        (Adagrad, {"delta": 0.0}, "adagrad: delta: expected more than 0"),
        (Adam, {"delta": 1e-60}, "adam: delta: expected more than 0 in float32, got 1e-60"),
    ],
)
def test_a_senseless_rule_is_refused(rule: type[Rule], fields: dict[str, Any], text: str) -> None:
    """A hyperparameter that would divide zero by zero or diverge by itself is named."""
    with pytest.raises(BadInput, match=text):
        rule(**fields)
