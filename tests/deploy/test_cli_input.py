"""Networks, solvers and data that `downpour train` refuses, each in one line."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.support import tiny_job
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import TRAIN, refuses, swap, write_idx
from worker.data import image_decoding

NETWORKS = [
    (
        '"Convolution"',
        '"Convulsion"',
        r"net\.prototxt: layer conv \(Convulsion\): type not supported; .* Convolution",
    ),
    (
        "kernel_size",
        "kernel_sighs",
        r"net\.prototxt:7: layer conv .*: ConvolutionParameter has no field kernel_sighs;",
    ),
    (
        "kernel_size: 3",
        "kernel_size: 3 axis: 2",
        r"net\.prototxt: layer conv \(Convolution\): axis 2 is not supported; expected 1",
    ),
    (
        "height: 8",
        "height: 28",
        r"net\.prototxt: layer rows .*: expected images of shape \(1, 28, 8\), the data has \(1, ",
    ),
    (
        "kernel_size: 3",
        "kernel_size: 9",
        r"net\.prototxt: layer conv \(Convolution\): .*9",
    ),
    (
        '"ip2" bottom: "label" top: "loss"',
        '"conv" bottom: "label" top: "loss"',
        r"net\.prototxt: layer loss .*: expected a label for each of 288 rows .* of shape \(8,\)",
    ),
    (
        'top: "loss" }',
        'top: "loss" include { phase: TEST } }',
        r"net\.prototxt: expected a layer with a loss in the TRAIN phase, .*, got none",
    ),
    (
        'top: "loss" }',
        'top: "loss" loss_weight: 0 }',
        r"net\.prototxt: expected a layer with a loss in the TRAIN phase, .*, got none",
    ),
    (
        '"ip2" bottom: "label" top: "loss" }',
        '"ip2" bottom: "label" top: "loss" propagate_down: false propagate_down: false }',
        r"net\.prototxt: expected weights with an lr_mult other than 0 .*, got none",
    ),
]


@pytest.mark.parametrize(("old", "new", "line"), NETWORKS, ids=[new for _, new, _ in NETWORKS])
def test_wrong_networks(old: str, new: str, line: str, downpour: Run, job: Path) -> None:
    """Unknown layers and fields, and shapes that do not fit, are refused."""
    swap(job / "net.prototxt", old, new)
    refuses(downpour, job, TRAIN, line)


def test_fewer_rows_than_workers(downpour: Run, job: Path) -> None:
    """More workers than rows are refused, because one would have no data."""
    pq.write_table(tiny_job.image_table(3), job / "data/train.parquet")
    line = r"--workers: expected at most 3, as \S*data has 3 rows to train on .* got 5"
    refuses(downpour, job, f"{TRAIN} --workers 5", line)


def test_more_undecodable_images_than_allowed(downpour: Run, job: Path) -> None:
    """The limit is an option of the command."""
    table = tiny_job.image_table(20)
    pixels = np.frombuffer(b"".join(table["image"].to_pylist()), np.uint8).reshape(-1, 1, 8, 8)
    images = [b"no image", *map(image_decoding.encode, pixels[1:])]
    encoded = pa.table({"label": table["label"], "data": images, "encoded": [True] * 20})
    pq.write_table(encoded, job / "data/train.parquet")
    line = r"train\.parquet: rows 0 to 20: expected at most 0 images that cannot be decoded, got 1"
    refuses(downpour, job, f"{TRAIN} --skip-images 0", line)


SOLVERS = [
    (
        "base_lr: 0.1",
        'base_lr: 0.1 type: "Sgdd"',
        r"solver\.prototxt: solver type Sgdd is not supported; expected one of SGD, ",
    ),
    (
        "base_lr: 0.1",
        "base_lr: -0.1",
        r"solver\.prototxt: base_lr: expected more than 0, got -0\.1",
    ),
    ("base_lr: 0.1", "", r"solver\.prototxt: expected a base_lr, got none"),
    ("max_iter: 100", "max_iter: 0", r"solver\.prototxt: max_iter: expected at least 1, got 0"),
    (
        '"net.prototxt"',
        '"n.prototxt"',
        r"solver\.prototxt: net: expected a file, got n\.prototxt, ",
    ),
    ("base_lr: 0.1", "base_lr: 0", r"solver\.prototxt: base_lr: expected more than 0, got 0"),
    ("max_iter", "max_itr", r"solver\.prototxt:1: .*no field max_itr; expected one of"),
]


@pytest.mark.parametrize(("old", "new", "line"), SOLVERS, ids=[new for _, new, _ in SOLVERS])
def test_wrong_solvers(old: str, new: str, line: str, downpour: Run, job: Path) -> None:
    """Invalid solver files are refused."""
    swap(job / "solver.prototxt", old, new)
    refuses(downpour, job, TRAIN, line)


PARQUET = [
    ("train", {"label": [*[0] * 20, 7, *[1] * 9]}, r"label: row 20: expected .* \[0, 3\), got 7"),
    ("test", {"label": [3] * 30}, r"label: row 0: expected a label in \[0, 3\), got 3"),
    ("train", {"label": [-1] * 30}, r"label: row 0: expected a label .*, got -1"),
    ("train", {"label": [0.5] * 30}, r"label: row 0: expected a whole number, got 0\.5"),
    ("train", {"label": None}, r"expected a column label, got image"),
    ("train", {"image": None}, r"expected a column data or image, got label"),
    ("train", {"image": [b"\x89PNG...."] * 30}, r".*a PNG file, and only raw pixels are read"),
]


@pytest.mark.parametrize(("part", "columns", "line"), PARQUET)
def test_wrong_parquet(
    part: str, columns: dict[str, list[object] | None], line: str, downpour: Run, job: Path
) -> None:
    """Missing columns are named, and labels without a class are named by their row."""
    table = tiny_job.image_table(30)
    for name, values in columns.items():
        table = table.drop_columns(name)
        if values is not None:
            table = table.append_column(name, pa.array(values))
    pq.write_table(table, job / f"data/{part}.parquet")
    refuses(downpour, job, TRAIN, rf"{part}\.parquet(, column |: ){line}")


@pytest.mark.parametrize("part", ["train", "test"])
def test_truncated_parquet(part: str, downpour: Run, job: Path) -> None:
    """A truncated file is refused: Parquet keeps its index at the end."""
    path = job / f"data/{part}.parquet"
    path.write_bytes(path.read_bytes()[:500])
    refuses(downpour, job, TRAIN, rf"{part}\.parquet: expected a whole Parquet file, got ")


def test_test_data_without_a_test_net(downpour: Run, job: Path) -> None:
    """Test data that no net would be tested on is refused, not ignored."""
    swap(job / "solver.prototxt", "test_iter: 7", "")
    line = "--test-data .*/data: expected a solver with a test_iter, got one without"
    refuses(downpour, job, f"{TRAIN} --test-data data", line)


def test_a_wrong_test_net(downpour: Run, job: Path) -> None:
    """The test net is built before the training."""
    swap(job / "net.prototxt", '"Accuracy"', '"Accurate"')
    line = r"test on \S+/data: \S+/net\.prototxt: layer accuracy \(Accurate\): type not supported"
    refuses(downpour, job, TRAIN, line)


def test_test_data_of_another_shape(downpour: Run, job: Path) -> None:
    """The test is tried before the training."""
    table = pa.table({"label": [0], "image": [bytes(9 * 9)]})
    pq.write_table(table, job / "large.parquet")
    line = (
        r"test on \S*large\.parquet: .*layer rows .*of shape \(1, 8, 8\), the data has \(1, 9, 9\)"
    )
    refuses(downpour, job, f"{TRAIN} --test-data large.parquet", line)


def test_idx_labels_beyond_the_classes(downpour: Run, job: Path) -> None:
    """The net's last layer defines the number of classes."""
    write_idx(job / "data", classes=4)
    line = r"train-labels-idx1-ubyte: row 3: expected a label in \[0, 3\), got 3"
    refuses(downpour, job, TRAIN, line)


def test_truncated_idx(downpour: Run, job: Path) -> None:
    """A file with less data than its header promises is refused."""
    write_idx(job / "data")
    path = job / "data/t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:20])
    line = r"t10k-labels-idx1-ubyte: expected 30 bytes of data, .* got a file of 20 bytes"
    refuses(downpour, job, TRAIN, line)
