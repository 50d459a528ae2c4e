"""Every layer type against the real Caffe: outputs, input gradients and tensor gradients.

Each case is one layer over inputs; the numbers were made by BVLC Caffe 1.0, the nets are our own.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cupy_kernels.backends import HOST, Backend, EmulatorBackend, as_host, copy_to
from cupy_kernels.emulator import Emulator
from cupy_kernels.types import AnyArray
from shards.errors import BadInput
from worker.caffe.caffe_pb2 import BlobProto
from worker.caffe.layer import StepKey
from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase

PLACES: dict[str, Backend] = {"host": HOST}
if shutil.which("g++") is not None:
    PLACES["kernels"] = EmulatorBackend(Emulator())

NUMBERS = np.load(Path(__file__).parents[2] / "data" / "caffe" / "layers.npz")


class Case(NamedTuple):
    """A layer type, its settings, and how its inputs and outputs are called in the numbers."""

    type: str
    settings: str = ""
    inputs: tuple[str, ...] = ("x",)
    outputs: tuple[str, ...] = ("y",)
    phase: Phase = Phase.TEST


def pooling(settings: str) -> Case:
    return Case("Pooling", f"pooling_param {{ {settings} }}")


def loss(settings: str = "") -> Case:
    return Case("SoftmaxWithLoss", settings, ("x", "l"))


def ignoring(mode: str) -> Case:
    return loss(f"loss_param {{ normalization: {mode} ignore_label: 2 }}")


def reduction(operation: str) -> Case:
    return Case("Reduction", f"reduction_param {{ operation: {operation} axis: 1 coeff: 2 }}")


def recurrent(kind: str) -> Case:
    return Case(kind, "recurrent_param { num_output: 4 }", ("x", "cont"))


CASES = {
    "conv_basic": Case("Convolution", "convolution_param { num_output: 6 kernel_size: 3 }"),
    "conv_dilation2": Case(
        "Convolution",
        "convolution_param { num_output: 3 kernel_h: 3 kernel_w: 3 pad: 2 pad: 2 dilation: 2 }",
    ),
    "pool_MAX_k2s2": pooling("kernel_size: 2 stride: 2"),
    "pool_MAX_k3s2_ceil": pooling("kernel_size: 3 stride: 2"),
    "pool_MAX_k3s2p1": pooling("kernel_size: 3 stride: 2 pad: 1"),
    "pool_MAX_k3s1p1": pooling("kernel_size: 3 pad_h: 1 pad_w: 1"),
    "pool_MAX_k3s2p1_floor": pooling("kernel_size: 3 stride: 2 pad: 1 round_mode: FLOOR"),
    "pool_MAX_global": pooling("global_pooling: true"),
    "pool_AVE_k2s2": pooling("pool: AVE kernel_size: 2 stride: 2"),
    "pool_AVE_k3s2_ceil": pooling("pool: AVE kernel_size: 3 stride: 2"),
    "pool_AVE_k3s2p1": pooling("pool: AVE kernel_size: 3 stride: 2 pad: 1"),
    "pool_AVE_k3s1p1": pooling("pool: AVE kernel_size: 3 pad: 1"),
    "pool_AVE_hw": pooling(
        "pool: AVE kernel_h: 3 kernel_w: 2 stride_h: 2 stride_w: 3 pad_h: 1 pad_w: 0"
    ),
    "ip_axis1": Case("InnerProduct", "inner_product_param { num_output: 5 }"),
    "ip_transpose_nobias": Case(
        "InnerProduct", "inner_product_param { num_output: 5 transpose: true bias_term: false }"
    ),
    "relu": Case("ReLU"),
    "relu_leaky": Case("ReLU", "relu_param { negative_slope: 0.1 }"),
    "prelu": Case("PReLU"),
    "elu": Case("ELU", "elu_param { alpha: 0.7 }"),
    "sigmoid": Case("Sigmoid"),
    "tanh": Case("TanH"),
    "absval": Case("AbsVal"),
    "bnll": Case("BNLL"),
    "power": Case("Power", "power_param { power: 1.7 scale: 0.8 shift: 0.5 }"),
    "exp": Case("Exp", "exp_param { base: 2 scale: 0.5 shift: 0.1 }"),
    "log": Case("Log", "log_param { scale: 1.5 shift: 1 }"),
    "swish": Case("Swish", "swish_param { beta: 1.3 }"),
    "clip": Case("Clip", "clip_param { min: -0.5 max: 0.8 }"),
    "threshold": Case("Threshold", "threshold_param { threshold: 0.2 }"),
    "dropout_test": Case("Dropout", "dropout_param { dropout_ratio: 0.4 }"),
    "lrn_across_5": Case("LRN", "lrn_param { local_size: 5 alpha: 0.5 }"),
    "lrn_within_3": Case(
        "LRN", "lrn_param { local_size: 3 alpha: 0.5 norm_region: WITHIN_CHANNEL }"
    ),
    "bn_train": Case("BatchNorm", phase=Phase.TRAIN),
    "bn_train_2d": Case("BatchNorm", phase=Phase.TRAIN),
    "bn_test": Case("BatchNorm", "batch_norm_param { use_global_stats: true }"),
    "mvn": Case("MVN"),
    "scale_bias": Case("Scale", "scale_param { bias_term: true }"),
    "scale_two_bottoms": Case("Scale", inputs=("x", "y0")),
    "bias": Case("Bias"),
    "eltwise_sum_coeff": Case(
        "Eltwise", "eltwise_param { operation: SUM coeff: 1.5 coeff: -0.5 }", ("x", "y0")
    ),
    "eltwise_max": Case("Eltwise", "eltwise_param { operation: MAX }", ("x", "y0")),
    "concat_axis1": Case("Concat", inputs=("x", "y0")),
    "slice_points": Case(
        "Slice", "slice_param { slice_point: 1 slice_point: 4 }", outputs=("a", "b", "c")
    ),
    "flatten": Case("Flatten"),
    "reshape": Case("Reshape", "reshape_param { shape { dim: 0 dim: 2 dim: -1 } }"),
    "tile": Case("Tile", "tile_param { tiles: 3 }"),
    "crop": Case("Crop", "crop_param { axis: 2 offset: 1 offset: 2 }", ("x", "y0")),
    "reduction_SUM": reduction("SUM"),
    "reduction_ASUM": reduction("ASUM"),
    "reduction_MEAN": reduction("MEAN"),
    "argmax": Case("ArgMax", "argmax_param { top_k: 2 out_max_val: true }"),
    "spp": Case("SPP", "spp_param { pyramid_height: 2 }"),
    "lstm": recurrent("LSTM"),
    "rnn": recurrent("RNN"),
    "lstm_hidden": Case(
        "LSTM",
        "recurrent_param { num_output: 4 expose_hidden: true }",
        ("x", "cont", "h0", "c0"),
        ("y", "hT", "cT"),
    ),
    "softmax_axis1": Case("Softmax"),
    "softmaxloss_default": loss(),
    "softmaxloss_spatial_ignore_VALID": ignoring("VALID"),
    "softmaxloss_spatial_ignore_FULL": ignoring("FULL"),
    "softmaxloss_spatial_ignore_NONE": ignoring("NONE"),
    "sigmoidCE": Case("SigmoidCrossEntropyLoss", inputs=("x", "t01")),
    "euclid": Case("EuclideanLoss", inputs=("x", "y0")),
    "hingeL1": Case("HingeLoss", inputs=("x", "l")),
    "multinomial": Case("MultinomialLogisticLoss", inputs=("p", "l")),
    "contrastive": Case(
        "ContrastiveLoss", "contrastive_loss_param { margin: 2 }", ("x", "y0", "l")
    ),
    "accuracy_ties": Case("Accuracy", inputs=("xt", "l")),
    "accuracy_perclass": Case("Accuracy", inputs=("x", "l"), outputs=("y", "pc")),
}  # fmt: skip


def numbers(name: str, kind: str) -> dict[str, AnyArray]:
    """The arrays of one kind ("in", "w", "out", ...) of one case, by blob or tensor index."""
    start = f"{name}|{kind}/"
    return {key.removeprefix(start): NUMBERS[key] for key in NUMBERS if key.startswith(start)}


def build(name: str) -> Network:
    """A net of one layer under inputs of the case's shapes."""
    case, inputs = CASES[name], numbers(name, "in")
    text = "force_backward: true\n"
    for blob in case.inputs:
        dims = " ".join(f"dim: {size}" for size in inputs[blob].shape)
        text += f'layer {{ name: "{blob}" type: "Input" top: "{blob}"'
        text += f" input_param {{ shape {{ {dims} }} }} }}\n"
    blobs = [f'bottom: "{blob}"' for blob in case.inputs]
    blobs += [f'top: "{blob}"' for blob in case.outputs]
    text += f'layer {{ name: "L" type: "{case.type}" {" ".join(blobs)} {case.settings} }}'
    return Network(Description(text, case.phase, file=name))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_layer_computes_what_caffe_computes(name: str, place: Backend) -> None:
    """Forward, then backward from the given top gradients or from the loss, on both backends."""
    net, given = build(name), numbers(name, "dout")
    start = net.table.empty()
    for index, tensor in numbers(name, "w").items():
        net.table.views(start)[f"L/{index}"][...] = tensor
    weights, out = copy_to(start, place), place.empty(start.shape, np.float32)
    net.forward(weights, numbers(name, "in"))
    for blob, expected in numbers(name, "out").items():
        assert net.blobs[blob] == expected.shape
        np.testing.assert_allclose(net.blob(blob), expected, rtol=2e-5, atol=2e-6)

    found = net.backward(weights, out, given or None)
    for blob, expected in numbers(name, "din").items():
        if blob in found:
            np.testing.assert_allclose(found[blob], expected, rtol=2e-5, atol=2e-6)
        else:
            assert not expected.any(), f"{blob} has a gradient in Caffe, and none here"
    for index, expected in numbers(name, "dw").items():
        ours = net.table.views(as_host(out))[f"L/{index}"]
        if f"L/{index}" not in net.buffers:
            np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5)
    for index, expected in numbers(name, "w_after").items():
        change = net.table.views(as_host(out))[f"L/{index}"]
        after = net.table.views(start)[f"L/{index}"] - change
        np.testing.assert_allclose(after, expected, rtol=2e-5, atol=2e-6)


