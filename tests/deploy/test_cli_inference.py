"""`downpour test` and `downpour features`: their figures, and the inputs that they refuse."""

import json
import re
from contextlib import nullcontext
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file, save_file

from deploy.run.data_tools import convert
from deploy.run.prepare import prepare
from deploy.run.settings import TrainSettings
from tests.support import tiny_job
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import refuses, swap, write_idx
from tests.support.snapshot_stores import full_disk
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weight_files import write_weights
from worker.data import image_decoding
from worker.data.sources import ReadOptions


@pytest.fixture
def trained(job: Path) -> Path:
    """The starting weights of the tiny net."""
    model = CaffeModel(read_solver(job / "solver.prototxt").train)
    write_weights(job / "w.safetensors", model.net, model.initial(1))
    return job


TEST = "test --solver solver.prototxt --weights w.safetensors --data data"
FEATURES = "features --net net.prototxt --weights w.safetensors --data data --output o --blobs ip1"


def test_test_prints_loss_and_accuracy(downpour: Run, trained: Path) -> None:
    """The figures are of the test part: they equal those of a file with the same rows,
    undivided."""
    status, out, _ = downpour(*TEST.split())
    assert status == 0
    assert re.fullmatch(r"accuracy \d+\.\d\d%, loss \S+\n", out)
    (trained / "rows.parquet").write_bytes((trained / "data/test.parquet").read_bytes())
    assert downpour(*TEST.replace("--data data", "--data rows.parquet").split())[1] == out
    (trained / "data/test.parquet").unlink()
    assert downpour(*TEST.split())[1] != out, "without a test part all rows are taken"


def test_features_on_a_full_disk(downpour: Run, trained: Path) -> None:
    """A full disk is reported with its path in one line, and no partial file stays."""
    with full_disk():
        refuses(downpour, trained, FEATURES, r"--output o: .*File too large", status=1)


@pytest.mark.parametrize(
    ("options", "rows"),
    [("", 50), ("--split test", 50), ("--split train", 200), ("--data data/train.parquet", 200)],
)
def test_features_of_a_part(options: str, rows: int, downpour: Run, trained: Path) -> None:
    """One row for each row of the requested part, or of all data that is not divided."""
    status, out, _ = downpour(*f"{FEATURES},ip2 {options} --batch-size 32".split())
    assert (status, out) == (0, f"{rows} rows of ip1, ip2 in o/features.parquet\n")
    table = pq.read_table(trained / "o/features.parquet")
    assert table.column_names == ["SampleID", "ip1", "ip2", "label"]
    assert table["SampleID"].to_pylist() == list(range(rows))
    assert {len(row) for row in table["ip1"].to_pylist()} == {16}


def test_features_as_json(downpour: Run, trained: Path) -> None:
    """An object a line has the same values as the row of the Parquet file."""
    assert downpour(*f"{FEATURES},ip2".split())[0] == 0
    status, out, _ = downpour(*f"{FEATURES},ip2 --output j --format json".split())
    assert (status, out) == (0, "50 rows of ip1, ip2 in j/features.json\n")
    lines = (trained / "j/features.json").read_text().splitlines()
    parquet = pq.read_table(trained / "o/features.parquet").to_pylist()
    assert [json.loads(line) for line in lines] == parquet


@pytest.mark.parametrize("size", [14, 100])
def test_features_of_vectors(size: int, downpour: Run, trained: Path) -> None:
    """For a net without convolutions, a list of numbers of any length is a vector."""
    (trained / "net.prototxt").write_text(
        'layer { name: "rows" type: "MemoryData" top: "data" memory_data_param { batch_size: 4 } }'
        'layer { name: "ip1" type: "InnerProduct" bottom: "data" top: "ip1"'
        " inner_product_param { num_output: 2 } }"
    )
    rows = pa.array([[float(row)] * size for row in range(6)])
    pq.write_table(pa.table({"label": [0] * 6, "data": rows}), trained / "rows.parquet")
    weights = {"ip1/0": np.ones((2, size), np.float32), "ip1/1": np.zeros(2, np.float32)}
    save_file(weights, trained / "w.safetensors")
    status, _, err = downpour(*f"{FEATURES} --data rows.parquet".split())
    assert (status, err) == (0, "")
    found = pq.read_table(trained / "o/features.parquet")["ip1"].to_pylist()
    assert found == [[float(row * size)] * 2 for row in range(6)]


