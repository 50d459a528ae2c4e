"""A network in NumPy for `worker.ml`: `model="deploy.examples.numpy_net:Perceptron"`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = Mapping[str, NDArray[Any]]


class Perceptron:
    """A hidden layer and softmax, with a gradient by hand."""

    def __init__(self, size: int, classes: int, hidden: int = 4) -> None:
        """For rows of `size` numbers."""
        self.shapes = (size, hidden), (hidden, classes)

    def params(self, seed: int) -> dict[str, NDArray[np.float32]]:
        """The first parameters, drawn from `seed`."""
        dice = np.random.default_rng(seed)
        into, out = (0.5 * dice.standard_normal(shape, np.float32) for shape in self.shapes)
        return {"into": into, "out": out, "bias": np.zeros(self.shapes[1][1], np.float32)}

    def outputs(self, params: Arrays, inputs: Arrays) -> dict[str, NDArray[Any]]:
        """The hidden layer, (rows, hidden), and the output: a score for each class."""
        hidden = np.tanh(inputs["features"] @ params["into"])
        return {"hidden": hidden, "output": hidden @ params["out"] + params["bias"]}

    def gradient(self, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        """The mean cross-entropy of a batch, and its gradient."""
        layers = self.outputs(params, batch)
        hidden, scores = layers["hidden"], layers["output"]
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        error = powers / powers.sum(axis=1, keepdims=True)
        rows = np.arange(len(error)), batch["label"]
        loss = float(-np.log(error[rows]).mean())
        error[rows] -= 1
        error /= len(error)
        back = error @ params["out"].T * (1 - hidden**2)
        return loss, {
            "into": batch["features"].T @ back,
            "out": hidden.T @ error,
            "bias": error.sum(axis=0),
        }
