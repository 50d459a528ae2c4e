"""Workers: networks, gradients and data, hosted by Spark.

    import ray, worker

    ray.init()
    lenet = worker.Caffe("lenet_solver.prototxt")
    trained = worker.train(df, model=lenet, shards=2, staleness=4)
    trained.save("lenet.caffemodel")

`train` takes a model of any kind: `Caffe` reads Caffe's format, `CustomModel` is for a model of
your own. `run` takes a training loop of your own; `worker.torch`, `worker.jax` and `worker.keras`
are for loops in these libraries, and `worker.ml` and `worker.sklearn` have estimators. Importing
this package loads neither Spark nor Ray; calling one of these functions does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.api import Trained, train
    from worker.caffe.caffe_kind import Caffe
    from worker.caffe_inference import features, test
    from worker.callbacks import Callback, EarlyStop, KeepBest, Parameters, RunStatus, WatchedRun
    from worker.code_archive import pack_code
    from worker.context import Context
    from worker.custom_model import CustomModel
    from worker.data.image_table import BATCH_ROWS, image_batch, image_schema
    from worker.data.read_options import ReadOptions
    from worker.data.source import Sample, Source
    from worker.function_run import Evaluate, RunResult, run
    from worker.job_runner import Outcome
    from worker.mlflow import MLflow
    from worker.model import Model
    from worker.own_loop import loop, start
    from worker.prometheus import Prometheus
    from worker.run_options import Interrupted
    from worker.sources import open_source
    from worker.spark import sequence_file
    from worker.strategies import (
        ADAG,
        ASP,
        BSP,
        DCASGD,
        EAMSGD,
        EASGD,
        SSP,
        AsyncDiLoCo,
        DiLoCo,
        Downpour,
        DynSGD,
        FedBuff,
        LocalSGD,
        Softsync,
        SparkNet,
        StaleRate,
    )
    from worker.stream_run import Stream, stream
    from worker.tensorboard import TensorBoard
    from worker.tfrecord.source import TFRecord

__all__ = [
    "ADAG",
    "ASP",
    "BATCH_ROWS",
    "BSP",
    "DCASGD",
    "EAMSGD",
    "EASGD",
    "SSP",
    "AsyncDiLoCo",
    "Caffe",
    "Callback",
    "Context",
    "CustomModel",
    "DiLoCo",
    "Downpour",
    "DynSGD",
    "EarlyStop",
    "Evaluate",
    "FedBuff",
    "Interrupted",
    "KeepBest",
    "LocalSGD",
    "MLflow",
    "Model",
    "Outcome",
    "Parameters",
    "Prometheus",
    "ReadOptions",
    "RunResult",
    "RunStatus",
    "Sample",
    "Softsync",
    "Source",
    "SparkNet",
    "StaleRate",
    "Stream",
    "TFRecord",
    "TensorBoard",
    "Trained",
    "WatchedRun",
    "features",
    "image_batch",
    "image_schema",
    "loop",
    "open_source",
    "pack_code",
    "run",
    "sequence_file",
    "start",
    "stream",
    "test",
    "train",
]

_HOMES = {
    "ADAG": "worker.strategies",
    "ASP": "worker.strategies",
    "BATCH_ROWS": "worker.data.image_table",
    "BSP": "worker.strategies",
    "Caffe": "worker.caffe.caffe_kind",
    "Callback": "worker.callbacks",
    "Context": "worker.context",
    "CustomModel": "worker.custom_model",
    "DCASGD": "worker.strategies",
    "EAMSGD": "worker.strategies",
    "EASGD": "worker.strategies",
    "SSP": "worker.strategies",
    "AsyncDiLoCo": "worker.strategies",
    "DiLoCo": "worker.strategies",
    "Downpour": "worker.strategies",
    "DynSGD": "worker.strategies",
    "EarlyStop": "worker.callbacks",
    "Evaluate": "worker.function_run",
    "Interrupted": "worker.run_options",
    "FedBuff": "worker.strategies",
    "KeepBest": "worker.callbacks",
    "LocalSGD": "worker.strategies",
    "MLflow": "worker.mlflow",
    "Model": "worker.model",
    "Outcome": "worker.job_runner",
    "Parameters": "worker.callbacks",
    "Prometheus": "worker.prometheus",
    "Sample": "worker.data.source",
    "Source": "worker.data.source",
    "ReadOptions": "worker.data.read_options",
    "WatchedRun": "worker.callbacks",
    "Softsync": "worker.strategies",
    "SparkNet": "worker.strategies",
    "StaleRate": "worker.strategies",
    "Stream": "worker.stream_run",
    "TFRecord": "worker.tfrecord.source",
    "TensorBoard": "worker.tensorboard",
    "RunResult": "worker.function_run",
    "RunStatus": "worker.callbacks",
    "Trained": "worker.api",
    "features": "worker.caffe_inference",
    "image_batch": "worker.data.image_table",
    "image_schema": "worker.data.image_table",
    "loop": "worker.own_loop",
    "open_source": "worker.sources",
    "pack_code": "worker.code_archive",
    "run": "worker.function_run",
    "sequence_file": "worker.spark",
    "start": "worker.own_loop",
    "stream": "worker.stream_run",
    "test": "worker.caffe_inference",
    "train": "worker.api",
}

_TRAIN = "worker.train(df, model=worker.CustomModel(...))"
_NOW = {
    "Job": _TRAIN,
    "Observer": "worker.Callback",
    "Plan": _TRAIN,
    "run_job": _TRAIN,
    "train_worker": "worker.loop, or ctx.loop in worker.run",
}


_ADAPTERS = ("jax", "keras", "ml", "sklearn", "torch")


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ADAPTERS:
        return import_module(f"worker.{name}")
    if name in _NOW:
        raise AttributeError(f"worker.{name} is now {_NOW[name]}: docs/how-to/migrate-sdk.md")
    raise AttributeError(f"module worker has no attribute {name}")
