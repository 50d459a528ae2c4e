"""What data layers take from a batch, and what they refuse."""

import re

import numpy as np
import pytest

from shards.errors import BadInput
from tests.support.small_nets import SMALL, network, rows
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase
from worker.training.model import Batch


def data(transform: str = "", param: str = "batch_size: 4", kind: str = "Data") -> str:
    which = {"Data": "data_param", "MemoryData": "memory_data_param"}[kind]
    return (
        f'layer {{ name: "d" type: "{kind}" top: "data" top: "label" {which} {{ {param} }}'
        f" transform_param {{ {transform} }} }}"
    )


def seen(net: Network, batch: Batch) -> np.ndarray:
    net.forward(net.table.empty(), batch)
    return net.blob("data")


@pytest.mark.parametrize(
    ("transform", "mean"),
    [("", 0.0), ("mean_value: 8", 8.0), ("mean_value: 8 mean_value: 16", (8.0, 16.0))],
)
def test_pixels_are_shifted_then_scaled(transform: str, mean: float | tuple[float, ...]) -> None:
    """(pixel - mean) * scale with one mean, or one per channel, from uint8 to float32."""
    pixels = np.random.default_rng(1).integers(0, 256, (3, 2, 5, 4), np.uint8)
    text = data(f"scale: 0.5 {transform}")
    net = Network(Description(text, data_shape=(2, 5, 4)))
    expected = (pixels - np.reshape(np.array(mean, np.float64), (-1, 1, 1))) * 0.5
    found = seen(net, {"data": pixels, "label": np.zeros(3, np.int64)})
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected)


def test_the_image_size_comes_from_the_prototxt_or_from_the_data() -> None:
    """MemoryData may state it; Data never does; both may agree."""
    stated = "batch_size: 4 channels: 2 height: 5 width: 4"
    for text, given in (
        (data(param=stated, kind="MemoryData"), None),
        (data(param=stated, kind="MemoryData"), (2, 5, 4)),
        (data(kind="MemoryData"), (2, 5, 4)),
        (data(), (2, 5, 4)),
    ):
        net = Network(Description(text, data_shape=given))
        assert net.blobs == {"data": (4, 2, 5, 4), "label": (4,)}


@pytest.mark.parametrize(
    ("text", "given", "error"),
    [
        (data(), None, "the prototxt states no image size; expected data_shape"),
        (data(param=""), (2, 5, 4), "expected a batch_size of at least 1"),
        (data("crop_size: 5"), (2, 5, 4), "expected a crop_size of at most 4, got 5"),
        (data('mean_file: "m" mean_value: 1'), (2, 5, 4), "expected a mean_file or mean_value"),
        (data("mean_value: [1, 2, 3]"), (2, 5, 4), "expected 1 or 2 mean_value entries"),
        (data(param="batch_size: 4 rand_skip: 3"), (2, 5, 4), "data_param.rand_skip"),
        (
            data(param="batch_size: 4 channels: 1 height: 5 width: 4", kind="MemoryData"),
            (2, 5, 4),
            r"expected images of shape \(1, 5, 4\), the data has \(2, 5, 4\)",
        ),
        (
            (
                'layer { name: "i" type: "Input" top: "x" top: "y" top: "z"'
                " input_param { shape { dim: 1 } shape { dim: 2 } } }"
            ),
            None,
            "expected 1 or 3 shapes for 3 tops, got 2",
        ),
        (
            'layer { name: "i" type: "Input" top: "x" input_param { shape { dim: 0 } } }',
            None,
            "expected dimensions of at least 1",
        ),
    ],
)
def test_a_data_layer_that_makes_no_sense_is_refused(
    text: str, given: tuple[int, int, int] | None, error: str
) -> None:
    """The error names the layer, the field or both shapes."""
    with pytest.raises(BadInput, match=rf"net: layer [di] \((Data|MemoryData|Input)\): .*{error}"):
        Network(Description(text, data_shape=given))


def without(batch: Batch, name: str) -> Batch:
    return {key: value for key, value in batch.items() if key != name}


@pytest.mark.parametrize(
    ("batch", "error"),
    [
        (without(rows(), "label"), "layer rows (MemoryData): expected a column label in the batch"),
        ({**rows(), "data": np.zeros((4, 2, 6, 5))}, "(n, 2, 6, 6), got (4, 2, 6, 5)"),
        ({**rows(), "label": np.zeros(3)}, "expected columns of one length, got {'data': 4,"),
        ({"data": np.zeros((0, 2, 6, 6)), "label": np.zeros(0)}, "expected at least one row"),
        (
            {**rows(), "label": np.array([0, 1, 4, 2])},
            "layer loss (SoftmaxWithLoss): label: expected whole labels in [0, 4), got 4",
        ),
        ({**rows(), "label": np.array([0, -1, 3, 2])}, "expected whole labels in [0, 4), got -1"),
        ({**rows(), "label": np.array([0, 1.5, 3, 2])}, "expected whole labels in [0, 4), got 1.5"),
        (
            {**rows(), "label": np.array([0, np.nan, 3, 2])},
            "expected whole labels in [0, 4), got nan",
        ),
        ({**rows(), "data": np.full((4, 2, 6, 6), "x")}, "column data: expected numbers, got"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(batch: Batch, error: str) -> None:
    """The error names the layer, the column, and what was expected."""
    model = CaffeModel(Description(SMALL))
    with pytest.raises(BadInput, match=re.escape(error)):
        model.gradient(model.initial(1), batch, model.table.empty(), step=0, seed=0)


def test_an_ignored_label_may_lie_outside_the_classes() -> None:
    """255 marks what is not labelled; the row counts neither for the loss nor for accuracy."""
    text = SMALL.replace('top: "loss"', 'top: "loss" loss_param { ignore_label: 255 }').replace(
        'top: "accuracy"', 'top: "accuracy" accuracy_param { ignore_label: 255 }'
    )
    model = CaffeModel(Description(text, Phase.TEST))
    weights, four = model.initial(1), rows(4)
    three = {name: column[1:] for name, column in four.items()}
    four = {**four, "label": np.array([255, *three["label"]])}
    assert model.outputs(weights, four) == pytest.approx(model.outputs(weights, three), rel=1e-6)


def test_whole_floats_are_labels() -> None:
    """Labels that came as float64, as Spark columns may, train as integers do."""
    net = network(SMALL)
    weights, batch = net.initial(1), rows()
    net.forward(weights, batch)
    expected = net.loss()
    net.forward(weights, {**batch, "label": batch["label"].astype(np.float64)})
    assert net.loss() == expected
