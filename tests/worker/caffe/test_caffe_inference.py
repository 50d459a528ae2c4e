"""`worker.test` and `worker.features`: a net over a DataFrame equals the net over its rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from numpy.typing import NDArray
from pyspark.errors import PySparkException

import worker
from shards.errors import BadInput
from tests.support import tiny_job
from worker import spark as door
from worker.caffe import frame_inference as caffe_inference
from worker.caffe import inference
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.phases import Phase
from worker.caffe.weight_files import write_weights
from worker.training.device_selection import parse_device

ROWS = 40
NET = tiny_job.NET.replace('top: "accuracy"', 'top: "accuracy" top: "by_class"')


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder with a solver, its net and weights that are far from equal scores."""
    tiny_job.write_job(tmp_path)
    (tmp_path / "net.prototxt").write_text(NET)
    model = net_model()
    write_weights(tmp_path / "w.safetensors", model.net, arena(model))
    return tmp_path


def net_model() -> CaffeModel:
    return CaffeModel(Description(NET, Phase.TEST, file="net.prototxt"))


def arena(model: CaffeModel) -> NDArray[np.float32]:
    return 3 * model.initial(7)


def whole() -> dict[str, NDArray[np.generic]]:
    """The rows as one batch."""
    return inference.to_batch(tiny_job.image_table(ROWS).combine_chunks().to_batches()[0])


def frame(spark: Any, partitions: int = 3, **columns: Any) -> Any:
    """The rows in partitions; a column is added or replaced, or dropped for None."""
    table = tiny_job.image_table(ROWS)
    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop_columns(name)
        if values is not None:
            table = table.append_column(name, pa.array(values))
    return spark.createDataFrame(table).repartition(partitions)


def test_means_of_columns(spark: Any, job: Path) -> None:
    """The net's outputs have the means of all rows, wherever partitions and batches end; so has
    each column of a blob with several."""
    model, rows = net_model(), whole()
    expected = model.forward(arena(model), rows, ["accuracy", "by_class", "loss", "ip2"])
    df = frame(spark)
    found = worker.test(df, solver=job / "solver.prototxt", weights=job / "w.safetensors")
    assert list(found) == ["accuracy", "by_class", "loss"]
    assert found["accuracy"] == pytest.approx([float(expected["accuracy"])])
    assert found["loss"] == pytest.approx([float(expected["loss"])], rel=1e-5)
    assert len(found["by_class"]) == tiny_job.CLASSES
    one = df.coalesce(1)
    by_name = worker.test(
        one, net=job / "net.prototxt", weights=str(job / "w.safetensors"), blobs=["ip2", "accuracy"]
    )
    assert list(by_name) == ["ip2", "accuracy"]
    assert by_name["ip2"] == pytest.approx(expected["ip2"].mean(axis=0), rel=1e-5)


def test_empty_partitions_have_no_weight(spark: Any, job: Path) -> None:
    """A mean is over rows, not over partitions."""
    files: dict[str, Any] = {"solver": job / "solver.prototxt", "weights": job / "w.safetensors"}
    few = spark.createDataFrame(tiny_job.image_table(3))
    spread, together = (worker.test(few.repartition(parts), **files) for parts in (8, 1))
    assert together["loss"][0] > 0
    for name in ("accuracy", "loss"):
        assert spread[name] == pytest.approx(together[name], rel=1e-5)