def test_every_case_of_the_numbers_is_tested() -> None:
    """The table above and the numbers' file name the same cases."""
    assert set(CASES) == {key.split("|")[0] for key in NUMBERS}


STOCHASTIC = """
    layer { name: "x" type: "Input" top: "x" input_param { shape { dim: 1 dim: 2 dim: 5 dim: 4 } } }
    layer { name: "y" type: "Pooling" bottom: "x" top: "y"
            pooling_param { pool: STOCHASTIC kernel_size: 2 stride: 2 } }
"""


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_stochastic_pooling(place: Backend) -> None:
    """A step draws one element of each window, whose gradient it gets, as often as its value says;
    a test takes the mean with the values as weights."""
    x = np.random.default_rng(3).random((1, 2, 5, 4), np.float32) + np.float32(0.1)
    net = Network(Description("force_backward: true" + STOCHASTIC, Phase.TRAIN))
    nothing = copy_to(net.table.empty(), place)
    window, steps = x[0, 0, :2, :2], 400
    counts = dict.fromkeys(window.ravel().tolist(), 0)
    for step in range(steps):
        net.forward(nothing, {"x": x}, StepKey(step, seed=5))
        y = net.blob("y")
        counts[float(y[0, 0, 0, 0])] += 1
    dx = net.backward(nothing, nothing, {"y": np.ones_like(y)})["x"]
    np.testing.assert_array_equal(np.unique(dx), [0, 1])
    np.testing.assert_allclose(np.sort((dx * x)[dx > 0]), np.sort(y.ravel()))
    for value, count in counts.items():
        share = value / window.sum()
        assert abs(count / steps - share) < 4 * (share * (1 - share) / steps) ** 0.5

    test = Network(Description(STOCHASTIC, Phase.TEST))
    test.forward(nothing, {"x": x})
    expected = (window**2).sum() / window.sum()
    assert test.blob("y")[0, 0, 0, 0] == pytest.approx(expected, rel=1e-5)
    assert test.blob("y")[0, 1, 2, 1] == pytest.approx(
        (x[0, 1, 4:, 2:] ** 2).sum() / x[0, 1, 4:, 2:].sum(), rel=1e-5
    )


