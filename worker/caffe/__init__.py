"""Caffe networks and solvers: prototxt in, gradients out.

A `Description` describes a network, and `CaffeModel` runs it. `LAYERS` is the registry of layer
types, and `Layer` the class to derive one from; `HostLayer` is simpler and has no kernels.
`solver.read_solver` reads how to train a network, and `weights` copies weights by layer
name from files (`weight_files`). Importing this package alone loads none of these.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from worker.caffe.layer import HostLayer, Layer
    from worker.caffe.model import CaffeModel
    from worker.caffe.net import Description
    from worker.caffe.registry import LAYERS
    from worker.caffe.weight_files import write_weights
    from worker.caffe.weights import Copied, read_weights

__all__ = [
    "LAYERS",
    "CaffeModel",
    "Copied",
    "Description",
    "HostLayer",
    "Layer",
    "read_weights",
    "write_weights",
]

_HOMES = {
    "LAYERS": "worker.caffe.registry",
    "CaffeModel": "worker.caffe.model",
    "Copied": "worker.caffe.weights",
    "Description": "worker.caffe.net",
    "HostLayer": "worker.caffe.layer",
    "Layer": "worker.caffe.layer",
    "read_weights": "worker.caffe.weights",
    "write_weights": "worker.caffe.weight_files",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module worker.caffe has no attribute {name}")
