"""`downpour data`: every format that it writes reads back the same, and its facts are right."""

from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from msgspec.structs import replace

from deploy.run.data_tools import WRITERS, arrays, convert, inspect, mean_of
from shards.errors import BadInput
from worker.caffe.blobs import read_blob
from worker.data.read_options import ReadOptions
from worker.data.source import images_as_batch
from worker.data.sources import open_with

MNIST = Path(__file__).parents[2] / "data" / "caffe" / "databases" / "mnist500_lmdb"
WANTED = ReadOptions()


def everything(data: Path, options: ReadOptions = WANTED) -> tuple[np.ndarray, np.ndarray]:
    """All images and labels, sorted: a folder of classes is read in a random order."""
    parts = list(arrays(open_with(data, options), options))
    images, labels = (np.concatenate(each) for each in zip(*parts, strict=True))
    order = np.lexsort((*images.reshape(len(images), -1).T, labels))
    return images[order], labels[order]


@pytest.mark.parametrize("kind", WRITERS)
def test_what_is_converted_reads_back_the_same(tmp_path: Path, kind: str) -> None:
    """Images and labels survive in every format."""
    out = tmp_path / ("made.parquet" if kind == "parquet" else "made")
    assert convert(MNIST, out, kind, WANTED) == 500
    for found, expected in zip(everything(out), everything(MNIST), strict=True):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(BadInput, match="expected a place for new files, got one that exists"):
        convert(MNIST, out, kind, WANTED)


def test_labels_with_gaps_survive_in_folders(tmp_path: Path) -> None:
    """Labels are places among the folders, so those without images have a folder, too."""
    images = np.full((2, 1, 3, 3), 7, np.uint8)
    batch = images_as_batch(np.arange(2), np.array([1, 3]), images)
    pq.write_table(pa.Table.from_batches([batch]), tmp_path / "a.parquet")
    convert(tmp_path / "a.parquet", tmp_path / "folder", "folder", WANTED)
    assert everything(tmp_path / "folder")[1].tolist() == [1, 3]
    pq.write_table(
        pa.Table.from_batches([images_as_batch(np.arange(2), np.array([1, -1]), images)]),
        tmp_path / "b.parquet",
    )
    with pytest.raises(BadInput, match=r"expected labels in \[0, 9999\], got -1"):
        convert(tmp_path / "b.parquet", tmp_path / "other", "folder", WANTED)


def test_images_are_resized_on_the_way(tmp_path: Path) -> None:
    """Whatever the source is."""
    smaller = replace(WANTED, resize=(14, 10))
    convert(MNIST, tmp_path / "a.parquet", "parquet", WANTED)
    convert(tmp_path / "a.parquet", tmp_path / "b", "lmdb", smaller)
    np.testing.assert_array_equal(everything(tmp_path / "b")[0], everything(MNIST, smaller)[0])


def test_the_mean_is_that_of_all_images(tmp_path: Path) -> None:
    """For each channel as a number, and as an image in Caffe's file."""
    images, _ = everything(MNIST)
    (value,) = mean_of(MNIST, tmp_path / "mean.binaryproto", WANTED)
    assert value == pytest.approx(images.mean())
    found = read_blob(tmp_path / "mean.binaryproto")
    np.testing.assert_allclose(found, images.mean(axis=0)[None], rtol=1e-6)


@pytest.mark.parametrize("name", ["mean.png", "mean.npy", "mean"])
def test_a_mean_in_another_format_is_refused(name: str, tmp_path: Path) -> None:
    """Before the data is read: the file would not hold what its suffix says."""
    with pytest.raises(BadInput, match=r"--out .*/mean.*: expected a \.binaryproto file"):
        mean_of(tmp_path / "none", tmp_path / name, WANTED)
    assert not list(tmp_path.iterdir())


def test_an_inspection_counts_and_draws(tmp_path: Path) -> None:
    """The histogram is that of the labels; the sheet has ten columns of images, a row a label."""
    images, labels = everything(MNIST)
    found = inspect(MNIST, WANTED, tmp_path / "sheet.png")
    assert (found.rows, found.left_out, found.shape) == (500, 0, (1, 28, 28))
    assert found.labels == {label: int((labels == label).sum()) for label in range(10)}
    assert (found.mean, found.deviation) == pytest.approx((images.mean(), images.std()))
    assert "label 1        67  ########" in found.text()
    sheet = cv2.imread(str(tmp_path / "sheet.png"))
    assert sheet is not None
    assert sheet.shape == (10 * 68 + 4, 48 + 10 * 68, 3)


@pytest.mark.parametrize(
    ("kind", "error"),
    [("tfrecord", "--to: expected one of lmdb, parquet, idx, folder, got tfrecord")],
)
def test_a_format_that_is_not_written(tmp_path: Path, kind: str, error: str) -> None:
    """The error lists those that are."""
    with pytest.raises(BadInput, match=error):
        convert(MNIST, tmp_path / "made", kind, WANTED)


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """Colour images do not fit IDX, and no part of a folder stays behind."""
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        cv2.imwrite(str(tmp_path / "images" / name / "1.png"), np.zeros((4, 4, 3), np.uint8))
    with pytest.raises(BadInput, match="IDX: expected grey images of bytes, got 3 channels"):
        convert(tmp_path / "images", tmp_path / "made", "idx", WANTED)
    assert not (tmp_path / "made").exists()
