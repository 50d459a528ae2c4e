"""Fitted networks as Spark ML models: they add columns to a DataFrame, without any servers."""

import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import msgspec
from pyspark.ml import Model
from pyspark.ml.linalg import VectorUDT
from pyspark.ml.util import MLReadable, MLWritable
from pyspark.sql import DataFrame
from pyspark.sql.types import ArrayType, DataType, DoubleType, StructField, StructType

from shards.errors import BadInput
from shards.tables import SparseTable
from worker.job.stored_rows import StoredRows
from worker.ml.columns import as_input, check_columns, check_free, check_width
from worker.ml.nets import Floats, NetSpec
from worker.ml.params import ClassParams, PredictionParams
from worker.ml.predict import Predictor, predict
from worker.ml.saved import StageReader, StageWriter
from worker.spark import check_running, map_tasks
from worker.training.evaluation import Evaluation

_INPUT = "__downpour_"  # how columns begin that the tasks read and drop


class FittedNet(msgspec.Struct, frozen=True):
    """A network and its trained tensors; `several` is whether it predicts a list of values.

    `shapes` are those of a row of each of its inputs in training; `rows` are its rows by id.
    """

    net: NetSpec
    weights: Mapping[str, Floats]
    shapes: Mapping[str, tuple[int, ...]]
    several: bool = False
    rows: StoredRows = msgspec.field(default_factory=StoredRows)


class NetModel(Model, PredictionParams, MLWritable, MLReadable["NetModel"]):
    """A network that adds predictions to the rows of a DataFrame.

    `evaluations` are the results of the tests while it was trained; a loaded model has none.
    """

    def __init__(self, fitted: FittedNet | None = None) -> None:
        """Made by the estimator and by `load`, which give the network."""
        super().__init__()
        self._fitted = fitted
        self.evaluations: tuple[Evaluation, ...] = ()
        self._key = secrets.token_hex(8)

    @property
    def _net(self) -> FittedNet:
        """The network with its tensors."""
        assert self._fitted is not None, "an estimator or load made this model"
        return self._fitted

    @property
    def weights(self) -> Mapping[str, Floats]:
        """The trained tensors by name, float32."""
        return self._net.weights

    @property
    def rows(self) -> StoredRows:
        """The trained rows by id, of a model with a sparse table."""
        return self._net.rows

    def write(self) -> StageWriter:
        """The writer that saves this model, to any path that Spark writes to."""
        fitted = self._net
        facts = {"net": msgspec.to_builtins(fitted.net), "several": fitted.several}
        facts["shapes"] = {name: list(shape) for name, shape in fitted.shapes.items()}
        facts["tables"] = [msgspec.to_builtins(table) for table in fitted.rows.tables]
        return StageWriter(self, facts, {**fitted.weights, **dict(fitted.rows.arrays())})

    @classmethod
    def read(cls) -> StageReader[Any]:
        """The reader that loads such a model."""

        def make(facts: Mapping[str, Any], arrays: Mapping[str, Any]) -> NetModel:
            net = msgspec.convert(facts["net"], NetSpec)
            shapes = msgspec.convert(facts["shapes"], dict[str, tuple[int, ...]])
            tables = msgspec.convert(facts.get("tables", ()), tuple[SparseTable, ...])
            rows = StoredRows.of_arrays(tables, arrays)
            of_rows = dict(rows.arrays())
            weights = {name: array for name, array in arrays.items() if name not in of_rows}
            return cls(FittedNet(net, weights, shapes, facts["several"], rows))

        return StageReader(cls, make)

    def _transform(self, dataset: DataFrame) -> DataFrame:
        check_running("transform", dataset)
        inputs = self._input_columns()
        check_columns(dataset, list(inputs))
        for column, name in inputs.items():
            if name not in self._net.shapes:
                known = ", ".join(self._net.shapes)
                raise BadInput("inputMapping", expected=f"inputs among {known}", got=name)
            check_width(dataset, column, self._net.shapes[name])
        check_free(dataset, self._list_new_columns())
        prepared = dataset.select(
            "*",
            *(
                as_input(dataset, column, self._net.net.sparse, name).alias(_INPUT + column)
                for column, name in inputs.items()
            ),
        )
        layers = self.getOrDefault(self.outputMapping)
        of = Predictor(
            key=self._key,
            net=self._net.net,
            weights=self.weights,
            rows=self.rows,
            shapes=self._net.shapes,
            inputs={_INPUT + column: name for column, name in inputs.items()},
            layers=layers,
            outputs=self._output_columns(),
            classifies=isinstance(self, ClassParams),
            several=self._net.several,
        )
        added: list[tuple[str, DataType]]
        added = [(name, VectorUDT()) for name in layers.values()]
        added += [column for column in zip(of.outputs, self._types(), strict=True) if column[0]]
        fields = [*dataset.schema.fields, *(StructField(*column) for column in added)]
        return map_tasks(prepared, partial(predict, of=of), StructType(fields), job="transform")

    def _types(self) -> tuple[DataType, ...]:
        """The types of the columns of the predictions."""
        return (ArrayType(DoubleType()) if self._net.several else DoubleType(),)


class NetRegressorModel(NetModel):
    """A trained network that predicts a number, or a list of them, for each row."""


class NetClassifierModel(NetModel, ClassParams):
    """A trained network that predicts the class of each row.

    It adds `rawPredictionCol`, a score for each class, `probabilityCol`, their softmax, and
    `predictionCol`, the class of the highest score.
    """

    def _types(self) -> tuple[DataType, ...]:
        return VectorUDT(), VectorUDT(), DoubleType()
