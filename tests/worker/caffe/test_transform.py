"""Crop, mirror and mean of images: each pixel against Caffe's rule, written out pixel by pixel."""

from itertools import product
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from shards.errors import BadInput
from tests.support.fake_gpu import FakeGpu
from tests.support.model_training import Trained, same
from worker.caffe.blobs import read_blob, write_blob
from worker.caffe.device_model import DeviceModel
from worker.caffe.layer import StepKey
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description, Network
from worker.caffe.net_data import with_files
from worker.caffe.phases import Phase
from worker.training.model import Batch

C, H, W, CROP, ROWS = 3, 7, 6, 4, 9
Pixels = NDArray[np.uint8]


def layer(transform: str) -> str:
    return (
        'layer { name: "d" type: "Data" top: "data" top: "label" data_param { batch_size: 9 }'
        f" transform_param {{ {transform} }} }}"
    )


def images() -> Pixels:
    """Images without two equal pixels in a channel, so that a place is known by its value."""
    return np.arange(ROWS * C * H * W, dtype=np.uint64).astype(np.uint8).reshape(ROWS, C, H, W)


def means(folder: Path, seed: int = 4) -> tuple[Path, NDArray[np.float32]]:
    mean = np.random.default_rng(seed).uniform(0, 255, (C, H, W)).astype(np.float32)
    write_blob(folder / "mean.binaryproto", mean)
    return folder / "mean.binaryproto", mean


def seen(net: Network, pixels: Pixels, step: int = 0, seed: int = 1) -> NDArray[np.float32]:
    batch: Batch = {"data": pixels, "label": np.zeros(len(pixels), np.int64)}
    step_key = StepKey(step, seed)
    net.forward(net.table.empty(), net.prepare(batch, step_key), step_key)
    found: NDArray[np.float32] = net.blob("data")
    return found


def places(found: NDArray[np.float32], every: list[NDArray[np.float32]]) -> list[int]:
    """For each row of `found` the one of the images in `every` that it equals."""
    return [
        next(place for place, rows in enumerate(every) if np.array_equal(rows[row], found[row]))
        for row in range(len(found))
    ]


def every_result(mean: NDArray[np.float32], scale: float) -> list[NDArray[np.float32]]:
    """The batch for each possible crop and mirror, by Caffe's formula for one pixel at a time."""
    results = []
    for top, left, flip in product(range(H - CROP + 1), range(W - CROP + 1), (False, True)):
        out = np.empty((ROWS, C, CROP, CROP), np.float32)
        for row, c, y, x in np.ndindex(ROWS, C, CROP, CROP):
            place = (c, top + y, left + x)
            value = (np.float32(images()[row][place]) - mean[place]) * np.float32(scale)
            out[row, c, y, CROP - 1 - x if flip else x] = value
        results.append(out)
    return results


def test_training_crops_at_random_places_with_the_mean_of_each_place(tmp_path: Path) -> None:
    """Each row is one of the possible crops, flipped or not, less the mean at its own place. Equal
    seeds and steps give equal crops, others do not, and over some steps all crops are drawn."""
    path, mean = means(tmp_path)
    text = layer(f'crop_size: {CROP} mirror: true scale: 0.5 mean_file: "{path}"')
    net = Network(Description(text, data_shape=(C, H, W)))
    expected, drawn = every_result(mean, 0.5), []
    for step in range(40):
        found = seen(net, images(), step)
        drawn += places(found, expected)
        np.testing.assert_array_equal(found, seen(net, images(), step))
    assert set(drawn) == set(range(len(expected)))
    assert drawn[:ROWS] != drawn[ROWS : 2 * ROWS]
    assert places(seen(net, images(), 0, seed=2), expected) != drawn[:ROWS]


