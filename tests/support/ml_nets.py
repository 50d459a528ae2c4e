"""Networks in NumPy for `worker.ml`, which Spark's tasks import by name."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]


class Classes:
    """A hidden layer and softmax."""

    def __init__(self, size: int, classes: int, hidden: int = 4) -> None:
        self.shapes = (size, hidden), (hidden, classes)

    def params(self, seed: int) -> dict[str, Floats]:
        dice = np.random.default_rng(seed)
        into, out = (0.5 * dice.standard_normal(shape, np.float32) for shape in self.shapes)
        return {"into": into, "out": out, "bias": np.zeros(self.shapes[1][1], np.float32)}

    def outputs(self, params: Arrays, inputs: Arrays) -> dict[str, NDArray[Any]]:
        hidden = np.tanh(inputs["features"] @ params["into"])
        return {"hidden": hidden, "output": hidden @ params["out"] + params["bias"]}

    def gradient(self, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        found = self.outputs(params, batch)
        hidden, scores = found["hidden"], found["output"]
        powers = np.exp(scores - scores.max(axis=1, keepdims=True))
        wrong = powers / powers.sum(axis=1, keepdims=True)
        rows = np.arange(len(wrong)), batch["label"]
        loss = float(-np.log(wrong[rows]).mean())
        wrong[rows] -= 1
        wrong /= len(wrong)
        back = wrong @ params["out"].T * (1 - hidden**2)
        grads = {"out": hidden.T @ wrong, "bias": wrong.sum(axis=0)}
        return loss, {**grads, "into": batch["features"].T @ back}


class Line:
    """A linear function, of one or several outputs."""

    def __init__(self, size: int, outputs: int = 1) -> None:
        self.shape = size, outputs

    def params(self, seed: int) -> dict[str, Floats]:
        return {"slope": np.zeros(self.shape, np.float32)}

    def outputs(self, params: Arrays, inputs: Arrays) -> NDArray[Any]:
        return inputs["features"] @ params["slope"]

    def gradient(self, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        label = batch["label"].reshape(len(batch["label"]), -1)
        error = self.outputs(params, batch) - label
        return float((error**2).mean()), {"slope": batch["features"].T @ error / len(error)}


class NoModel:
    """Lacks the methods of a model."""


def broken() -> Any:
    """Cannot make its model."""
    raise RuntimeError("no such file: weights")
