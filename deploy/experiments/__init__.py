"""Training on a virtual clock: sweeps of strategies, bounds, clusters and links.

A problem of a user's module is made of `DenseTable`, `TensorSpec` and `Measurement`, or is a
`TorchProblem`; `TrainingSimulation` runs the job of a `Trial` on it. `load` reads the results in a
folder into tables of pandas.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deploy.experiments.problem import Measurement
    from deploy.experiments.result_frames import load
    from deploy.experiments.torch_problem import TorchProblem
    from deploy.experiments.training_simulation import TrainingSimulation
    from deploy.experiments.trials import Trial
    from shards.tables import DenseTable, TensorSpec

_MODULES = {
    "DenseTable": "shards.tables",
    "Measurement": "deploy.experiments.problem",
    "TensorSpec": "shards.tables",
    "TorchProblem": "deploy.experiments.torch_problem",
    "TrainingSimulation": "deploy.experiments.training_simulation",
    "Trial": "deploy.experiments.trials",
    "load": "deploy.experiments.result_frames",
}

__all__ = [
    "DenseTable",
    "Measurement",
    "TensorSpec",
    "TorchProblem",
    "TrainingSimulation",
    "Trial",
    "load",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    raise AttributeError(f"module deploy.experiments has no attribute {name}")
