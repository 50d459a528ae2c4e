"""Inference over rows: every row counts once and equally, however the stream is cut."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from cupy_kernels.backends import EmulatorBackend, copy_to
from cupy_kernels.emulator import Emulator
from shards.errors import BadInput
from tests.support import tiny_job
from worker.caffe.inference import (
    check_blobs,
    evaluate,
    features,
    slices,
    to_batch,
)
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.phases import Phase
from worker.caffe.weight_files import write_weights
from worker.caffe.weights import read_weights

Floats = NDArray[np.float32]
ROWS = 23


@pytest.fixture(scope="module")
def model() -> CaffeModel:
    return CaffeModel(Description(tiny_job.NET, Phase.TEST, file="net.prototxt"))


@pytest.fixture(scope="module")
def weights(model: CaffeModel) -> Floats:
    """A start that is far from equal scores, so that rows differ in loss and in rightness."""
    return 3 * model.initial(7)


def stream(*sizes: int, table: pa.Table | None = None) -> Iterator[pa.RecordBatch]:
    """The rows in record batches of these sizes."""
    whole = (table or tiny_job.image_table(ROWS)).combine_chunks().to_batches()[0]
    start = 0
    for size in sizes:
        yield whole.slice(start, size)
        start += size
    assert start == whole.num_rows


@pytest.mark.parametrize("sizes", [(ROWS,), (5, 17, 1), (1,) * ROWS])
@pytest.mark.parametrize("batch_size", [1, 4, 22, 100])
def test_every_row_weighs_the_same(
    sizes: tuple[int, ...], batch_size: int, model: CaffeModel, weights: Floats
) -> None:
    """Loss and accuracy are means over rows, whatever is left over at the end of a batch."""
    each = [model.outputs(weights, to_batch(row)) for row in slices(stream(ROWS), 1)]
    found = evaluate(model, weights, stream(*sizes), batch_size)
    assert found.keys() == {"accuracy", "loss"}
    assert found["accuracy"] == pytest.approx(np.mean([row["accuracy"] for row in each]))
    assert found["loss"] == pytest.approx(np.mean([row["loss"] for row in each]), rel=1e-5)
    assert 0 < found["accuracy"] < 1


@pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")
def test_inference_runs_where_the_weights_live(model: CaffeModel, weights: Floats) -> None:
    """With weights in the emulator it runs in kernels, and gives what it gives on the host."""
    there = copy_to(weights, EmulatorBackend(Emulator()))
    found = evaluate(model, there, stream(ROWS), 10)
    assert found == pytest.approx(evaluate(model, weights, stream(ROWS), 10), rel=1e-5)
    (batch,) = features(model, there, stream(ROWS), ["ip1"], 100)
    (expected,) = features(model, weights, stream(ROWS), ["ip1"], 100)
    got = np.array(batch["ip1"].to_pylist())
    np.testing.assert_allclose(got, np.array(expected["ip1"].to_pylist()), rtol=1e-4, atol=1e-5)
    with pytest.raises(BadInput, match=r"label: expected whole labels in \[0, 3\), got 5$"):
        evaluate(model, there, stream(ROWS, table=relabelled(5)), 10)


def relabelled(label: int) -> pa.Table:
    """The rows, all with this label."""
    return tiny_job.image_table(ROWS).set_column(0, "label", pa.array([label] * ROWS))


def test_no_rows(model: CaffeModel, weights: Floats) -> None:
    """A mean over nothing is refused, and features of nothing are nothing."""
    with pytest.raises(BadInput, match=r"^net\.prototxt: expected rows to test on, got none$"):
        evaluate(model, weights, iter(()), 4)
    assert not list(features(model, weights, iter(()), ["ip1"], 4))


def test_damaged_images_are_left_out_up_to_a_limit(model: CaffeModel, weights: Floats) -> None:
    """Both functions take the limit for rows with encoded images, and name the row."""
    table = tiny_job.image_table(ROWS)
    images = [*table["image"].to_pylist()[:-1], b"\x89PNG\r\n\x1a\n damaged"]
    encoded = [row == ROWS - 1 for row in range(ROWS)]
    table = table.set_column(table.column_names.index("image"), "image", pa.array(images))
    table = table.append_column("encoded", pa.array(encoded))
    limit = r"^rows: expected at most 0 images .*, got 1, the last in row 22$"
    with pytest.raises(BadInput, match=limit):
        evaluate(model, weights, stream(ROWS, table=table), 4, skip_images=0)
    with pytest.raises(BadInput, match=limit):
        list(features(model, weights, stream(ROWS, table=table), ["ip1"], 4, skip_images=0))
    kept = features(model, weights, stream(ROWS, table=table), ["ip1"], 4, skip_images=1)
    assert pa.Table.from_batches(kept)["SampleID"].to_pylist() == list(range(ROWS - 1))


@pytest.mark.parametrize("sizes", [(ROWS,), (5, 17, 1)])
def test_features_are_the_blobs_of_each_row(
    sizes: tuple[int, ...], model: CaffeModel, weights: Floats
) -> None:
    """A list of float32 for each row and blob, in Caffe's order, with its id and label."""
    found = pa.Table.from_batches(features(model, weights, stream(*sizes), ["conv", "ip2"], 4))
    assert found.schema == pa.schema(
        [
            ("SampleID", pa.int64()),
            ("conv", pa.list_(pa.float32())),
            ("ip2", pa.list_(pa.float32())),
            ("label", pa.int64()),
        ]
    )
    whole = to_batch(next(stream(ROWS)))
    expected = model.forward(weights, whole, ["conv", "ip2"])
    assert found["SampleID"].to_pylist() == list(range(ROWS))
    assert found["label"].to_pylist() == whole["label"].tolist()
    for name, size in (("conv", 4 * 6 * 6), ("ip2", 3)):
        values = np.array(found[name].to_pylist(), np.float32)
        assert values.shape == (ROWS, size)
        np.testing.assert_allclose(values, expected[name].reshape(ROWS, size), rtol=1e-5, atol=1e-6)


