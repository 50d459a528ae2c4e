"""Networks run in kernels as they run on the host: the emulator executes every launch of a step."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from cupy_kernels.backends import EmulatorBackend, as_host, copy_to, empty
from cupy_kernels.emulator import Emulator
from cupy_kernels.emulator.array import Emulated
from cupy_kernels.launch import launch
from cupy_kernels.ops import updates
from cupy_kernels.ops.updates.spec import CHUNK, HYPER, MULTIPLIERS
from cupy_kernels.types import AnyArray, Array, Precision
from shards.errors import BadInput
from tests.support.small_nets import network
from worker.caffe.layer import StepKey
from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase
from worker.caffe.solver import read_solver
from worker.training.model import Batch

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")

DEMO = Path(__file__).parents[3] / "deploy" / "demo"
THERE = EmulatorBackend(Emulator())
MOMENTUM, RATE, DECAY = np.float32(0.9), np.float32(0.01), np.float32(0.0005)


def digits(count: int, seed: int, shape: tuple[int, int, int] = (1, 28, 28)) -> Batch:
    """Bytes and labels, as a data source gives them."""
    dice = np.random.default_rng(seed)
    images = dice.integers(0, 256, (count, *shape), np.uint8)
    return {"data": images, "label": dice.integers(0, 10, count)}


def lenet() -> Network:
    """The demo's own."""
    return Network(read_solver(DEMO / "lenet_solver.prototxt").train)


def step(net: Network, weights: Array, out: Array, batch: Batch, number: int = 0) -> None:
    """One forward and backward pass."""
    net.forward(weights, batch, StepKey(number, seed=1))
    net.backward(weights, out)


def update_on_host(net: Network, weights: Array, gradient: Array, history: Array) -> Array:
    """Momentum SGD by the CPU's loops, each tensor at its own rate."""
    table, out = net.table, np.empty_like(weights)
    sizes = [
        start + tensor.size for tensor, start in zip(table.tensors, table.offsets, strict=True)
    ]
    bounds = np.array(list(zip(table.offsets, sizes, strict=True)), np.int64)
    rates = RATE * np.array([tensor.lr_mult for tensor in table.tensors], np.float32)
    runs = updates.Runs(bounds, rates, np.full(len(rates), DECAY), l1=False)
    updates.apply("momentum", weights, gradient, (history,), out, runs, (MOMENTUM,))
    return out


