"""Images as Spark's own data source `image` reads them, in a column of structs."""

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow as pa
import pytest

import worker
from shards.errors import BadInput
from worker.data.columns import DATA
from worker.data.encoded import decode_images

NET = """name: "colours"
layer { name: "data" type: "MemoryData" top: "data" top: "label"
  memory_data_param { batch_size: 4 channels: 3 height: 4 width: 6 }
  transform_param { scale: 0.00390625 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 4 kernel_size: 3 weight_filler { type: "xavier" } } }
layer { name: "ip" type: "InnerProduct" bottom: "conv" top: "ip"
  inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy"
  include { phase: TEST } }
"""
SOLVER = """net: "net.prototxt" base_lr: 0.1 lr_policy: "fixed" max_iter: 30 momentum: 0.9
test_iter: 4 test_interval: 100
"""


def value(image: Any, **changes: Any) -> dict[str, Any]:
    """An image (height, width, channels) in Spark's schema."""
    height, width, channels = image.shape
    modes = {1: 0, 3: 16, 4: 24}
    return {
        "origin": "here",
        "height": height,
        "width": width,
        "nChannels": channels,
        "mode": modes[channels],
        "data": image.tobytes(),
    } | changes


def pixels(values: list[Any]) -> Any:
    """The pixels of a column with these values, rows first."""
    (batch,) = decode_images([pa.record_batch({"data": values})], [DATA], "rows")
    shape = [batch.column(name)[0].as_py() for name in ("channels", "height", "width")]
    content = b"".join(batch.column("data").to_pylist())
    return np.frombuffer(content, np.uint8).reshape(-1, *shape)


def test_the_channels_come_first() -> None:
    """The order of the channels stays; an image that Spark could not read is skipped."""
    images = np.random.default_rng(1).integers(0, 256, (3, 4, 6, 3), np.uint8)
    unread = value(images[0], height=-1, width=-1, nChannels=-1, mode=-1, data=b"")
    found = pixels([value(images[0]), unread, value(images[1]), value(images[2])])
    np.testing.assert_array_equal(found, images.transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"mode": 21},
            "rows: row 1: expected an image of 2x2x3 bytes, got 12 bytes of OpenCV's ty",
        ),
        ({"data": b"short"}, "rows: row 1: expected an image of 2x2x3 bytes, got 5 bytes of"),
        ({"height": 1, "width": 4}, "rows: row 1: expected an image of 3x2x2, got 3x1x4: give all"),
    ],
)
def test_an_image_that_does_not_fit(changes: dict[str, Any], message: str) -> None:
    image = np.zeros((2, 2, 3), np.uint8)
    with pytest.raises(BadInput, match=message):
        pixels([value(image), value(image, **changes)])


def test_a_net_trains_on_a_folder_that_spark_reads(spark: Any, tmp_path: Path) -> None:
    """The label is a column of the folders' names; a test and features read the same images."""
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    for label in range(2):
        folder = tmp_path / "images" / f"label={label}"
        folder.mkdir(parents=True)
        for number in range(8):
            image = np.full((4, 6, 3), number, np.uint8)
            image[:, :, label] = 200
            cv2.imwrite(str(folder / f"{number}.png"), image)
    df = spark.read.format("image").load(str(tmp_path / "images"))
    model = worker.Caffe(tmp_path / "solver.prototxt", test_data=df)
    trained = worker.train(df, model=model, workers=2, shards_in="processes")
    assert trained.evaluations[-1].figures["accuracy"] == 1
    weights = trained.save(tmp_path / "weights.safetensors")
    found = worker.features(df, net=tmp_path / "net.prototxt", weights=weights, blobs=["ip"])
    assert all(np.argmax(row.ip) == row.label for row in found.collect())
