"""The nets in Keras, for the programs of this folder that run on TensorFlow."""

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tensorflow import keras

from tests.bench.endtoend.programs.task import Task

_TESTED_AT_ONCE = 500


def read_samples(task: Task, part: str) -> NDArray[Any]:
    """The samples of `train` or `test`, channels last, as TensorFlow's convolutions need them."""
    x = task.read(f"{part}_x")
    return np.ascontiguousarray(x.transpose(0, 2, 3, 1)) if x.ndim == 4 else x


def make_net(task: Task, shape: tuple[int, ...]) -> keras.Model:
    """LeNet, CIFAR-10 quick or the MLP of `torch_nets.make_net`, for samples of this shape."""
    keras.utils.set_random_seed(task.seed)
    layers, same = keras.layers, {"padding": "same"}
    scale = float(task.read("scale"))
    standardise = layers.Rescaling(scale, -float(task.read("shift")) * scale)
    nets = {
        "lenet": [
            *(layers.Conv2D(20, 5), layers.MaxPooling2D()),
            *(layers.Conv2D(50, 5), layers.MaxPooling2D(), layers.Flatten()),
            *(layers.Dense(500, activation="relu"), layers.Dense(10, activation="softmax")),
        ],
        "cifar": [
            *(layers.Conv2D(32, 5, **same), layers.MaxPooling2D(3, 2, **same), layers.ReLU()),
            layers.Conv2D(32, 5, activation="relu", **same),
            layers.AveragePooling2D(3, 2, **same),
            layers.Conv2D(64, 5, activation="relu", **same),
            *(layers.AveragePooling2D(3, 2, **same), layers.Flatten()),
            *(layers.Dense(64), layers.Dense(10, activation="softmax")),
        ],
        "adult": [layers.Dense(64, activation="relu"), layers.Dense(2, activation="softmax")],
    }
    return keras.Sequential([keras.Input(shape), standardise, *nets[task.work]])


def predict(model: keras.Model, samples: NDArray[Any]) -> NDArray[Any]:
    """The outputs (n, classes) for all samples."""
    parts = [
        np.asarray(model(samples[first : first + _TESTED_AT_ONCE], training=False))
        for first in range(0, len(samples), _TESTED_AT_ONCE)
    ]
    return np.concatenate(parts)