def test_infogain_with_the_identity_is_the_softmax_loss(tmp_path: Path) -> None:
    """From a file of one blob; a matrix of another size, or no blob, is refused by its name."""
    file, text = tmp_path / "h.binaryproto", ""
    for name, sizes in (("x", (4, 5)), ("l", (4,))):
        dims = " ".join(f"dim: {size}" for size in sizes)
        text += f'layer {{ name: "{name}" type: "Input" top: "{name}"'
        text += f" input_param {{ shape {{ {dims} }} }} }}\n"
    entry = 'layer {{ name: "L" type: "{}" bottom: "x" bottom: "l" top: "y" {} }}'
    source = f'infogain_loss_param {{ source: "{file}" }}'
    losses, batch = [], numbers("softmaxloss_default", "in")
    for kind, settings in (("InfogainLoss", source), ("SoftmaxWithLoss", "")):
        file.write_bytes(
            BlobProto(shape={"dim": [5, 5]}, data=np.eye(5).ravel()).SerializeToString()
        )
        net = Network(Description(text + entry.format(kind, settings)))
        net.forward(net.table.empty(), batch)
        losses.append(net.loss())
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for content in (BlobProto(shape={"dim": [4]}, data=[0] * 4).SerializeToString(), b"no blob"):
        file.write_bytes(content)
        with pytest.raises(BadInput, match=r"h\.binaryproto: expected"):
            Network(Description(text + entry.format("InfogainLoss", source)))
