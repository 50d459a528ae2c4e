"""`worker.ml` in Spark ML: fitted, in pipelines, in a cross-validation, saved and loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyspark.errors import PythonException
from pyspark.ml import Pipeline, PipelineModel
from pyspark.ml.classification import LogisticRegression
from pyspark.ml.evaluation import MulticlassClassificationEvaluator, RegressionEvaluator
from pyspark.ml.feature import FeatureHasher, OneHotEncoder, StringIndexer, VectorAssembler
from pyspark.ml.linalg import SparseVector
from pyspark.ml.tuning import CrossValidator, ParamGridBuilder

import worker
from shards.errors import BadInput
from tests.support import tiny_job
from tests.support.ml_points import CLASSES, INPUTS, classifier, points, right

pytestmark = pytest.mark.timeout(900)

ROOT = Path(__file__).parents[3]
NETS = "tests.support.ml_nets"


@pytest.fixture(scope="module")
def clouds(spark: Any) -> Any:
    return spark.createDataFrame(points(), CLASSES).repartition(2).cache()


@pytest.fixture(scope="module")
def fitted(clouds: Any) -> Any:
    """A pipeline of MLlib's features, a network, and MLlib's regression on a layer of it."""
    stages = [
        VectorAssembler(inputCols=INPUTS, outputCol="features"),
        classifier(outputMapping={"hidden": "inner"}),
        LogisticRegression(
            featuresCol="inner",
            predictionCol="byMLlib",
            rawPredictionCol="byMLlibRaw",
            probabilityCol="byMLlibProbability",
        ),
    ]
    return Pipeline(stages=stages).fit(clouds)


@pytest.mark.slow
def test_a_pipeline(fitted: Any, clouds: Any) -> None:
    """The network keeps all columns and adds its own, which MLlib's stages and evaluators read."""
    found = fitted.transform(clouds)
    assert found.columns == [
        *("id", *INPUTS, "label", "features", "inner"),
        *("rawPrediction", "probability", "prediction"),
        *("byMLlibRaw", "byMLlibProbability", "byMLlib"),
    ]
    kept = found.select("id", *INPUTS, "label").orderBy("id").collect()
    assert kept == clouds.orderBy("id").collect()
    assert right(found, "prediction") > 0.95
    assert right(found, "byMLlib") > 0.95
    assert MulticlassClassificationEvaluator(metricName="accuracy").evaluate(found) > 0.95
    first = found.orderBy("id").first()
    net = fitted.stages[1]
    hidden = np.tanh(np.array(first.features.toArray(), np.float32) @ net.weights["into"])
    np.testing.assert_allclose(first.inner.toArray(), hidden, rtol=1e-5)
    scores = hidden @ net.weights["out"] + net.weights["bias"]
    np.testing.assert_allclose(first.rawPrediction.toArray(), scores, rtol=1e-4, atol=1e-5)
    assert first.probability.toArray().sum() == pytest.approx(1.0)


def test_rows_of_another_length_than_in_training(fitted: Any, clouds: Any) -> None:
    """`transform` refuses them by the schema where that tells, else by one line of the task."""
    net = fitted.stages[1]
    pairs = VectorAssembler(inputCols=INPUTS[:2], outputCol="features").transform(clouds)
    for rows, got in ((pairs, 2), (clouds.selectExpr("a AS features"), 1)):
        line = f"column features: expected 3 values a row, as in training, got {got}: select"
        with pytest.raises(BadInput, match=line):
            net.transform(rows)
    lists = net.transform(clouds.selectExpr("array(a, b) AS features"))
    line = r"expected rows of features \(3,\), as in training, got features \(2,\): "
    with pytest.raises(Exception, match=line):
        lists.collect()


