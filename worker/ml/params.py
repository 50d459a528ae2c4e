"""The parameters of the stages of `worker.ml`, as Spark ML names them."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from pyspark.ml.param import Param, Params, TypeConverters
from pyspark.ml.param.shared import (
    HasFeaturesCol,
    HasLabelCol,
    HasMaxIter,
    HasPredictionCol,
    HasProbabilityCol,
    HasRawPredictionCol,
    HasSeed,
    HasStepSize,
    HasValidationIndicatorCol,
)

from shards import argument_checks
from shards.errors import BadInput
from shards.schedules import schedule_of
from worker.ml.linear import FEATURES


def _names(value: Any) -> dict[str, str]:
    """A mapping of names to names."""
    if not isinstance(value, dict) or not all(
        isinstance(name, str) and name for pair in value.items() for name in pair
    ):
        raise TypeError(f"expected a dict of names, got {argument_checks.describe_value(value)}")
    return dict(value)


def _settings(value: Any) -> dict[str, Any]:
    """A mapping of names to plain values."""
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise TypeError(
            f"expected a dict of settings by name, got {argument_checks.describe_value(value)}"
        )
    return dict(value)


def _count(name: str) -> Callable[[Any], int]:
    """The converter of parameter `name`, a whole number of at least 1; it raises BadInput."""

    def convert(value: Any) -> int:
        # Spark's converter takes NumPy's numbers and 2.0; its TypeError would be of another kind.
        with suppress(TypeError):
            value = TypeConverters.toInt(value)
        return argument_checks.whole(name, value, 1)

    return convert


def _rate(value: Any) -> float:
    """The converter of `stepSize`; it raises BadInput."""
    with suppress(TypeError):
        value = TypeConverters.toFloat(value)
    schedule_of("stepSize", value)
    return float(value)


class PredictionParams(HasFeaturesCol, HasPredictionCol):
    """The columns that a network reads and writes."""

    inputMapping: Param[dict[str, str]] = Param(
        Params._dummy(),
        "inputMapping",
        "the network's inputs by column, as {'pixels': 'image'}; default: featuresCol alone",
        typeConverter=_names,
    )
    outputMapping: Param[dict[str, str]] = Param(
        Params._dummy(),
        "outputMapping",
        "columns for the outputs of layers, vectors, by layer, as {'conv1': 'features'}",
        typeConverter=_names,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(inputMapping={}, outputMapping={}, predictionCol="prediction")

    def _set(self, **kwargs: Any) -> Self:
        """Set parameters by name; raises BadInput for an unknown one.

        Spark's own method, which constructors and setters call, would raise an AttributeError that
        names no parameter.
        """
        argument_checks.check_names(
            type(self).__name__, kwargs, [param.name for param in self.params]
        )
        return super()._set(**kwargs)

    def setFeaturesCol(self, value: str) -> Self:
        """Set the column of the features: a number, a list of numbers, a vector."""
        return self._set(featuresCol=value)

    def setPredictionCol(self, value: str) -> Self:
        """Set the column of the predictions."""
        return self._set(predictionCol=value)

    def setInputMapping(self, value: dict[str, str]) -> Self:
        """Set the network's inputs by column."""
        return self._set(inputMapping=value)

    def setOutputMapping(self, value: dict[str, str]) -> Self:
        """Set the columns for the outputs of layers, by layer."""
        return self._set(outputMapping=value)

    def _input_columns(self) -> dict[str, str]:
        """The network's inputs by column."""
        return self.getOrDefault(self.inputMapping) or {self.getFeaturesCol(): FEATURES}

    def _output_columns(self) -> tuple[str, ...]:
        """The columns of the predictions, an empty name for one that is not wanted."""
        return (self.getPredictionCol(),)

    def _list_new_columns(self) -> list[str]:
        """The names of all columns that the model adds, in order."""
        layers = self.getOrDefault(self.outputMapping).values()
        return [name for name in (*layers, *self._output_columns()) if name]


