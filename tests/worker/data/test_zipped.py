"""Nets with several data layers, each with a source: rows are read in step, as Caffe reads them."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from deploy.run.infer import fit_net, run_features, run_test
from shards.errors import BadInput
from tests.support.serial_solver import SerialSolver
from worker.caffe.caffe_pb2 import Datum
from worker.caffe.net import Description
from worker.caffe.net_data import data_of, read_options_of
from worker.caffe.net_sources import open_net_data
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import write_weights
from worker.data.batches import Batches
from worker.data.columns import ColumnKind
from worker.data.databases import datum_bytes
from worker.data.image_spool import ImageSpool
from worker.data.lmdb_file import write_lmdb
from worker.data.source import Source, part_rows

IMAGES, TARGETS = 10, 4
NET = """
layer { name: "left" type: "Data" top: "data" top: "kind" transform_param { scale: 0.01 }
        data_param { source: "images" backend: LMDB batch_size: 5 } }
layer { name: "right" type: "Data" top: "label" transform_param { scale: 0.1 }
        data_param { source: "targets" backend: LMDB batch_size: 5 } }
layer { name: "unread" type: "Silence" bottom: "kind" }
layer { name: "flat" type: "Flatten" bottom: "label" top: "flat" }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
        inner_product_param { num_output: 6 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "flat" top: "loss" }
"""
SOLVER = 'net: "net.prototxt" base_lr: 0.2 lr_policy: "fixed" max_iter: 60 test_iter: 2'


def image(row: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A picture 1x4x4 of a row, from which its target can be computed."""
    found = np.zeros((1, 4, 4), np.uint8)
    found[0, row % TARGETS] = 100
    found[0, 0, 3] = row
    return found


def target(row: int) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """What a net has to find, 1x2x3."""
    return np.full((1, 2, 3), 10 * (row % TARGETS), np.uint8)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The folder of a solver, its net and two databases of different lengths."""
    for name, count, made in (("images", IMAGES, image), ("targets", TARGETS, target)):
        rows = ((b"%04d" % row, datum_bytes(row + 30, made(row))) for row in range(count))
        write_lmdb(tmp_path / name, rows)
    (tmp_path / "net.prototxt").write_text(NET)
    (tmp_path / "solver.prototxt").write_text(SOLVER)
    return tmp_path


def opened(net: str, job: Path) -> Source:
    source = open_net_data(data_of(Description(net, file=str(job / "net.prototxt"))))
    assert isinstance(source, Source)
    return source


@pytest.mark.parametrize("size", [1, 3, 7, 1024])
def test_the_shorter_source_starts_over(job: Path, size: int) -> None:
    """Row n has image n and target n modulo 4, in batches of any size and in any range."""
    source = opened(NET, job)
    assert source.rows == IMAGES
    assert source.row_shapes == {"data": (1, 4, 4), "label": (1, 2, 3)}
    for start, stop in ((0, 10), (3, 9), (9, 10)):
        table = pa.Table.from_batches(list(source.batches(size, start, stop)), source.schema)
        rows = range(start, stop)
        assert table.to_pydict() == {
            "id": [*rows],
            "data": [image(row).tobytes() for row in rows],
            "kind": [row + 30 for row in rows],
            "label": [target(row).tobytes() for row in rows],
        }
    parts = [batch["id"].to_pylist() for part in range(3) for batch in part_rows(source, 3, part)]
    assert sorted(row for part in parts for row in part) == [*range(IMAGES)]


def test_a_row_with_a_damaged_image_is_left_out(job: Path) -> None:
    """The other rows keep their pairs; one more than allowed ends the reading."""
    damaged = Datum(encoded=True, data=b"\x89PNG\r\n").SerializeToString()
    values = [damaged if row == 1 else datum_bytes(0, target(row)) for row in range(TARGETS)]
    write_lmdb(job / "holes", ((b"%04d" % row, value) for row, value in enumerate(values)))
    net = NET.replace('"targets"', '"holes"')
    (batch,) = opened(net, job).batches()
    assert batch["id"].to_pylist() == [0, 2, 3, 4, 6, 7, 8]
    assert batch["label"].to_pylist() == [target(row).tobytes() for row in (0, 2, 3, 4, 6, 7, 8)]
    source = open_net_data(data_of(Description(net, file=str(job / "net.prototxt"))), skip_images=2)
    with pytest.raises(BadInput, match="at most 2 rows with images that cannot be decoded, got 3"):
        list(source.batches())


def test_a_net_of_two_sources_learns(job: Path) -> None:
    """Its loss falls; `test` and `features` read the same pairs, with each layer's transform."""
    solver = read_solver(job / "solver.prototxt")
    source, net = fit_net(solver.train, None, "train")
    serial = SerialSolver(solver.with_data_shape(source.shape, net.row_shapes))
    specs = serial.model.net.column_specs
    kinds = [ColumnKind.IMAGE, ColumnKind.LABEL, ColumnKind.IMAGE]
    assert [each.kind for each in specs] == kinds
    with Batches(source.batches(), ImageSpool("rows", specs), 5, 1, "0") as batches:
        losses = [serial.step(next(batches)) for _ in range(60)]
    assert losses[-1] < 0.05 * losses[0]
    weights = job / "weights.caffemodel"
    write_weights(weights, serial.model.net, serial.weights)
    assert run_test(job / "solver.prototxt", weights, None)["loss"] < 0.05 * losses[0]
    out = str(job / "out")
    run_features(job / "net.prototxt", weights, None, ["flat", "data"], out, None, 3)
    table = pq.read_table(job / "out")
    assert table["SampleID"].to_pylist() == [*range(IMAGES)]
    for name, made, scale in (("flat", target, 0.1), ("data", image, 0.01)):
        expected = [made(row).reshape(-1) * scale for row in range(IMAGES)]
        np.testing.assert_allclose(np.array(table[name].to_pylist()), expected, rtol=1e-6)


def test_sources_that_cannot_be_read_in_step(job: Path) -> None:
    """The error names the layers, or the layer."""
    with pytest.raises(
        BadInput, match=r"layers left and right: expected one batch_size .* 4 and 5"
    ):
        opened(NET.replace("batch_size: 5", "batch_size: 4", 1), job)
    with pytest.raises(BadInput, match=r"layer right: .*nowhere: expected a folder or a file"):
        opened(NET.replace('"targets"', '"nowhere"'), job)
    pq.write_table(pa.table({"data": [bytes(4)], "label": [0]}), job / "rows.parquet")
    with pytest.raises(BadInput, match=r"layer right: expected data of .*, got .*rows\.parquet"):
        opened(NET.replace('"targets"', '"rows.parquet"'), job)


def test_one_table_has_not_the_rows_of_two_sources(job: Path) -> None:
    """A DataFrame is refused, and other data."""
    net = Description(NET, file=str(job / "net.prototxt"))
    with pytest.raises(BadInput, match=r"one table, got .*layer left and .*layer right; use one"):
        read_options_of(net)
    with pytest.raises(BadInput, match=r"images: expected no such data, .*layer left and .*right"):
        open_net_data(data_of(net), job / "images")
