"""HDF5: files of columns by name, the nets that read them, and hostile files."""

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pytest

from shards.errors import BadInput
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.net_data import data_of
from worker.caffe.net_sources import open_net_data
from worker.data.arrow_columns import read_columns
from worker.data.source import Source
from worker.data.sources import open_source, row_shapes

DICE = np.random.default_rng(8)
X, Y = DICE.standard_normal((30, 4, 3)).astype(np.float32), DICE.standard_normal((30, 2))


def write(path: Path, start: int = 0, stop: int = 30, **more: Any) -> Path:
    with h5py.File(path, "w") as file:
        for name, values in ({"x": X[start:stop], "y": Y[start:stop]} | more).items():
            file[name] = values
    return path


def test_rows_of_several_files_by_name(tmp_path: Path) -> None:
    """A list of files is one sequence of rows, of which any range can be read."""
    write(tmp_path / "a.h5", 0, 12), write(tmp_path / "b.h5", 12, 30)
    (tmp_path / "list.txt").write_text("a.h5\nb.h5\n")
    source = open_source(tmp_path / "list.txt", tops=("x", "y"))
    assert (source.rows, row_shapes(source)) == (30, {"x": (4, 3), "y": (2,)})
    assert isinstance(source, Source)
    table = pa.Table.from_batches(list(source.batches(5, 9, 20)))
    assert table["id"].to_pylist() == list(range(9, 20))
    np.testing.assert_array_equal(np.array(table["x"].to_pylist()), X[9:20].reshape(11, -1))
    np.testing.assert_allclose(np.array(table["y"].to_pylist()), Y[9:20], rtol=1e-6)


@pytest.mark.parametrize(
    "content",
    [
        b"\xef\xbb\xbfa.h5\nsub/b c.H5\n",
        "a.h5\r\nsub\\b c.H5\r\n".encode("utf-16"),
        b"\n# files\n a.h5 \n\nsub/b c.H5",
    ],
    ids=["mark", "Windows", "blanks"],
)
def test_a_list_of_files_from_any_editor(tmp_path: Path, content: bytes) -> None:
    """All of its files are read."""
    (tmp_path / "sub").mkdir()
    write(tmp_path / "a.h5", 0, 12), write(tmp_path / "sub" / "b c.H5", 12, 30)
    (tmp_path / "list.txt").write_bytes(content)
    source = open_source(tmp_path / "list.txt", tops=("x", "y"))
    assert source.rows == 30


def test_a_list_of_files_with_other_suffixes(tmp_path: Path) -> None:
    """Caffe looks at none; files of MATLAB are HDF5, too."""
    write(tmp_path / "a.mat", 0, 12), write(tmp_path / "b", 12, 30)
    (tmp_path / "list.txt").write_text("a.mat\nb\n")
    assert open_source(tmp_path / "list.txt", tops=("x", "y")).rows == 30


def test_a_list_names_a_file_that_is_not_there(tmp_path: Path) -> None:
    """The error has the line, the name, and where it was looked for."""
    write(tmp_path / "a.h5")
    (tmp_path / "list.txt").write_text("a.h5\ngone.h5\n")
    line = (
        rf"list\.txt:2: expected the name of an HDF5 file, got gone\.h5, .* not in {tmp_path} or "
    )
    with pytest.raises(BadInput, match=line):
        open_source(tmp_path / "list.txt", tops=("x", "y"))


NET = """
layer {{ name: "rows" type: "HDF5Data" top: "x" top: "y"
         hdf5_data_param {{ source: "{source}" batch_size: 10 }} }}
layer {{ name: "ip" type: "InnerProduct" bottom: "x" top: "ip"
         inner_product_param {{ num_output: 2 weight_filler {{ type: "xavier" }} }} }}
layer {{ name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "y" top: "loss" }}
"""


def test_a_net_reads_the_datasets_that_its_tops_name(tmp_path: Path) -> None:
    """The shapes come from the file, the columns by name; the loss is Caffe's, 1/2N of squares."""
    text = NET.format(source=write(tmp_path / "rows.h5"))
    named = data_of(Description(text))
    source = open_net_data(named)
    model = CaffeModel(Description(text, row_shapes=row_shapes(source)))
    assert model.net.blobs["x"] == (10, 4, 3)
    batch = read_columns(next(iter(source.batches(10))), model.net.column_specs, "rows")
    weights = model.initial(1)
    views = model.table.views(weights)
    expected = X[:10].reshape(10, -1) @ views["ip/0"].T + views["ip/1"] - Y[:10]
    found = model.outputs(weights, batch)["loss"]
    assert found == pytest.approx(float(np.square(expected).sum()) / 20, rel=1e-5)


@pytest.mark.parametrize(
    ("more", "error"),
    [
        ({"y": Y[:7]}, "expected datasets with the same number of rows, got {'x': 30, 'y': 7}"),
        ({"y": np.array([b"a"] * 30)}, "dataset y: expected numbers with an axis of rows, got S"),
        ({"y": 1.0}, "dataset y: expected numbers with an axis of rows"),
        ({"y": np.full((30, 2), np.nan)}, "dataset y: row 0: expected finite numbers"),
        (
            {"y": h5py.ExternalLink("/etc/passwd", "/y")},
            "dataset y: expected a dataset of",
        ),
        (
            {"y": h5py.SoftLink("/nowhere")},
            "dataset y: expected a dataset of",
        ),
    ],
)
def test_datasets_that_do_not_fit(tmp_path: Path, more: dict[str, Any], error: str) -> None:
    """The error names the file and the dataset."""
    path = write(tmp_path / "rows.h5", **more)
    with pytest.raises(BadInput, match=error) as caught:
        list(open_source(path, tops=("x", "y")).batches())
    assert str(path) in str(caught.value)


def test_a_dataset_that_is_missing(tmp_path: Path) -> None:
    """The error lists those that are there."""
    with pytest.raises(BadInput, match="label: expected a dataset of the file, which has x"):
        open_source(write(tmp_path / "rows.h5"), tops=("x", "label"))


def test_values_in_another_file_are_refused(tmp_path: Path) -> None:
    """A file from outside must not make a worker read files of its machine."""
    write(tmp_path / "rows.h5")
    with h5py.File(tmp_path / "rows.h5", "a") as file:
        file.create_dataset("z", (30,), "f4", external=[("/etc/passwd", 0, 120)])
        layout = h5py.VirtualLayout((30,), "f4")
        layout[:] = h5py.VirtualSource("/etc/hosts", "x", (30,))
        file.create_virtual_dataset("v", layout)
    for name in ("z", "v"):
        with pytest.raises(BadInput, match=f"dataset {name}: expected values in this file, got a"):
            open_source(tmp_path / "rows.h5", tops=(name,))


def test_a_damaged_file_is_refused_or_read(tmp_path: Path) -> None:
    """Bytes overwritten, or the end cut off: BadInput, or finite rows."""
    whole = write(tmp_path / "rows.h5").read_bytes()
    refusals = list[str]()
    for seed in range(60):
        dice, data = np.random.default_rng(seed), bytearray(whole)
        for _ in range(4):
            data[int(dice.integers(2048))] = int(dice.integers(256))
        if seed % 4 == 0:
            del data[int(dice.integers(len(data))) :]
        (tmp_path / "bad.h5").write_bytes(data)
        try:
            source = open_source(tmp_path / "bad.h5", tops=("x", "y"))
            assert sum(len(batch) for batch in source.batches()) <= 30
        except BadInput as error:
            refusals.append(str(error))
    assert len(refusals) >= 15
    assert all("bad.h5" in error and "\n" not in error for error in refusals)
