"""Estimators of Spark ML that train a network on parameter servers."""

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Self

import numpy as np
from pyspark import keyword_only
from pyspark.ml import Estimator
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame

import ps
import worker
from shards.errors import BadInput
from worker import spark
from worker.caffe.caffe_kind import Caffe, fit_solver
from worker.caffe.net_data import read_options_of
from worker.caffe.solver import Solver
from worker.callbacks.base import Callback, check_callbacks
from worker.data.ragged import SparseVectors
from worker.job.function_run import Evaluate
from worker.job.stored_rows import StoredRows
from worker.ml.columns import (
    Facts,
    as_floats,
    as_input,
    as_label,
    check_columns,
    check_free,
    find_width,
    is_pixels,
    is_vector,
    refuse_wide,
    split_rows,
    survey_rows,
)
from worker.ml.linear import LABEL, LINEAR, FitSettings
from worker.ml.models import FittedNet, NetClassifierModel, NetModel, NetRegressorModel
from worker.ml.net_evaluation import NetTest
from worker.ml.nets import (
    Floats,
    LoadedNet,
    NetSpec,
    build,
    build_imported,
    by_name,
    caffe_spec,
    fill_in_widths,
    train_net,
)
from worker.ml.params import ClassParams, PredictionParams, TrainingParams
from worker.ml.saved import StageReader, StageWriter
from worker.training.evaluation import Evaluation

_CAFFE = ".prototxt"
_OF_SOLVER = ("batchSize", "epochs", "modelArgs", "rule", "stepSize", "testEvery")

FitResult = tuple[NetSpec, Mapping[str, Floats], StoredRows, tuple[Evaluation, ...]]
"""The network, its tensors by name, its rows by id, and the tests during training."""


class NetEstimator(
    Estimator[NetModel], PredictionParams, TrainingParams, MLWritable, MLReadable["NetEstimator"]
):
    """Base of the estimators: fitting, saving, loading."""

    classifies = False
    _callbacks: tuple[Callback, ...] = ()

    def setCallbacks(self, callbacks: Sequence[Callback]) -> Self:
        """Have each fit watched by `worker.Callback`s; they are not saved with the estimator."""
        self._callbacks = check_callbacks("setCallbacks", callbacks)
        return self

    def write(self) -> StageWriter:
        """The writer that saves this estimator."""
        return StageWriter(self, {})

    @classmethod
    def read(cls) -> StageReader[Any]:
        """The reader that loads such an estimator."""
        return StageReader(cls, lambda _facts, _weights: cls(), weights=False)

    def _fit(self, dataset: DataFrame) -> NetModel:
        spark.check_running("fit", dataset)
        inputs, label = self._input_columns(), self.getLabelCol()
        if not self.isDefined(self.model):
            expected = f'"{LINEAR}", an import path or a solver\'s .prototxt'
            raise BadInput("model", expected=expected, got="none")
        check_columns(dataset, list(inputs), label=label)
        check_free(dataset, self._list_new_columns())
        path = self.getOrDefault(self.model)
        options = self._options_of_run() | {"callbacks": self._callbacks}
        if not self.isSet(self.workers):
            options["workers"] = spark.partition_count(dataset)
        marked = self.isDefined(self.validationIndicatorCol)
        rows = split_rows(dataset, self.getValidationIndicatorCol() if marked else "")
        fills_in = inputs if path != LINEAR else ()
        refuse_wide(dataset, {column: find_width(dataset, column) for column in fills_in})
        facts = survey_rows(dataset, inputs, label, classifies=self.classifies)
        refuse_wide(dataset, {column: prod(facts.shapes[column]) for column in fills_in})
        fit = self._fit_caffe if path.endswith(_CAFFE) else self._fit_imported
        net, weights, by_id, evaluations = fit(*rows, path, facts, options)
        shapes = {name: facts.shapes[column] for column, name in inputs.items()}
        fitted = FittedNet(net, weights, shapes, facts.outputs > 0, by_id)
        model = self._copyValues(self._make_model(fitted))
        model.evaluations = evaluations
        return model

    @property
    def _weights(self) -> str | None:
        """The file to start from, if there is one."""
        return self.getOrDefault(self.weights) if self.isSet(self.weights) else None

    def _make_model(self, fitted: FittedNet) -> NetModel:
        raise NotImplementedError

    def _fit_imported(
        self,
        df: DataFrame,
        tests: DataFrame | None,
        path: str,
        facts: Facts,
        options: dict[str, Any],
    ) -> FitResult:
        inputs = self._input_columns()
        shapes = {name: facts.shapes[column] for column, name in inputs.items()}
        spec = self._describe_net(df, path, facts, shapes)
        net = build_imported(spec, self.getSeed())
        zeros = {
            name: _make_zeros(
                shapes[name], sparse=name in spec.sparse, pixels=is_pixels(df, column)
            )
            for column, name in inputs.items()
        }
        self._check_outputs(net, zeros, path, facts)
        rate, rule = self.getStepSize(), self.getOrDefault(self.rule)
        tables = net.params({"rate": rate, "rule": rule})

        def read(df: DataFrame) -> DataFrame:
            return df.select(
                *(
                    as_input(df, column, spec.sparse, name).alias(name)
                    for column, name in inputs.items()
                ),
                as_label(df, self.getLabelCol(), classifies=self.classifies).alias(LABEL),
            )

        if tests is not None:
            test = NetTest(spec, tables, read(tests).toArrow(), classifies=self.classifies)
            figures = test.figures_of_rows if isinstance(tables, ps.Tables) else test.figures
            options["evaluate"] = Evaluate(figures, self.getOrDefault(self.testEvery))
        settings = FitSettings(
            classifies=self.classifies,
            batch_size=self.getOrDefault(self.batchSize),
            epochs=self.getOrDefault(self.epochs),
            seed=self.getSeed(),
        )
        trained = worker.run(
            read(df), train_net, (spec, settings), params=tables, weights=self._weights, **options
        )
        return spec, by_name(tables, trained.params), trained.rows, trained.evaluations

    def _describe_net(
        self, df: DataFrame, path: str, facts: Facts, shapes: dict[str, tuple[int, ...]]
    ) -> NetSpec:
        """The network in plain values."""
        inputs = self._input_columns()
        given: dict[str, Any] = self.getOrDefault(self.modelArgs)
        args = fill_in_widths(given, shapes)
        vectors = tuple(name for column, name in inputs.items() if is_vector(df, column))
        if path == LINEAR:
            fits = {"classes": max(2, facts.largest + 1)}
            if not self.classifies:
                fits = {"outputs": max(1, facts.outputs)}
            return NetSpec(path, {**fits, **args}, shapes, sparse=vectors)
        return NetSpec(path, args, shapes)

    def _fit_caffe(
        self,
        df: DataFrame,
        tests: DataFrame | None,
        path: str,
        facts: Facts,
        options: dict[str, Any],
    ) -> FitResult:
        if conflicts := [name for name in _OF_SOLVER if self.isSet(self.getParam(name))]:
            raise BadInput(conflicts[0], expected=f"it in the solver {path}")
        if len(self._input_columns()) != 1:
            raise BadInput("inputMapping", expected=f"one column for the net of {path}")
        (column,) = self._input_columns()
        kind = Caffe(path, weights=self._weights)
        solver = kind.solver
        assert isinstance(solver, Solver), "read when it was made"
        options_read = read_options_of(solver.train)
        name = options_read.tops[0] if options_read.tops else "data"

        def read(df: DataFrame) -> DataFrame:
            return df.select(
                as_floats(df, column).alias(name),
                as_label(df, self.getLabelCol(), classifies=self.classifies).alias(LABEL),
            )

        rows = read(df)
        if tests is not None:
            kind = Caffe(path, weights=self._weights, test_data=read(tests))
        spec = caffe_spec(path, fit_solver(solver, rows))
        zeros = {name: np.zeros((2, prod(facts.shapes[column])), np.float32)}
        self._check_outputs(build(spec), zeros, path, facts)
        trained = worker.train(rows, model=kind, **options)
        return spec, trained.params, StoredRows(), trained.evaluations

    def _check_outputs(
        self, net: LoadedNet, zeros: Mapping[str, Any], path: str, facts: Facts
    ) -> None:
        """Raise BadInput unless the network takes such rows and predicts what the labels are."""
        mapping: dict[str, str] = self.getOrDefault(self.outputMapping)
        try:
            output = net.outputs(zeros, list(mapping))[0]
        except BadInput:
            raise
        except Exception as error:
            shapes = ", ".join(f"{name} {values.shape}" for name, values in zeros.items())
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(f"model {path}: cannot compute rows of {shapes}: {line}") from error
        outputs = output.size // 2
        where = f"the DataFrame, column {self.getLabelCol()}"
        if self.classifies and facts.largest >= outputs:
            raise BadInput(
                where,
                expected=f"classes from 0 to {outputs - 1}, as the model has {outputs} outputs",
                got=facts.largest,
            )
        expected = max(1, facts.outputs)
        if not self.classifies and outputs != expected:
            raise BadInput(
                f"model {path}",
                expected=f"{expected} outputs, as column {self.getLabelCol()} has",
                got=outputs,
            )