class ClassParams(PredictionParams, HasRawPredictionCol, HasProbabilityCol):
    """Those of a classifier; an empty name leaves a column out."""

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(rawPredictionCol="rawPrediction", probabilityCol="probability")

    def setRawPredictionCol(self, value: str) -> Self:
        """Set the column of the scores, a vector with one for each class."""
        return self._set(rawPredictionCol=value)

    def setProbabilityCol(self, value: str) -> Self:
        """Set the column of the probabilities, a vector with one for each class."""
        return self._set(probabilityCol=value)

    def _output_columns(self) -> tuple[str, ...]:
        return self.getRawPredictionCol(), self.getProbabilityCol(), self.getPredictionCol()


class TrainingParams(HasLabelCol, HasMaxIter, HasSeed, HasStepSize, HasValidationIndicatorCol):
    """The parameters of training."""

    model: Param[str] = Param(
        Params._dummy(),
        "model",
        "linear, a Caffe solver's .prototxt, or the import path module:name of a torch.nn.Module,"
        " an nnx.Module of flax, or a NumPy model",
        typeConverter=TypeConverters.toString,
    )
    modelArgs: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "modelArgs",
        "the arguments of what the import path names, plain values",
        typeConverter=_settings,
    )
    stepSize: Param[float] = Param(
        Params._dummy(), "stepSize", "the learning rate", typeConverter=_rate
    )
    epochs: Param[int] = Param(
        Params._dummy(), "epochs", "passes over the rows", typeConverter=_count("epochs")
    )
    batchSize: Param[int] = Param(
        Params._dummy(), "batchSize", "rows a step", typeConverter=_count("batchSize")
    )
    maxIter: Param[int] = Param(
        Params._dummy(), "maxIter", "steps of each worker", typeConverter=_count("maxIter")
    )
    rule: Param[str] = Param(
        Params._dummy(),
        "rule",
        "how the shards update, as sgd, momentum or adam",
        typeConverter=TypeConverters.toString,
    )
    workers: Param[int] = Param(
        Params._dummy(),
        "workers",
        "workers; default: the partitions of the data; needed over Spark Connect",
        typeConverter=_count("workers"),
    )
    shards: Param[int] = Param(
        Params._dummy(), "shards", "parameter servers", typeConverter=_count("shards")
    )
    shardsIn: Param[str] = Param(
        Params._dummy(),
        "shardsIn",
        "where the shards run: processes, on the driver's machine, or ray",
        typeConverter=TypeConverters.toString,
    )
    strategy: Param[str] = Param(
        Params._dummy(),
        "strategy",
        "how workers learn together, as downpour or easgd:tau=4",
        typeConverter=TypeConverters.toString,
    )
    weights: Param[str] = Param(
        Params._dummy(),
        "weights",
        "a file to start from, .safetensors; for a Caffe solver also .caffemodel or .h5",
        typeConverter=TypeConverters.toString,
    )
    testEvery: Param[int] = Param(
        Params._dummy(),
        "testEvery",
        "iterations between tests on the rows that validationIndicatorCol marks",
        typeConverter=_count("testEvery"),
    )
    options: Param[dict[str, Any]] = Param(
        Params._dummy(),
        "options",
        "further options of worker.train, as {'staleness': 2, 'compress': 'int8'}",
        typeConverter=_settings,
    )

    def __init__(self) -> None:
        super().__init__()
        self._setDefault(
            modelArgs={},
            epochs=1,
            batchSize=32,
            stepSize=0.01,
            rule="sgd",
            seed=1,
            shards=1,
            shardsIn="processes",
            strategy="downpour",
            testEvery=100,
            options={},
        )

    def _options_of_run(self) -> dict[str, Any]:
        """The options that every way to train takes; raises BadInput for one given twice."""
        options: dict[str, Any] = {
            "shards": self.getOrDefault(self.shards),
            "shards_in": self.getOrDefault(self.shardsIn),
            "strategy": self.getOrDefault(self.strategy),
        }
        for name, param in (("workers", self.workers), ("max_iter", self.maxIter)):
            if self.isSet(param):
                options[name] = self.getOrDefault(param)
        if self.isSet(self.seed):
            options["seed"] = self.getSeed()
        more = self.getOrDefault(self.options)
        reserved = {
            "callbacks",
            "evaluate",
            "max_iter",
            "model",
            "params",
            "seed",
            "weights",
            "workers",
        }
        if twice := sorted(more.keys() & (options.keys() | reserved)):
            raise BadInput(
                f"options: {twice[0]}: not allowed here: use its own parameter or setter"
            )
        return options | more