def test_tests_crop_in_the_centre_and_still_mirror() -> None:
    """In the TEST phase the crop is (size - crop) / 2 from the edges, rounded down."""
    text = layer(f"crop_size: {CROP} mirror: true")
    net = Network(Description(text, Phase.TEST, data_shape=(C, H, W)))
    centre = images()[:, :, 1 : 1 + CROP, 1 : 1 + CROP].astype(np.float32)
    drawn = places(seen(net, images()), [centre, centre[..., ::-1]])
    assert set(drawn) == {0, 1}
    plain = Network(Description(layer(f"crop_size: {CROP}"), Phase.TEST, data_shape=(C, H, W)))
    np.testing.assert_array_equal(seen(plain, images()), centre)


def test_the_net_is_built_for_the_crop_and_reads_whole_images() -> None:
    """The top has the size of the crop, a row of data that before it."""
    net = Network(Description(layer("crop_size: 4"), data_shape=(C, H, W)))
    assert net.blobs["data"] == (9, C, 4, 4)
    assert net.row_shape == (C, H, W)
    with pytest.raises(BadInput, match=r"expected shape \(n, 3, 7, 6\), got \(2, 3, 4, 4\)"):
        seen(net, np.zeros((2, C, 4, 4), np.uint8))


@pytest.mark.parametrize(("stated", "given"), [(CROP, H), (H, H), (H, None)])
def test_memory_data_states_its_size_before_or_after_the_crop(
    stated: int, given: int | None
) -> None:
    """Both ways of Caffe and of CaffeOnSpark; without data the size is that before the crop."""
    text = (
        'layer { name: "d" type: "MemoryData" top: "data" transform_param { crop_size: 4 }'
        f" memory_data_param {{ batch_size: 2 channels: 3 height: {stated} width: {stated} }} }}"
    )
    net = Network(Description(text, data_shape=None if given is None else (3, given, given)))
    assert (net.row_shape, net.blobs["data"]) == ((3, H, H), (2, 3, CROP, CROP))


def test_a_mean_of_another_size_is_refused(tmp_path: Path) -> None:
    """The error names the layer, the file and both sizes."""
    path, _ = means(tmp_path)
    text = layer(f'mean_file: "{path}"')
    expected = r"layer d \(Data\): mean_file .*: expected a mean of 3x8x6, .*, got 1x3x7x6"
    with pytest.raises(BadInput, match=expected):
        Network(Description(text, data_shape=(C, H + 1, W)))
    path.write_bytes(b"\xff" * 40)
    with pytest.raises(BadInput, match=r"layer d \(Data\): .*: expected one blob, got 40"):
        Network(Description(text, data_shape=(C, H, W)))
    path.unlink()
    with pytest.raises(BadInput, match=r"^net: layer d \(Data\): .*mean\.binaryproto: cannot be"):
        with_files(Description(text))


def test_a_mean_file_travels_with_the_net(tmp_path: Path) -> None:
    """A net that holds the file's bytes needs no file, such as one on another machine."""
    path, mean = means(tmp_path)
    files = {"elsewhere": path.read_bytes()}
    net = Network(Description(layer('mean_file: "elsewhere"'), data_shape=(C, H, W), files=files))
    np.testing.assert_array_equal(seen(net, images()), images() - mean)
    np.testing.assert_array_equal(read_blob(path), mean[None])


def test_a_device_trains_on_the_same_crops(tmp_path: Path) -> None:
    """Captured steps get their own crops, mirrors and means, as steps on the host do."""
    path, _ = means(tmp_path)
    text = layer(f'crop_size: {CROP} mirror: true scale: 0.01 mean_file: "{path}"') + (
        'layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param {'
        ' num_output: 2 weight_filler { type: "xavier" } } }'
        'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }'
    )
    description = Description(text, data_shape=(C, H, W))
    batches: list[Batch] = [
        {"data": np.roll(images(), step), "label": np.arange(ROWS) % 2} for step in range(4)
    ]
    found = Trained(DeviceModel(description, FakeGpu()), batches)
    same(found.weights, Trained(CaffeModel(description), batches).weights, 1e-5)