def test_features_of_a_data_frame(spark: Any, job: Path) -> None:
    """Each row has its id, its blobs and its label, and they are those of the net."""
    model, rows = net_model(), whole()
    expected = model.forward(arena(model), rows, ["conv", "ip2"])
    ids = [f"row{n}" for n in range(ROWS)]
    df = frame(spark, id=ids)
    found = worker.features(
        df,
        net=job / "net.prototxt",
        weights=job / "w.safetensors",
        blobs=["conv", "ip2", "conv"],
        batch_size=7,
    )
    assert [field.simpleString() for field in found.schema.fields] == [
        "SampleID:string", "conv:array<float>", "ip2:array<float>", "label:bigint",
    ]  # fmt: skip
    table = found.toArrow().to_pylist()
    assert sorted(row["SampleID"] for row in table) == sorted(ids)
    for row in table:
        number = int(row["SampleID"][3:])
        assert row["label"] == rows["label"][number]
        np.testing.assert_allclose(row["ip2"], expected["ip2"][number], rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(
            row["conv"], expected["conv"][number].ravel(), rtol=1e-4, atol=1e-4
        )


def test_features_without_ids_and_labels(spark: Any, job: Path, tmp_path: Path) -> None:
    """Spark numbers the rows, a label may have another name or be missing, and Spark's own writers
    take the result."""
    files: dict[str, Any] = {
        "net": job / "net.prototxt",
        "weights": job / "w.safetensors",
        "blobs": ["ip1"],
    }
    df = frame(spark, label=None, digit=[n % 3 + 0.0 for n in range(ROWS)])
    named = worker.features(df, label="digit", **files)
    assert named.columns == ["SampleID", "ip1", "label"]
    assert named.schema["label"].dataType.simpleString() == "double"
    bare = worker.features(df, **files)
    assert bare.columns == ["SampleID", "ip1"]
    expected = bare.toArrow().to_pylist()
    assert len({row["SampleID"] for row in expected}) == ROWS
    for form in ("json", "parquet"):
        bare.write.format(form).save(str(tmp_path / form))
        read = spark.read.format(form).load(str(tmp_path / form)).toArrow().to_pylist()
        by_id = {row["SampleID"]: row["ip1"] for row in read}
        assert len(by_id) == ROWS
        for row in expected:
            np.testing.assert_allclose(by_id[row["SampleID"]], row["ip1"], rtol=1e-6)


def test_features_are_computed_when_they_are_read(spark: Any, job: Path) -> None:
    """A row that cannot be computed fails the job that reads it, and nothing before."""
    late = f"CASE WHEN number < {ROWS - 1} THEN image ELSE raise_error('late') END AS image"
    table = tiny_job.image_table(ROWS).append_column("number", pa.array(range(ROWS)))
    df = spark.createDataFrame(table).coalesce(1).selectExpr(late)
    worker.features(df, net=job / "net.prototxt", weights=job / "w.safetensors", blobs=["ip1"])
    with pytest.raises(PySparkException, match="late"):
        df.collect()


def test_a_process_builds_the_net_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tasks of one pass share the net and the weights of the first; another pass replaces
    them."""
    built: list[Description] = []

    def build(net: Description) -> CaffeModel:
        built.append(net)
        return CaffeModel(net)

    monkeypatch.setattr(caffe_inference, "CaffeModel", build)
    monkeypatch.setattr(caffe_inference, "_loaded", {})
    model = net_model()

    def run(key: str, weights: NDArray[np.float32]) -> pa.Table:
        forward = caffe_inference.ForwardPass(
            key, model.net.description, lambda: weights, ("ip2",), 8, parse_device("cpu")
        )
        rows = iter(tiny_job.image_table(ROWS).to_batches())
        return pa.Table.from_batches(caffe_inference._features(rows, 0, 1, (), forward=forward))

    first = run("a", arena(model))
    assert run("a", arena(model)).equals(first)
    assert len(built) == 1
    assert not run("b", model.initial(1)).equals(first)
    assert len(built) == 2


REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("test", {}, {"blobs": ["ip9"]}, r"net\.prototxt: expected blobs among data, .*, got ip9"),
    ("test", {}, {"blobs": []}, "test: blobs: expected names of blobs, got none"),
    ("test", {}, {"blobs": "ip1"}, "test: blobs: expected a list of names, got 'ip1'"),
    ("test", {}, {"net": "n"}, "test: expected a solver or a net, got both"),
    ("test", {}, {"solver": None}, "test: expected a solver or a net, got neither"),
    ("test", {}, {"weights": 3}, "test: weights: expected a path, got 3"),
    ("test", {}, {"weights": "none.h5"}, r"none\.h5: cannot be read: No such file or directory"),
    ("test", {}, {"device": "gpus"}, "device: expected auto, cpu, gpu or gpu:N, got 'gpus'"),
    (
        "test",
        {"label": None},
        {},
        "the DataFrame: expected a column label, got image",
    ),
    ("test", {"label": [[1]] * ROWS}, {}, ".*column label: expected whole numbers, got list.*"),
    ("features", {}, {"blobs": ["loss"]}, r"blob loss: expected a value per row, got shape \(\)"),
    ("features", {}, {"blobs": ["ip1", "ip9"]}, ".*expected blobs among .*, got ip9"),
    (
        "features",
        {},
        {"blobs": ["label"]},
        "features: blobs: expected names other than SampleID and label, got label",
    ),
    ("features", {}, {"batch_size": 0}, "features: batch_size: expected at least 1, got 0"),
    (
        "features",
        {},
        {"label": "digit"},
        "the DataFrame: expected a column digit, got label, image",
    ),
    ("features", {"image": None}, {}, "the DataFrame: expected a column data or image, got label"),
    (
        "features",
        {"image": ["x"] * ROWS},
        {},
        ".*column image: expected binary pixels or a list .*",
    ),
    ("features", {}, {"net": 7}, "features: net: expected a path, got 7"),
]


@pytest.mark.parametrize(
    ("function", "columns", "options", "line"), REFUSED, ids=[line[:40] for *_, line in REFUSED]
)
def test_wrong_inputs(
    function: str,
    columns: dict[str, Any],
    options: dict[str, Any],
    line: str,
    spark: Any,
    job: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is one line, before any task over the rows starts."""
    monkeypatch.setattr(door, "map_tasks", lambda *_, **__: pytest.fail("a task"))
    monkeypatch.setattr(door, "run_tasks", lambda *_, **__: pytest.fail("a task"))
    given: dict[str, Any] = {"weights": job / "w.safetensors"}
    if function == "test":
        given["solver"] = job / "solver.prototxt"
    else:
        given |= {"net": job / "net.prototxt", "blobs": ["ip1"]}
    with pytest.raises(BadInput) as refused:
        getattr(worker, function)(frame(spark, 1, **columns), **(given | options))
    assert "\n" not in str(refused.value)
    refused.match(f"^(.*/)?{line}$")


def test_wrong_weights_and_no_rows(spark: Any, job: Path) -> None:
    """Weights of another net, a DataFrame that is empty or has damaged images only, and no
    DataFrame."""
    files: dict[str, Any] = {"net": job / "net.prototxt", "weights": job / "w.safetensors"}
    with pytest.raises(BadInput, match=r"^the DataFrame: expected rows, got none$"):
        worker.test(frame(spark).limit(0), **files)
    damaged = frame(spark, 1, image=[b"\x89PNG\r\n\x1a\n damaged"] * ROWS)
    with pytest.raises(BadInput, match=r"^the DataFrame: expected rows to test on, got none$"):
        worker.test(damaged, **files)
    with pytest.raises(BadInput, match=r"^test: df: expected a Spark DataFrame, got "):
        worker.test([], **files)  # type: ignore[arg-type]
    other = CaffeModel(Description(NET.replace("ip2", "fc8"), Phase.TEST, file="other"))
    write_weights(job / "o.h5", other.net, other.initial(1))
    with pytest.raises(BadInput, match=r"o\.h5: expected weights of layer ip2, got a file without"):
        worker.test(frame(spark), net=job / "net.prototxt", weights=job / "o.h5")
    wide = CaffeModel(Description(NET.replace("num_output: 16", "num_output: 5"), file="wide"))
    write_weights(job / "w.h5", wide.net, wide.initial(1))
    with pytest.raises(
        BadInput, match=r"w\.h5: layer ip1: blob 0: expected shape \(16, 144\), got"
    ):
        worker.features(frame(spark), net=job / "net.prototxt", weights=job / "w.h5", blobs=["ip1"])