def test_idx_is_tested_on_its_test_files(downpour: Run, trained: Path) -> None:
    """Of a folder of IDX files, only MNIST's t10k files are read."""
    write_idx(trained / "data")
    (trained / "data/train-images-idx3-ubyte.gz").unlink()
    status, out, _ = downpour(*TEST.split())
    assert status == 0
    assert out.startswith("accuracy ")


@pytest.mark.parametrize("data", ["data", "lmdb"])
def test_on_spark(
    data: str, downpour: Run, trained: Path, spark: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The figures and the rows are those of this process, whether tasks read the data or are sent
    it; a place that exists is refused."""
    convert(trained / "data", trained / "lmdb/test_lmdb", "lmdb", ReadOptions("test"))
    monkeypatch.setattr("worker.spark.start_session", lambda *_, **__: nullcontext(spark))
    where = f"--data {data} --spark local[2] --workers 3"
    with monkeypatch.context() as unrounded:
        unrounded.setattr("worker.training.evaluation.in_words", json.dumps)
        here, there = (
            json.loads(downpour(*TEST.split())[1]),
            json.loads(downpour(*f"{TEST} {where}".split())[1]),
        )
    assert list(there) == list(here)
    assert there == pytest.approx(here, rel=1e-5)
    assert downpour(*FEATURES.split())[0] == 0
    status, out, _ = downpour(*f"{FEATURES} {where} --output s --format json".split())
    assert (status, out) == (0, "50 rows of ip1 in s\n")
    expected = pq.read_table(trained / "o/features.parquet")
    parts = [part.read_text().splitlines() for part in (trained / "s").glob("part-*")]
    rows = sorted((json.loads(line) for part in parts for line in part), key=itemgetter("SampleID"))
    assert [row["label"] for row in rows] == expected["label"].to_pylist()
    found = [row["ip1"] for row in rows]
    np.testing.assert_allclose(found, expected["ip1"].to_pylist(), rtol=1e-4, atol=1e-6)
    refuses(downpour, trained, f"{FEATURES} {where}", "--output o: expected a folder to create")


REFUSED = [
    (
        f"{TEST} --weights net.prototxt",
        r"net\.prototxt: expected \.caffemodel, \.h5 or \.safetensors, got ",
    ),
    (f"{TEST} --data nowhere", r"data nowhere: expected a folder or a file"),
    (f"{FEATURES} --blobs ip1,ip3", r"net\.prototxt: expected blobs among data, .*, got ip3"),
    (f"{FEATURES} --blobs ,", r"--blobs: expected names of blobs, got none"),
    (f"{FEATURES} --blobs loss", r"blob loss: expected a value per row, got shape \(\)"),
    (f"{FEATURES} --output data", r"--output data: expected a folder to create, got one that"),
    (f"{FEATURES} --output net.prototxt/o", r"--output net\.prototxt/o: Not a directory"),
    (
        f"{FEATURES} --output s3://b/o",
        r"--output s3://b/o: expected a folder, as there is no",
    ),
    (f"{FEATURES} --split half", r"--split: expected train or test, got half"),
    (f"{FEATURES} --split test --data data/test.parquet", r"test\.parquet: expected a .* test "),
    (f"{TEST} --device gpu", r"--device gpu:0: expected a GPU that answers, and CuPy .*, got none"),
    (f"{FEATURES} --device gpus", r"--device: expected auto, cpu, gpu or gpu:N, got 'gpus'"),
    (f"{FEATURES} --format csv", r"--format: expected one of parquet, json, got 'csv'"),
    (f"{FEATURES} --batch-size 0", r"--batch-size: expected at least 1, got '0'"),
]


@pytest.mark.parametrize(("arguments", "line"), REFUSED, ids=[line[:30] for _, line in REFUSED])
@pytest.mark.usefixtures("no_gpu")
def test_wrong_inference(arguments: str, line: str, downpour: Run, trained: Path) -> None:
    """An error is one line with exit status 1, and leaves no output folder."""
    refuses(downpour, trained, arguments, line)


def test_weights_that_lack_a_layer(downpour: Run, trained: Path) -> None:
    """Blobs need only the weights of the layers before them."""
    file = trained / "w.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors if not name.startswith("ip2")}, file)
    line = r"w\.safetensors: expected weights of layer ip2, got a file without"
    refuses(downpour, trained, TEST, line)
    refuses(downpour, trained, f"{FEATURES},ip2", line)
    assert downpour(*FEATURES.split())[0] == 0


def test_labels_that_no_class_has(downpour: Run, trained: Path) -> None:
    """The test command reports it as well, although it opens the data before the net."""
    pq.write_table(
        tiny_job.image_table(30).set_column(0, "label", pa.array([5] * 30)),
        trained / "data/test.parquet",
    )
    line = (
        r"net\.prototxt: layer accuracy \(Accuracy\): label: expected whole labels in \[0, 3\), got"
    )
    refuses(downpour, trained, TEST, line)


def test_a_solver_without_a_test_net(downpour: Run, trained: Path) -> None:
    """A solver without a test net is refused."""
    swap(trained / "solver.prototxt", "test_iter: 7", "")
    line = r"solver\.prototxt: expected a test_iter, which says that it has a test net, got none"
    refuses(downpour, trained, TEST, line)


def test_damaged_images_are_left_out_up_to_the_limit(downpour: Run, trained: Path) -> None:
    """`test` and `features` leave out as many images as --skip-images allows, and no more."""
    table = tiny_job.image_table(6)
    pixels = [np.frombuffer(row, np.uint8) for row in table["image"].to_pylist()]
    side = round(pixels[0].size ** 0.5)
    encoded = [image_decoding.encode(row.reshape(1, side, side)) for row in pixels]
    encoded[2] = b"\x89PNG\r\n\x1a\n damaged"
    columns = {"image": pa.array(encoded, pa.binary()), "label": table["label"]}
    pq.write_table(pa.table(columns), trained / "damaged.parquet")
    for command in (TEST, FEATURES):
        line = command.replace("--data data", "--data damaged.parquet") + " --skip-images"
        most = r".*expected at most 0 images that cannot be decoded, got 1, the last in row 2"
        refuses(downpour, trained, f"{line} 0", most)
        assert downpour(*f"{line} 1".split())[0] == 0
    assert pq.read_metadata(trained / "o/features.parquet").num_rows == 5


def test_each_test_net_reads_its_own_source(downpour: Run, trained: Path) -> None:
    """The figures of the second net, whose names end in #1, are of the source that it names, in
    `downpour test` and in the tests of a training."""
    swap(trained / "solver.prototxt", "test_iter: 7", "test_interval: 5")
    parts = ("train", "test")
    states = [f'test_iter: 7 test_state {{ stage: "{part}" }}' for part in parts]
    with (trained / "solver.prototxt").open("a") as solver:
        solver.write(" ".join(states))
    layer = tiny_job.NET[tiny_job.NET.index("layer") : tiny_job.NET.index('layer { name: "conv"')]
    named = [
        layer.replace("batch_size", f'source: "data/{part}.parquet" batch_size').replace(
            "transform", f'include {{ stage: "{part}" }} transform'
        )
        for part in parts
    ]
    (trained / "net.prototxt").write_text(tiny_job.NET.replace(layer, "".join(named)))
    swap(trained / "solver.prototxt", "base_lr", 'train_state { stage: "train" } base_lr')

    means = []
    for part in parts:
        status, out, _ = downpour(*f"{TEST} --data data/{part}.parquet".split())
        assert status == 0
        means.append(out.strip().split(", ")[0].removeprefix("accuracy "))
    status, out, _ = downpour(*TEST.removesuffix(" --data data").split())
    assert status == 0
    assert re.match(f"accuracy {means[0]}, loss .*, accuracy#1 {means[1]}, loss#1 ", out)
    assert means[0] != means[1], "the parts can be told apart"

    settings = TrainSettings(
        solver=trained / "solver.prototxt", out=trained / "run", weights=trained / "w.safetensors"
    )
    inputs = prepare(settings, None).inputs
    assert inputs.test is not None
    assert inputs.weights is not None
    read: list[int] = []
    figures = inputs.test.whole(inputs.weights, read.append)
    assert read == sorted(read)
    assert read[-1] == inputs.test_rows, "of both nets"
    found = [f"{100 * figures[name]:.2f}%" for name in ("accuracy", "accuracy#1")]
    assert found == means