@pytest.mark.slow
def test_a_saved_pipeline_in_another_process_over_connect(
    fitted: Any, clouds: Any, connect_url: str, tmp_path: Path
) -> None:
    """What a classic session has saved a Connect session of another process loads; and it fits,
    saves over what it has saved, and loads."""
    pytest.importorskip("grpc", reason="needs the extra `connect`")
    fitted.write().overwrite().save(f"{tmp_path}/pipeline")
    again = PipelineModel.load(f"{tmp_path}/pipeline")
    assert [stage.uid for stage in again.stages] == [stage.uid for stage in fitted.stages]
    assert right(again.transform(clouds), "byMLlib") == right(fitted.transform(clouds), "byMLlib")
    arguments = connect_url, f"{tmp_path}/pipeline", str(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.ml_over_connect", *arguments],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["refused"] == "train over Spark Connect: expected the number of workers, got none"
    assert seen["columns"] == fitted.transform(clouds).columns
    assert seen["loaded"] == right(fitted.transform(clouds), "byMLlib")
    assert seen["fitted"] > 0.95


@pytest.mark.slow
def test_a_cross_validation_in_two_threads(spark: Any) -> None:
    """Each fit has its own shards; the rate that learns wins. A list of labels is predicted too."""
    dice = np.random.default_rng(2)
    x = dice.standard_normal((80, 2))
    rows = [([float(a), float(b)], [float(2 * a - b), float(b)], float(2 * a - b)) for a, b in x]
    df = spark.createDataFrame(rows, "x array<double>, both array<double>, y double").cache()
    line = worker.ml.NetRegressor(
        model=f"{NETS}:Line",
        modelArgs={"size": 2},
        featuresCol="x",
        labelCol="y",
        epochs=8,
        batchSize=8,
        workers=1,
    )
    grid = ParamGridBuilder().addGrid(line.stepSize, [1e-6, 0.1]).build()
    validator = CrossValidator(
        estimator=line,
        estimatorParamMaps=grid,
        evaluator=RegressionEvaluator(labelCol="y"),
        numFolds=2,
        parallelism=2,
        seed=1,
    )
    found = validator.fit(df)
    still, learned = found.avgMetrics
    assert learned < 0.2
    assert still > 1.0
    best: Any = found.bestModel
    np.testing.assert_allclose(best.weights["slope"].ravel(), [2, -1], atol=0.2)

    args = {"size": 2, "outputs": 2}
    both = line.copy({line.modelArgs: args, line.labelCol: "both", line.stepSize: 0.1})
    predicted = both.fit(df).transform(df)
    assert predicted.schema["prediction"].dataType.simpleString() == "array<double>"
    error = np.array([np.subtract(row.prediction, row.both) for row in predicted.collect()])
    assert np.abs(error).mean() < 0.5


@pytest.mark.slow
def test_two_columns_go_in_and_two_layers_come_out(spark: Any) -> None:
    """Each mapping has two names; columns that are not mapped are neither read nor lost."""
    dice = np.random.default_rng(4).standard_normal((40, 2))
    rows = [(float(a), f"{n}", float(b), float(2 * a - 3 * b)) for n, (a, b) in enumerate(dice)]
    df = spark.createDataFrame(rows, "a double, name string, b double, y double").cache()
    estimator = worker.ml.NetRegressor(
        model=f"{NETS}:Difference",
        inputMapping={"a": "minuend", "b": "subtrahend"},
        outputMapping={"first": "of_a", "second": "of_b"},
        labelCol="y",
        epochs=12,
        batchSize=4,
        stepSize=0.3,
        workers=1,
    )
    model = estimator.fit(df)
    np.testing.assert_allclose(model.weights["factors"], [2, 3], atol=0.1)
    found = model.transform(df)
    assert found.columns == [*df.columns, "of_a", "of_b", "prediction"]
    for row in found.collect():
        np.testing.assert_allclose(row.of_a.toArray(), [2 * row.a], atol=0.5)
        np.testing.assert_allclose(row.of_b.toArray(), [3 * row.b], atol=0.5)
        assert row.prediction == pytest.approx(row.of_a[0] - row.of_b[0], abs=1e-5)


@pytest.mark.slow
def test_a_killed_python_worker(spark: Any, tmp_path: Path) -> None:
    """kill -9 of a Python worker in a fit: it finishes, and each step was applied once."""
    df = spark.range(40, numPartitions=2).selectExpr("id AS features", "0.0 AS label")
    mark = tmp_path / "died"
    estimator = worker.ml.NetRegressor(
        model=f"{NETS}:DiesOnce",
        modelArgs={"mark": str(mark), "step": 7},
        epochs=4,
        batchSize=4,
        stepSize=1.0,
        strategy="downpour:scale=1",
        options={"lease_s": 3.0},
    )
    model = estimator.fit(df)
    assert mark.exists()
    assert model.weights["steps"].tolist() == [-40.0]


@pytest.mark.slow
def test_a_caffe_solver(spark: Any, tmp_path: Path) -> None:
    """Its net classifies binary images; a blob is a column; it is saved with the net."""
    solver = tiny_job.write_job(tmp_path, max_iter=60)
    df = spark.createDataFrame(tiny_job.image_table(120)).repartition(2)
    estimator = worker.ml.NetClassifier(
        model=str(solver), featuresCol="image", outputMapping={"ip1": "read"}, probabilityCol=""
    )
    fitted = estimator.fit(df)
    fitted.save(f"{tmp_path}/model")
    solver.unlink()
    found = worker.ml.NetClassifierModel.load(f"{tmp_path}/model").transform(df)
    assert found.columns == [*df.columns, "read", "rawPrediction", "prediction"]
    assert found.filter("prediction = label").count() > 0.9 * 120
    with pytest.raises(BadInput, match=r"^stepSize: expected it in the solver .*prototxt$"):
        estimator.copy({estimator.stepSize: 0.1}).fit(df)


@pytest.mark.slow
def test_a_module_of_pytorch(clouds: Any) -> None:
    """It is trained by its import path; the output of a module inside it is a column."""
    pytest.importorskip("torch", reason="needs the extra `torch`")
    assembled = VectorAssembler(inputCols=INPUTS, outputCol="features").transform(clouds)
    model = classifier(
        model="tests.support.ml_torch:Perceptron", outputMapping={"hidden": "inner"}
    ).fit(assembled)
    found = model.transform(assembled)
    assert right(found, "prediction") > 0.95
    assert len(found.first().inner) == 8


@pytest.mark.slow
def test_a_module_of_flax(clouds: Any) -> None:
    """It is trained by its import path, if its state is parameters alone; it shows no layers."""
    pytest.importorskip("flax", reason="needs flax and the extra `jax`")
    assembled = VectorAssembler(inputCols=INPUTS, outputCol="features").transform(clouds)
    flax = "tests.support.ml_flax"
    model = classifier(model=f"{flax}:Perceptron").fit(assembled)
    assert right(model.transform(assembled), "prediction") > 0.95
    assert set(model.weights) == {
        f"{layer}.{part}.value" for layer in ("hidden", "last") for part in ("kernel", "bias")
    }
    layers = model.copy({model.outputMapping: {"hidden": "inner"}})
    with pytest.raises(PythonException, match="expected no layers of a flax module as columns"):
        layers.transform(assembled).collect()
    with pytest.raises(BadInput, match=r"Normalised: expected a module with .* got norm\.mean"):
        classifier(model=f"{flax}:Normalised").fit(assembled)


@pytest.mark.slow
def test_a_cross_validation_whose_folds_have_other_widths(clouds: Any, tmp_path: Path) -> None:
    """A fold without a category has a narrower one-hot column; the network is made for it.

    The fitted pipeline has the width of its own rows, also when it is loaded.
    """
    # Row 0 is the only one of its town, so one of the two folds that are trained on lacks it.
    towns = clouds.selectExpr("*", "if(id = 0, 'rare', concat('town ', label)) AS town")
    stages = [
        StringIndexer(inputCol="town", outputCol="index", handleInvalid="keep"),
        OneHotEncoder(inputCol="index", outputCol="code", handleInvalid="keep"),
        VectorAssembler(inputCols=["a", "code"], outputCol="features"),
        classifier(modelArgs={"size": worker.ml.WIDTH, "classes": 3}, workers=1),
    ]
    pipeline = Pipeline(stages=stages)
    validator = CrossValidator(
        estimator=pipeline,
        estimatorParamMaps=ParamGridBuilder().addGrid(stages[-1].epochs, [3]).build(),
        evaluator=MulticlassClassificationEvaluator(metricName="accuracy"),
        numFolds=2,
        collectSubModels=True,
    )
    found: Any = validator.fit(towns)
    assert found.avgMetrics[0] > 0.9
    widths = [model.stages[-1].weights["into"].shape[0] for (model,) in found.subModels]
    assert sorted(widths) == [5, 6]
    assert found.bestModel.stages[-1].weights["into"].shape[0] == 6
    found.bestModel.save(f"{tmp_path}/pipeline")
    again = PipelineModel.load(f"{tmp_path}/pipeline")
    assert right(again.transform(towns), "prediction") == right(
        found.bestModel.transform(towns), "prediction"
    )


@pytest.mark.slow
def test_a_network_reads_pixels_and_lists_of_lists(spark: Any) -> None:
    """Raw bytes and Spark's images are uint8, in training as in `transform`; lists keep a shape."""
    image = "struct<origin:string,height:int,width:int,nChannels:int,mode:int,data:binary>"
    rows = [
        (bytes([n % 2, 0]), ("", 1, 2, 1, 0, bytes([n % 2, 0])), [[float(n % 2), 0.0]], n % 2 * 2.0)
        for n in range(20)
    ]
    schema = f"raw binary, image {image}, nested array<array<double>>, y double"
    df = spark.createDataFrame(rows, schema).coalesce(1)
    for column, dtype, shape in (
        ("raw", "uint8", [2]),
        ("image", "uint8", [1, 1, 2]),
        ("nested", "float32", [1, 2]),
    ):
        model = worker.ml.NetRegressor(
            model=f"{NETS}:Shaped",
            modelArgs={"size": worker.ml.WIDTH, "dtype": dtype, "shape": shape},
            featuresCol=column,
            labelCol="y",
            epochs=20,
            stepSize=1.0,
        ).fit(df)
        error = model.transform(df).selectExpr("max(abs(prediction - y))").first()[0]
        assert error < 0.5, column


@pytest.mark.slow
def test_a_module_with_lazy_layers(clouds: Any, tmp_path: Path) -> None:
    """It takes its width from the rows, in the tasks and when it is loaded, too."""
    pytest.importorskip("torch", reason="needs the extra `torch`")
    assembled = VectorAssembler(inputCols=INPUTS, outputCol="features").transform(clouds)
    model = classifier(model="tests.support.ml_torch:Lazy", modelArgs={"classes": 3}).fit(assembled)
    assert right(model.transform(assembled), "prediction") > 0.95
    model.save(f"{tmp_path}/lazy")
    again = worker.ml.NetClassifierModel.load(f"{tmp_path}/lazy")
    assert right(again.transform(assembled), "prediction") > 0.95


@pytest.mark.parametrize(
    ("params", "query", "line"),
    [
        ({}, "label", r"the DataFrame: expected a column features, got label$"),
        ({}, "id AS features", r"the DataFrame: expected a column label, got features$"),
        ({}, "a AS features, label, label", r"expected one column label, got 2 of this name$"),
        ({}, "a AS features, b AS features, label", r"one column features, got 2 of this name$"),
        (
            {},
            "string(id) AS features, label",
            "column features: expected numbers, .* got string: index",
        ),
        ({}, "date '2020-01-01' AS features, label", "got times .* by .*unix_timestamp$"),
        ({}, "struct(a, b) AS features, label", "got a struct of a, b: select its fields as col"),
        ({}, "map('a', a) AS features, label", "got a map: take its values by .*element_at$"),
        ({}, "cast(a AS decimal(38,18)) AS features, label", "15 digits, .*cast it to double$"),
        ({}, "array(a, b) AS features, array(array(label)) AS label", "a vector, got array<array"),
        (
            {},
            "if(id = 3, array(array(a)), array(array(a, b))) AS features, label",
            "features: expected lists of one length, got 1 to 2 values$",
        ),
        (
            {},
            "if(id = 3, array(null), array(array(a))) AS features, label",
            "features: expected finite numbers, got others in 1 row$",
        ),
        (
            {"modelArgs": {"size": worker.ml.width_of("image"), "classes": 3}},
            "array(a, b, c) AS features, label",
            "modelArgs: size: expected '<width of features>' or '<width>', the width of an input",
        ),
        ({}, "if(id = 3, null, a) AS features, label", "features: expected finite .* in 1 row$"),
        (
            {},
            "if(id = 3, null, array(a)) AS features, label",
            "features: expected a value in each row, got nulls in 1 row$",
        ),
        (
            {},
            "if(id = 3, array(a, b), array(a)) AS features, label",
            "features: expected lists of one length, got 1 to 2 values$",
        ),
        (
            {},
            "a AS features, if(id < 2, null, label) AS label",
            "column label: .* nulls in 2 rows$",
        ),
        (
            {},
            "a AS features, label + 0.5 AS label",
            "got fractions in 240 rows$",
        ),
        ({}, "a AS features, label - 1 AS label", "whole numbers from 0, got from -1 to 1$"),
        (
            {"modelArgs": {"size": 1, "classes": 2}},
            "a AS features, label",
            "column label: expected classes from 0 to 1, as the model has 2 outputs, got 2$",
        ),
        ({}, "a AS features, label", r"cannot compute rows of features \(2, 1\): .*"),
        ({}, "a AS features, label, 1 AS prediction", "expected no column prediction, which"),
        ({"predictionCol": "probability"}, "a AS features, label", "got probability twice$"),
        ({"model": "nowhere:Net"}, "a AS features, label", "model nowhere:Net: cannot be imported"),
        ({"model": "nets"}, "a AS features, label", "model 'nets': expected an import path"),
        (
            {"model": f"{NETS}:NoModel", "modelArgs": {}},
            "a AS features, label",
            "with the methods params, gradient, outputs, got NoModel without params$",
        ),
        (
            {"model": f"{NETS}:broken", "modelArgs": {}},
            "a AS features, label",
            ":broken: RuntimeError: no such file: weights$",
        ),
        ({"model": "no.prototxt"}, "a AS features, label", "batchSize: expected it in the solver"),
        (
            {"outputMapping": {"inner": "x"}},
            "array(a, b, c) AS features, label",
            "expected layers among hidden, output, got inner$",
        ),
        ({"options": {"shards": 2}}, "a AS features, label", "options: shards: not allowed here"),
        ({"options": {"workers": 2}}, "a AS features, label", "options: workers: not allowed here"),
        ({}, "a AS features, label FROM clouds WHERE id < 0", "expected rows, got none$"),
    ],
    ids=str,
)
def test_what_does_not_fit(
    params: dict[str, Any], query: str, line: str, spark: Any, clouds: Any
) -> None:
    """It is one line before anything is started."""
    clouds.createOrReplaceTempView("clouds")
    df = spark.sql(f"SELECT {query}{'' if ' FROM ' in query else ' FROM clouds'}")
    with pytest.raises(BadInput, match=line) as caught:
        classifier(**params).fit(df)
    assert "\n" not in str(caught.value)


def test_vectors_of_a_hash_space(spark: Any, clouds: Any) -> None:
    """Those too wide to be filled in are refused before a Spark job; "linear" takes any width."""
    hasher = FeatureHasher(inputCols=INPUTS, outputCol="features")
    line = "column features: expected vectors of at most 131072 values, .* got 262144: hash into"
    hashed = hasher.transform(clouds)
    with pytest.raises(BadInput, match=line):
        classifier().fit(hashed)
    rows = [(SparseVector(131_073, {5: 1.0}), 0), (SparseVector(131_073, {7: 1.0}), 1)]
    with pytest.raises(BadInput, match=line.replace("262144", "131073")):
        classifier().fit(spark.createDataFrame(rows, ["features", "label"]))
    narrow = hasher.copy({hasher.numFeatures: 64}).transform(clouds)
    sized = classifier(modelArgs={"size": worker.ml.WIDTH, "classes": 3}, epochs=1, workers=1)
    assert sized.fit(narrow).transform(narrow).columns[-1] == "prediction"
    marked = {"validationIndicatorCol": "test", "testEvery": 5}
    linear = classifier(model="linear", modelArgs={"hidden": [4]}, rule="adagrad", **marked)
    model = linear.fit(hashed.selectExpr("*", "id % 5 = 0 AS test"))
    model.setOutputMapping({"0": "inner"})
    found = model.transform(hashed)
    assert right(found, "prediction") > 0.9
    assert len(found.first().inner) == 4
    assert model.evaluations[-1].figures["accuracy"] > 0.9
    lists = clouds.selectExpr("array(a, b, c) AS features", "a - 2 * b AS label")
    line_of = worker.ml.NetRegressor(model="linear", epochs=10, stepSize=0.05, workers=1)
    weights = line_of.fit(lists).rows.gather("features", [0, 1, 2])
    np.testing.assert_allclose(weights[:, 0], [1, -2, 0], atol=0.1)


@pytest.mark.parametrize(
    ("params", "line"),
    [
        ({"epochs": 0}, "epochs: expected at least 1, got 0"),
        ({"batchSize": -1}, "batchSize: expected at least 1, got -1"),
        ({"batchSize": 1.5}, "batchSize: expected a whole number, got 1.5"),
        ({"batchSize": float("nan")}, "batchSize: expected a whole number, got nan"),
        ({"batchSize": "8"}, "batchSize: expected a whole number, got '8'"),
        ({"epochs": True}, "epochs: expected a whole number, got True"),
        ({"maxIter": 0}, "maxIter: expected at least 1, got 0"),
        (
            {"stepSize": "x"},
            "stepSize: expected a rate or a schedule such as Fixed(base_rate=0.1), got 'x'",
        ),
        ({"workers": 0}, "workers: expected at least 1, got 0"),
        ({"shards": 0}, "shards: expected at least 1, got 0"),
        ({"testEvery": 0}, "testEvery: expected at least 1, got 0"),
        ({"stepSize": -0.1}, "stepSize: expected a rate of 0 or more, and finite, got -0.1"),
        ({"epoch": 3}, "NetClassifier: expected epochs, or another known name, got 'epoch'"),
    ],
    ids=str,
)
def test_wrong_parameters(params: dict[str, Any], line: str) -> None:
    """They are refused where they are given, by the name that they have there."""
    with pytest.raises(BadInput) as caught:
        worker.ml.NetClassifier(**params)
    assert str(caught.value) == line


def test_an_estimator_that_is_saved(tmp_path: Path, spark: Any) -> None:
    """It has the same parameters when it is loaded; what is not such a file is refused."""
    given = classifier(options={"staleness": 2}, inputMapping={"x": "features"})
    given.save(f"{tmp_path}/estimator")
    again = worker.ml.NetClassifier.load(f"{tmp_path}/estimator")
    assert again.uid == given.uid
    assert {param.name: value for param, value in again.extractParamMap().items()} == {
        param.name: value for param, value in given.extractParamMap().items()
    }
    with pytest.raises(BadInput, match=r"expected a saved worker\.ml\.NetRegressor, got worker"):
        worker.ml.NetRegressor.load(f"{tmp_path}/estimator")
    with pytest.raises(BadInput, match=r"estimator: cannot be written: .*already exists"):
        given.save(f"{tmp_path}/estimator")
    with pytest.raises(BadInput, match="nothing: cannot be read: "):
        worker.ml.NetClassifier.load(f"{tmp_path}/nothing")
    (metadata,) = (tmp_path / "estimator" / "metadata").glob("part-*")
    later = metadata.read_text().replace('"format":2', '"format":3')
    spark.createDataFrame([(later,)], "value string").write.text(f"{tmp_path}/later/metadata")
    with pytest.raises(BadInput, match="later: expected format 2 or less, got 3: a newer version"):
        worker.ml.NetClassifier.load(f"{tmp_path}/later")