def test_features_keep_ids_and_need_no_labels(model: CaffeModel, weights: Floats) -> None:
    """A row's own id is kept; where rows have no label there is no such column."""
    table = tiny_job.image_table(ROWS).drop_columns("label")
    table = table.append_column("id", pa.array(range(100, 100 + ROWS), pa.int32()))
    found = pa.Table.from_batches(features(model, weights, stream(9, 14, table=table), ["ip1"], 8))
    assert found.column_names == ["SampleID", "ip1"]
    assert found["SampleID"].to_pylist() == list(range(100, 100 + ROWS))


@pytest.mark.parametrize(
    ("blob", "line"),
    [
        (
            "ip9",
            "net.prototxt: expected blobs among data, label, conv, ip1, ip2, accuracy, loss, got",
        ),
        ("loss", "blob loss: expected a value per row, got shape ()"),
    ],
)
def test_blobs_that_cannot_be(blob: str, line: str, model: CaffeModel, weights: Floats) -> None:
    """An unknown blob and one of the whole batch are named."""
    with pytest.raises(BadInput, match=re.escape(line)):
        list(features(model, weights, stream(ROWS), [blob], 4))


def test_known_blobs_pass(model: CaffeModel) -> None:
    """All of the net's own blobs are ones to ask for."""
    check_blobs(model, list(model.net.blobs))


def test_slices_keep_every_row_in_order() -> None:
    """Pieces end where a record batch ends, and none is larger than asked."""
    pieces = list(slices(stream(5, 17, 1), 6))
    assert [piece.num_rows for piece in pieces] == [5, 6, 6, 5, 1]
    assert pa.Table.from_batches(pieces).equals(tiny_job.image_table(ROWS).combine_chunks())


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float64()), pa.binary()])
def test_rows_become_arrays(kind: Any) -> None:
    """Pixels as bytes or as numbers, of a shape that the rows may state."""
    pixels = np.arange(2 * 12).reshape(2, 12)
    column = [row.astype(np.uint8).tobytes() if kind == pa.binary() else row for row in pixels]
    arrays = {
        "data": pa.array(column, kind),
        "label": pa.array([1.0, 2.0]),
        **{name: pa.array([size] * 2) for name, size in zip(SHAPE, (3, 2, 2), strict=True)},
    }
    batch = to_batch(pa.record_batch(arrays))
    np.testing.assert_array_equal(batch["data"], pixels.reshape(2, 3, 2, 2))
    assert batch["data"].dtype == (np.uint8 if kind == pa.binary() else np.float32)
    assert batch["label"].tolist() == [1, 2]
    assert batch["label"].dtype == np.int64


SHAPE = ("channels", "height", "width")


def test_a_bad_row_is_counted_from_the_start(model: CaffeModel, weights: Floats) -> None:
    """An error names the row's place in the whole stream."""
    labels = [0.0] * ROWS
    labels[19] = 0.5
    table = tiny_job.image_table(ROWS).set_column(0, "label", pa.array(labels))
    with pytest.raises(BadInput, match=r"column label: row 19: expected a whole number, got 0\.5"):
        evaluate(model, weights, stream(5, 17, 1, table=table), 4)


