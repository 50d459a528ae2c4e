"""Spark ML: estimators and models for `Pipeline`, `CrossValidator` and the rest of `pyspark.ml`.

    classifier = worker.ml.NetClassifier(model="nets:Net", featuresCol="x", labelCol="y", epochs=3)
    fitted = Pipeline(stages=[assembler, classifier]).fit(df)
    fitted.save("hdfs:///models/net")

`nets` knows kinds of networks, `columns` prepares and checks what they read, `estimators` and
`models` are the stages, `predict` is what the tasks of `transform` run, `saved` writes and reads
stages. All work on a classic session and over Spark Connect. PySpark is loaded when a name of this
package is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.ml.estimators import NetClassifier, NetRegressor
    from worker.ml.models import NetClassifierModel, NetRegressorModel
    from worker.ml.nets import WIDTH, width_of

__all__ = [
    "WIDTH",
    "NetClassifier",
    "NetClassifierModel",
    "NetRegressor",
    "NetRegressorModel",
    "width_of",
]

_HOMES = {
    "WIDTH": "worker.ml.nets",
    "NetClassifier": "worker.ml.estimators",
    "NetClassifierModel": "worker.ml.models",
    "NetRegressor": "worker.ml.estimators",
    "NetRegressorModel": "worker.ml.models",
    "width_of": "worker.ml.nets",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module worker.ml has no attribute {name}")
