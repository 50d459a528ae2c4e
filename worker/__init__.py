"""Workers: networks, gradients and data, hosted by Spark.

    import ray, worker

    ray.init()
    trained = worker.train(df, solver="lenet_solver.prototxt", shards=2, staleness=4)
    trained.save("lenet.caffemodel")

`train` reads Caffe's format; `run_job` takes a `Job` with your own model. Importing this package
loads neither Spark nor Ray; calling one of these functions does.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.api import Trained, train
    from worker.job import Job
    from worker.job_runner import Observer, Outcome, run_job
    from worker.options import LinkOptions, ShardRuntime, SnapshotPolicy
    from worker.strategies import BSP, Downpour
    from worker.training_loop import Plan

__all__ = [
    "BSP",
    "Downpour",
    "Job",
    "LinkOptions",
    "Observer",
    "Outcome",
    "Plan",
    "ShardRuntime",
    "SnapshotPolicy",
    "Trained",
    "run_job",
    "train",
]

_HOMES = {
    "BSP": "worker.strategies",
    "Downpour": "worker.strategies",
    "Job": "worker.job",
    "LinkOptions": "worker.options",
    "Observer": "worker.job_runner",
    "Outcome": "worker.job_runner",
    "Plan": "worker.training_loop",
    "ShardRuntime": "worker.options",
    "SnapshotPolicy": "worker.options",
    "Trained": "worker.api",
    "run_job": "worker.job_runner",
    "train": "worker.api",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module worker has no attribute {name}")