# --- weights as files -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["w.caffemodel", "w.h5", "w.safetensors"])
def test_weights_come_back(name: str, model: CaffeModel, weights: Floats, tmp_path: Path) -> None:
    """Both kinds of file give back the arena, and are as readable as any other file."""
    path, other = tmp_path / name, tmp_path / "other"
    write_weights(path, model.net, weights)
    other.touch()
    assert {file.name for file in tmp_path.iterdir()} == {name, "other"}
    assert path.stat().st_mode == other.stat().st_mode
    every = {tensor.name for tensor in model.table.tensors}
    found, _ = read_weights(path, model.net, model.initial(1), every)
    np.testing.assert_array_equal(found, weights)


@pytest.mark.parametrize("name", ["w.caffemodel", "w.h5", "w.safetensors"])
def test_layers_that_the_file_lacks(
    name: str, model: CaffeModel, weights: Floats, tmp_path: Path
) -> None:
    """They keep their start, unless they are needed; a file without any layer is refused."""
    path, start = tmp_path / name, model.initial(1)
    older = CaffeModel(Description(tiny_job.NET.replace("ip2", "fc8"), file="older"))
    write_weights(path, older.net, weights)
    found = model.table.views(read_weights(path, model.net, start)[0])
    for tensor, kept in model.table.views(start).items():
        theirs = kept if tensor.startswith("ip2") else model.table.views(weights)[tensor]
        np.testing.assert_array_equal(found[tensor], theirs)
    needed = model.net.tensors_for(["ip1"])
    assert needed == {"conv/0", "conv/1", "ip1/0", "ip1/1"}
    read_weights(path, model.net, start, needed)
    line = rf"^{path}: expected weights of layer ip2, got a file without$"
    with pytest.raises(BadInput, match=line):
        read_weights(path, model.net, start, model.net.tensors_for(["loss"]))
    stranger = tiny_job.NET.replace('"conv"', '"c"').replace('"ip1"', '"i"').replace('"ip2"', '"o"')
    write_weights(path, CaffeModel(Description(stranger, file="stranger")).net, weights)
    with pytest.raises(BadInput, match=rf"^{path}: expected weights of layer conv, got a file"):
        read_weights(path, model.net, start)


def test_files_that_are_no_weights(model: CaffeModel, tmp_path: Path) -> None:
    """Each is named with what is wrong with it."""
    start = model.initial(1)
    truncated, shape = tmp_path / "t.safetensors", tmp_path / "s.safetensors"
    write_weights(truncated, model.net, start)
    truncated.write_bytes(truncated.read_bytes()[:-8])
    save_file({"ip1/0": np.zeros((16, 5), np.float32)}, shape)
    for path, line in (
        (tmp_path / "none.safetensors", "expected a .safetensors file: No such file or directory"),
        (truncated, "expected a .safetensors file: "),
        (shape, "layer ip1: "),
    ):
        with pytest.raises(BadInput, match=re.escape(f"{path}: {line}")):
            read_weights(path, model.net, start)


def test_a_place_that_cannot_be_written(model: CaffeModel, tmp_path: Path) -> None:
    """The file is named, and no part of it is left."""
    path = tmp_path / "nowhere" / "w.safetensors"
    line = rf"^{path}: cannot be written: No such file or directory$"
    with pytest.raises(BadInput, match=line):
        write_weights(path, model.net, model.initial(1))


def test_safetensors_hold_the_tensors_alone(
    model: CaffeModel, weights: Floats, tmp_path: Path
) -> None:
    """Without padding, by the names of layers, in their own shapes."""
    write_weights(tmp_path / "w.safetensors", model.net, weights)
    found = load_file(tmp_path / "w.safetensors")
    assert {name: tensor.shape for name, tensor in found.items()} == {
        "conv/0": (4, 1, 3, 3),
        "conv/1": (4,),
        "ip1/0": (16, 144),
        "ip1/1": (16,),
        "ip2/0": (3, 16),
        "ip2/1": (3,),
    }
    for name, view in model.table.views(weights).items():
        np.testing.assert_array_equal(found[name], view)


@pytest.mark.parametrize("copies", [1, 3, 9])
def test_several_models_compute_the_same(copies: int, model: CaffeModel, weights: Floats) -> None:
    """With copies of a model, each with batches of its own, every figure is the same to the bit."""
    others = [CaffeModel(model.net.description) for _ in range(copies)]
    alone = evaluate(model, weights, stream(9, 14), 4)
    assert evaluate(model, weights, stream(9, 14), 4, copies=others) == alone


def test_a_fault_in_a_copy_is_raised(model: CaffeModel, weights: Floats) -> None:
    """A row that does not fit is the same error, wherever it is computed."""
    wide = tiny_job.image_table(3)
    wide = wide.set_column(wide.schema.get_field_index("image"), "image", [[b"1"] * 3])
    errors = []
    for copies in ([], [CaffeModel(model.net.description)]):
        with pytest.raises(BadInput) as caught:
            evaluate(model, weights, stream(3, table=wide), 2, copies=copies)
        errors.append(str(caught.value))
    assert errors[0] == errors[1]
