"""Workers: networks, gradients and data, hosted by Spark.

    import ray, worker

    ray.init()
    trained = worker.train(df, solver="lenet_solver.prototxt", shards=2, staleness=4)
    trained.save("lenet.caffemodel")

Importing this loads neither Spark nor Ray; calling `train` does.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.api import Trained, train

__all__ = ["Trained", "train"]


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in __all__:
        from worker import api

        return getattr(api, name)
    raise AttributeError(f"module worker has no attribute {name}")