def update_in_kernels(net: Network, weights: Array, gradient: Array, history: Array) -> Array:
    """The same by the fused kernel, in one launch over the arena."""
    multipliers = np.array([(t.lr_mult, 1) for t in net.table.tensors], MULTIPLIERS)
    groups = np.zeros(-(-weights.size // CHUNK), np.uint16)
    for number, start in enumerate(net.table.offsets):
        groups[start // CHUNK :] = number
    hyper = np.zeros(1, HYPER)
    hyper["rate"], hyper["decay"], hyper["keep"] = RATE, DECAY, MOMENTUM
    launch(
        "update_momentum",
        w=weights,
        g=gradient,
        history=history,
        out=weights,
        groups=copy_to(groups, THERE),
        multipliers=copy_to(multipliers.view(np.uint8), THERE),
        hyper=copy_to(hyper.view(np.uint8), THERE),
        verdict=None,
        n=weights.size,
    )
    return weights


def test_a_whole_lenet_step_equals_the_cpus() -> None:
    """Forward, backward and update, amid a run: the demo's prototxt, its arena, images of bytes.

    A float32 sum of up to 1,152 products in another order: within 2e-5 of the largest gradient of
    each tensor, and 1e-6 of the loss; the update within 1e-6 of each tensor's largest weight.
    """
    net, batch = lenet(), digits(3, seed=0)
    weights, gradient = net.initial(seed=4), net.table.empty()
    history = 1e-3 * net.initial(seed=5)
    there_weights, there_history = copy_to(weights, THERE), copy_to(history, THERE)
    there_gradient = empty(weights.shape, np.float32, there_weights)

    step(net, weights, gradient, batch)
    loss, updated = net.loss(), update_on_host(net, weights, gradient, history)
    step(net, there_weights, there_gradient, batch)
    update_in_kernels(net, there_weights, there_gradient, there_history)

    assert net.loss() == pytest.approx(loss, rel=1e-6)
    for got, expected, share in (
        (there_gradient, gradient, 2e-5),
        (there_weights, updated, 1e-6),
        (there_history, history, 2e-5),
    ):
        views = net.table.views(as_host(got))
        for name, view in net.table.views(expected).items():
            close(views[name], view, share, name)


EVERYTHING = """
layer { name: "rows" type: "MemoryData" top: "data" top: "label"
        transform_param { scale: 0.01 mean_value: 100 mean_value: 120 mean_value: 90 }
        memory_data_param { batch_size: 2 channels: 3 height: 16 width: 16 } }
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
        convolution_param { num_output: 8 kernel_size: 5 pad: 2 weight_filler { type: "xavier" } } }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
        pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "relu1" type: "ReLU" bottom: "pool1" top: "pool1" }
layer { name: "norm1" type: "LRN" bottom: "pool1" top: "norm1" lrn_param { alpha: 0.1 } }
layer { name: "conv2" type: "Convolution" bottom: "norm1" top: "conv2"
        convolution_param { num_output: 8 kernel_size: 5 pad: 2 group: 2 bias_term: false
                            weight_filler { type: "xavier" } } }
layer { name: "batch" type: "BatchNorm" bottom: "conv2" top: "conv2" }
layer { name: "scale" type: "Scale" bottom: "conv2" top: "conv2" scale_param { bias_term: true } }
layer { name: "relu2" type: "ReLU" bottom: "conv2" top: "conv2"
        relu_param { negative_slope: 0.1 } }
layer { name: "slope" type: "PReLU" bottom: "norm1" top: "slope" }
layer { name: "sum" type: "Eltwise" bottom: "conv2" bottom: "slope" top: "sum"
        eltwise_param { coeff: 1 coeff: -0.5 } }
layer { name: "join" type: "Concat" bottom: "sum" bottom: "norm1" top: "join" }
layer { name: "part" type: "Slice" bottom: "join" top: "front" top: "back"
        slice_param { slice_point: 10 } }
layer { name: "silence" type: "Silence" bottom: "back" }
layer { name: "tanh" type: "TanH" bottom: "front" top: "front" }
layer { name: "pool2" type: "Pooling" bottom: "front" top: "pool2"
        pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "drop" type: "Dropout" bottom: "pool2" top: "pool2" }
layer { name: "ip1" type: "InnerProduct" bottom: "pool2" top: "ip1" param { name: "shared" }
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "again" type: "InnerProduct" bottom: "pool2" top: "again" param { name: "shared" }
        loss_weight: 0.01
        inner_product_param { num_output: 10 weight_filler { type: "xavier" } } }
layer { name: "ip2" type: "InnerProduct" bottom: "pool2" top: "ip2"
        inner_product_param { num_output: 10 transpose: true weight_filler { type: "xavier" } } }
layer { name: "accuracy" type: "Accuracy" bottom: "ip1" bottom: "label" top: "accuracy" }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip1" bottom: "label" top: "loss" }
layer { name: "aux" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "aux"
        loss_weight: 0.3 loss_param { ignore_label: 3 } }
"""


SEQUENCES = """
layer { name: "words" type: "Input" top: "words" input_param { shape { dim: 3 dim: 2 } } }
layer { name: "cont" type: "Input" top: "cont" input_param { shape { dim: 3 dim: 2 } } }
layer { name: "image" type: "Input" top: "image"
        input_param { shape { dim: 2 dim: 3 dim: 6 dim: 6 } } }
layer { name: "rows" type: "Input" top: "rows" input_param { shape { dim: 2 } } }
layer { name: "gains" type: "Input" top: "gains" input_param { shape { dim: 5 dim: 5 } } }
layer { name: "embed" type: "Embed" bottom: "words" top: "embed"
        embed_param { input_dim: 5 num_output: 3 weight_filler { type: "gaussian" std: 1 } } }
layer { name: "mvn" type: "MVN" bottom: "image" top: "mvn" }
layer { name: "relu" type: "ReLU" bottom: "mvn" top: "mvn" }
layer { name: "pool" type: "Pooling" bottom: "mvn" top: "pool"
        pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 } }
layer { name: "feature" type: "InnerProduct" bottom: "pool" top: "feature"
        inner_product_param { num_output: 5 weight_filler { type: "xavier" } } }
layer { name: "lstm" type: "LSTM" bottom: "embed" bottom: "cont" bottom: "feature" top: "lstm"
        recurrent_param { num_output: 3 weight_filler { type: "gaussian" std: 1 } } }
layer { name: "rnn" type: "RNN" bottom: "lstm" bottom: "cont" top: "rnn"
        recurrent_param { num_output: 5 weight_filler { type: "gaussian" std: 1 } } }
layer { name: "next" type: "SoftmaxWithLoss" bottom: "rnn" bottom: "words" top: "next"
        softmax_param { axis: 2 } }
layer { name: "best" type: "ArgMax" bottom: "rnn" top: "best" argmax_param { axis: 2 } }
layer { name: "silence" type: "Silence" bottom: "best" }
layer { name: "swapped" type: "BatchReindex" bottom: "feature" bottom: "rows" top: "swapped" }
layer { name: "size" type: "Reduction" bottom: "swapped" top: "size" loss_weight: 0.1
        reduction_param { operation: SUMSQ } }
layer { name: "hinge" type: "HingeLoss" bottom: "feature" bottom: "rows" top: "hinge" }
layer { name: "pair" type: "ContrastiveLoss" bottom: "feature" bottom: "swapped" bottom: "rows"
        top: "pair" }
layer { name: "gain" type: "InfogainLoss" bottom: "feature" bottom: "rows" bottom: "gains"
        top: "gain" }
layer { name: "p" type: "Softmax" bottom: "feature" top: "p" }
layer { name: "log" type: "MultinomialLogisticLoss" bottom: "p" bottom: "rows" top: "log" }
layer { name: "apart" type: "EuclideanLoss" bottom: "feature" bottom: "swapped" top: "apart" }
layer { name: "cross" type: "SigmoidCrossEntropyLoss" bottom: "swapped" bottom: "p" top: "cross"
        propagate_down: true propagate_down: false loss_param { normalization: FULL } }
"""


def sequences(seed: int) -> Batch:
    """What the second net reads."""
    dice = np.random.default_rng(seed)
    return {
        "words": dice.integers(0, 5, (3, 2)),
        "cont": np.array([[0, 0], [1, 0], [1, 1]], np.float32),
        "image": dice.standard_normal((2, 3, 6, 6), np.float32),
        "rows": np.array([1, 0]),
        "gains": dice.standard_normal((5, 5), np.float32),
    }


NETS = {"images": (EVERYTHING, digits(2, 5, (3, 16, 16))), "sequences": (SEQUENCES, sequences(5))}
each_net = pytest.mark.parametrize(("text", "batch"), NETS.values(), ids=NETS)


@each_net
def test_a_net_of_every_layer_equals_the_cpus(text: str, batch: Batch) -> None:
    """Groups, branches, buffers, a shared tensor, dropout, sequences, all losses."""
    net, there = network(text), network(text)
    weights = net.initial(seed=2)
    gradient = np.empty_like(weights)
    there_weights = copy_to(weights, THERE)
    there_gradient = empty(weights.shape, np.float32, there_weights)
    step(net, weights, gradient, batch)
    step(there, there_weights, there_gradient, batch)
    assert there.loss() == pytest.approx(net.loss(), rel=1e-6)
    for name in net.blobs:
        close(there.blob(name), net.blob(name), 1e-5, name)
    views = net.table.views(as_host(there_gradient))
    for name, expected in net.table.views(gradient).items():
        close(views[name], expected, 2e-5, name)


WITH_LABELS = """
layer { name: "d" type: "MemoryData" top: "data" top: "label"
        memory_data_param { batch_size: 4 channels: 1 height: 1 width: 2 } }
layer { name: "score" type: "InnerProduct" bottom: "data" top: "score"
        inner_product_param { num_output: 1 weight_filler { type: "constant" value: 0.5 } } }
layer { name: "other" type: "Power" bottom: "score" top: "other" power_param { scale: 0 } }
"""
SCORES, LABELS = np.array([0.5, 2.5, 4.5, 6.5]), np.array([1, 0, 1, 0])  # (0 + 1) / 2 and so on


@pytest.mark.parametrize("in_kernels", [False, True])
@pytest.mark.parametrize(
    ("kind", "bottoms", "expected"),
    [
        ("EuclideanLoss", "score label", ((SCORES - LABELS) ** 2).sum() / 8),
        (
            "SigmoidCrossEntropyLoss",
            "score label",
            (np.log1p(np.exp(SCORES)) - LABELS * SCORES).sum() / 4,
        ),
        (
            "ContrastiveLoss",
            "score other label",
            np.where(LABELS, SCORES**2, np.maximum(1 - SCORES, 0) ** 2).sum() / 8,
        ),
    ],
)
def test_losses_read_the_integer_labels_of_a_data_layer(
    in_kernels: bool, kind: str, bottoms: str, expected: float
) -> None:
    """As numbers, one a row (n,) with scores (n, 1), as in Caffe."""
    named = " ".join(f'bottom: "{name}"' for name in bottoms.split())
    net = network(f'{WITH_LABELS} layer {{ name: "loss" type: "{kind}" {named} top: "loss" }}')
    weights = net.initial(seed=1)
    gradient = np.empty_like(weights)
    if in_kernels:
        weights = copy_to(weights, THERE)
        gradient = empty(weights.shape, np.float32, weights)
    batch = {"data": np.arange(8, dtype=np.float32).reshape(4, 1, 1, 2), "label": LABELS}
    step(net, weights, gradient, batch)
    assert net.loss() == pytest.approx(expected, rel=1e-5)
    assert np.isfinite(as_host(gradient)).all()


@each_net
def test_a_second_step_takes_no_memory_and_looks_at_nothing(
    text: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an allocation nor a read; what comes from the host is the batch and the step."""
    net = network(text)
    weights = copy_to(net.initial(seed=2), THERE)
    gradient = empty(weights.shape, np.float32, weights)
    step(net, weights, gradient, batch)
    reads, uploads = [], []
    load = EmulatorBackend.load

    def watched(place: EmulatorBackend, source: AnyArray, out: AnyArray) -> None:
        uploads.append(source.dtype)
        load(place, source, out)

    monkeypatch.setattr(EmulatorBackend, "as_host", lambda _, array: reads.append(array))
    monkeypatch.setattr(EmulatorBackend, "load", watched)
    before = Emulated.allocations
    step(net, weights, gradient, batch, 1)
    assert Emulated.allocations == before
    assert not reads
    assert len(uploads) == len(batch) + 1
    assert uploads[-1] == np.uint64


@each_net
def test_a_step_whose_inputs_live_there_takes_nothing_from_the_host(
    text: str, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns and step number in the place's own memory: the step could be captured as a graph."""
    net = network(text)
    weights = copy_to(net.initial(seed=2), THERE)
    first, second = (empty(weights.shape, np.float32, weights) for _ in range(2))
    step(net, weights, first, batch, number=7)
    loss = net.loss()
    columns = {name: copy_to(column, THERE) for name, column in batch.items()}
    number = copy_to(np.array([7], np.uint64), THERE)
    monkeypatch.setattr(EmulatorBackend, "load", None)
    net.forward(weights, columns, StepKey(number, seed=1))
    net.backward(weights, second)
    assert net.loss() == loss
    np.testing.assert_array_equal(as_host(first), as_host(second))


def test_a_network_moves_with_its_weights() -> None:
    """The same network runs on the host, in kernels, and on the host again."""
    net, batch = network(EVERYTHING, Phase.TEST), digits(2, 5, (3, 16, 16))
    weights = net.initial(seed=2)
    there, losses = copy_to(weights, THERE), []
    for arena in (weights, there, weights):
        net.forward(arena, batch)
        losses.append(net.loss())
    assert losses[0] == losses[2] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("precision", [Precision.TF32, Precision.BF16])
def test_a_network_may_round_its_factors(precision: Precision) -> None:
    """TF32 keeps 11 bits of each factor, bf16 8: the loss moves by as little, and does move."""
    rounded = Network(Description(EVERYTHING, precision=precision))
    weights, batch = rounded.initial(seed=2), digits(2, 5, (3, 16, 16))
    losses = []
    for net in (network(EVERYTHING), rounded):
        net.forward(copy_to(weights, THERE), batch)
        losses.append(net.loss())
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=2e-2)


def test_a_label_that_is_no_class_makes_the_loss_nan() -> None:
    """Kernels don't look at labels one by one; the host does, and raises, wherever the net runs."""
    net, batch = network(EVERYTHING), digits(2, 5, (3, 16, 16))
    weights = copy_to(net.initial(seed=2), THERE)
    for wrong in (np.array([1, 10]), np.array([1, 2.5])):
        net.forward(weights, {**batch, "label": copy_to(wrong.astype(np.float32), THERE)})
        assert np.isnan(net.loss())
        for there in (weights, as_host(weights)):
            with pytest.raises(BadInput, match="expected whole labels"):
                net.forward(there, {**batch, "label": wrong})


def close(got: AnyArray, expected: AnyArray, share: float, what: str) -> None:
    """Assert equality within a share of the largest value."""
    np.testing.assert_allclose(
        got, expected, rtol=0, atol=share * float(np.abs(expected).max()), err_msg=what
    )
