"""Every layer type against the real Caffe: outputs, input gradients and tensor gradients.

Each case is one layer over inputs; the numbers were made by BVLC Caffe 1.0, the nets are our own.
"""

import shutil
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from cupy_kernels.backends import HOST, Backend, EmulatorBackend, as_host, copied
from cupy_kernels.emulator import Emulator
from cupy_kernels.types import AnyArray
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


def pooling(settings: str) -> Case:
    return Case("Pooling", f"pooling_param {{ {settings} }}")


def loss(settings: str = "") -> Case:
    return Case("SoftmaxWithLoss", settings, ("x", "l"))


def ignoring(mode: str) -> Case:
    return loss(f"loss_param {{ normalization: {mode} ignore_label: 2 }}")


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
    "dropout_test": Case("Dropout", "dropout_param { dropout_ratio: 0.4 }"),
    "softmax_axis1": Case("Softmax"),
    "softmaxloss_default": loss(),
    "softmaxloss_spatial_ignore_VALID": ignoring("VALID"),
    "softmaxloss_spatial_ignore_FULL": ignoring("FULL"),
    "softmaxloss_spatial_ignore_NONE": ignoring("NONE"),
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
    return Network(Description(text, Phase.TEST, file=name))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_a_layer_computes_what_caffe_computes(name: str, place: Backend) -> None:
    """Forward, then backward from the given top gradients or from the loss, on both backends."""
    net, given = build(name), numbers(name, "dout")
    start = net.table.empty()
    for index, tensor in numbers(name, "w").items():
        net.table.views(start)[f"L/{index}"][...] = tensor
    weights, out = copied(start, place), place.empty(start.shape, np.float32)
    net.forward(weights, numbers(name, "in"))
    for blob, expected in numbers(name, "out").items():
        assert net.blobs[blob] == expected.shape
        np.testing.assert_allclose(net.blob(blob), expected, rtol=2e-5, atol=2e-6)

    found = net.backward(weights, out, given or None)
    expected_din = {blob: d for blob, d in numbers(name, "din").items() if blob != "l"}
    assert found.keys() == expected_din.keys()
    for blob, expected in expected_din.items():
        np.testing.assert_allclose(found[blob], expected, rtol=2e-5, atol=2e-6)
    for index, expected in numbers(name, "dw").items():
        ours = net.table.views(as_host(out))[f"L/{index}"]
        np.testing.assert_allclose(ours, expected, rtol=2e-5, atol=1e-5)


def test_every_case_of_the_numbers_is_tested() -> None:
    """The table above and the numbers' file name the same cases."""
    assert set(CASES) == {key.split("|")[0] for key in NUMBERS}