def _make_zeros(shape: tuple[int, ...], *, sparse: bool, pixels: bool) -> Any:
    """Two rows of zeros, as a network reads an input."""
    if sparse:
        none = np.zeros(0, np.int64)
        return SparseVectors(none, none.astype(np.float64), np.zeros(3, np.int64), prod(shape))
    return np.zeros((2, *shape), np.uint8 if pixels else np.float32)


class NetClassifier(NetEstimator, ClassParams):
    """Trains a network to predict classes, on parameter servers, in ordinary Spark tasks.

    `model` is the import path `module:name` of a `torch.nn.Module`, of an `nnx.Module` of flax, or
    of a NumPy model, an object with the methods `params(seed)`, `gradient(params, batch)` and
    `outputs(params, inputs)`; or the path of a Caffe solver. Its output is a score for each class.
    `featuresCol` is a number, a list of numbers, lists of lists, a vector, or an image in bytes;
    `labelCol` holds whole numbers from 0. A value of `modelArgs` may be `worker.ml.WIDTH`, the
    number of features, so that a pipeline can be cross-validated as a whole.
    `options` are further options of `worker.train`. docs/how-to/spark-ml.md shows the parameters.

    Raises BadInput before training for data that does not fit; GiveUp when a worker or a shard
    fails for good.
    """

    classifies = True

    @keyword_only
    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._set(**params)

    def _make_model(self, fitted: FittedNet) -> NetModel:
        return NetClassifierModel(fitted)


class NetRegressor(NetEstimator):
    """Trains a network to predict numbers, on parameter servers, in ordinary Spark tasks.

    As `NetClassifier`, but `labelCol` is a number, a list of numbers or a vector, and the network
    has an output for each.
    """

    @keyword_only
    def __init__(self, **params: Any) -> None:
        super().__init__()
        self._set(**params)

    def _make_model(self, fitted: FittedNet) -> NetModel:
        return NetRegressorModel(fitted)
