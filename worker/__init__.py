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
    from worker.caffe.caffe_kind import Caffe
    from worker.caffe.frame_inference import features, test
    from worker.callbacks.base import (
        Callback,
        EarlyStop,
        KeepBest,
        Parameters,
        RunStatus,
        WatchedRun,
    )
    from worker.callbacks.mlflow import MLflow
    from worker.callbacks.prometheus import Prometheus
    from worker.callbacks.tensorboard import TensorBoard
    from worker.data.hashed import hashed
    from worker.data.image_table import BATCH_ROWS, image_batch, image_schema
    from worker.data.ragged import Ragged, SparseVectors
    from worker.data.read_options import ReadOptions
    from worker.data.source import Sample, Source
    from worker.data.sources import open_source
    from worker.job.custom_model import CustomModel
    from worker.job.function_run import Evaluate, RunResult, run
    from worker.job.outcome import Outcome
    from worker.job.run_options import Interrupted
    from worker.job.stream_run import Stream, stream
    from worker.job.train import Trained, train
    from worker.spark import sequence_file, ship_code
    from worker.spark.code_archive import pack_code
    from worker.strategies import (
        ADAG,
        ASP,
        BSP,
        DCASGD,
        EAMSGD,
        EASGD,
        MLA,
        SSP,
        AsyncDiLoCo,
        AsyncHeLoCo,
        DecoupledDiLoCo,
        DiLoCo,
        Downpour,
        DynSGD,
        FedBuff,
        LocalSGD,
        Softsync,
        SparkNet,
        StaleRate,
        StreamingDiLoCo,
    )
    from worker.tfrecord.source import TFRecord
    from worker.training.context import Context
    from worker.training.model import Model
    from worker.training.own_loop import loop, start

__all__ = [
    "ADAG",
    "ASP",
    "BATCH_ROWS",
    "BSP",
    "DCASGD",
    "EAMSGD",
    "EASGD",
    "MLA",
    "SSP",
    "AsyncDiLoCo",
    "AsyncHeLoCo",
    "Caffe",
    "Callback",
    "Context",
    "CustomModel",
    "DecoupledDiLoCo",
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
    "Ragged",
    "ReadOptions",
    "RunResult",
    "RunStatus",
    "Sample",
    "Softsync",
    "Source",
    "SparkNet",
    "SparseVectors",
    "StaleRate",
    "Stream",
    "StreamingDiLoCo",
    "TFRecord",
    "TensorBoard",
    "Trained",
    "WatchedRun",
    "features",
    "hashed",
    "image_batch",
    "image_schema",
    "loop",
    "open_source",
    "pack_code",
    "run",
    "sequence_file",
    "ship_code",
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
    "Callback": "worker.callbacks.base",
    "Context": "worker.training.context",
    "CustomModel": "worker.job.custom_model",
    "DCASGD": "worker.strategies",
    "EAMSGD": "worker.strategies",
    "EASGD": "worker.strategies",
    "MLA": "worker.strategies",
    "SSP": "worker.strategies",
    "AsyncDiLoCo": "worker.strategies",
    "AsyncHeLoCo": "worker.strategies",
    "DecoupledDiLoCo": "worker.strategies",
    "DiLoCo": "worker.strategies",
    "Downpour": "worker.strategies",
    "DynSGD": "worker.strategies",
    "EarlyStop": "worker.callbacks.base",
    "Evaluate": "worker.job.function_run",
    "Interrupted": "worker.job.run_options",
    "FedBuff": "worker.strategies",
    "KeepBest": "worker.callbacks.base",
    "LocalSGD": "worker.strategies",
    "MLflow": "worker.callbacks.mlflow",
    "Model": "worker.training.model",
    "Outcome": "worker.job.outcome",
    "Parameters": "worker.callbacks.base",
    "Prometheus": "worker.callbacks.prometheus",
    "Sample": "worker.data.source",
    "Source": "worker.data.source",
    "Ragged": "worker.data.ragged",
    "SparseVectors": "worker.data.ragged",
    "ReadOptions": "worker.data.read_options",
    "WatchedRun": "worker.callbacks.base",
    "Softsync": "worker.strategies",
    "SparkNet": "worker.strategies",
    "StaleRate": "worker.strategies",
    "StreamingDiLoCo": "worker.strategies",
    "Stream": "worker.job.stream_run",
    "TFRecord": "worker.tfrecord.source",
    "TensorBoard": "worker.callbacks.tensorboard",
    "RunResult": "worker.job.function_run",
    "RunStatus": "worker.callbacks.base",
    "Trained": "worker.job.train",
    "features": "worker.caffe.frame_inference",
    "hashed": "worker.data.hashed",
    "image_batch": "worker.data.image_table",
    "image_schema": "worker.data.image_table",
    "loop": "worker.training.own_loop",
    "open_source": "worker.data.sources",
    "pack_code": "worker.spark.code_archive",
    "run": "worker.job.function_run",
    "sequence_file": "worker.spark",
    "ship_code": "worker.spark",
    "start": "worker.training.own_loop",
    "stream": "worker.job.stream_run",
    "test": "worker.caffe.frame_inference",
    "train": "worker.job.train",
}

_ADAPTERS = ("jax", "keras", "ml", "sklearn", "torch")


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _ADAPTERS:
        return import_module(f"worker.{name}")
    raise AttributeError(f"module worker has no attribute {name}")
