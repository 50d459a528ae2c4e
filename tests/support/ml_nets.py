"""Networks in NumPy for `worker.ml`, which Spark's tasks import by name."""

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import worker
from worker.ml.nets import train_net

Floats = NDArray[np.float32]
Arrays = Mapping[str, NDArray[Any]]


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


class Shaped(Line):
    """A linear function of rows that must have this shape and type."""

    def __init__(self, size: int, dtype: str, shape: list[int]) -> None:
        super().__init__(size)
        self.row = dtype, tuple(shape)

    def outputs(self, params: Arrays, inputs: Arrays) -> NDArray[Any]:
        return self.flat(inputs)["features"] @ params["slope"]

    def gradient(self, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        return super().gradient(params, {**self.flat(batch), "label": batch["label"]})

    def flat(self, inputs: Arrays) -> Arrays:
        """The inputs as the line reads them."""
        values = inputs["features"]
        if values.ndim > 2 or values.dtype == np.uint8:
            assert (values.dtype.name, values.shape[1:]) == self.row, (values.dtype, values.shape)
        return {"features": values.reshape(len(values), -1).astype(np.float32)}


class Difference:
    """The difference of two inputs, each with a learned factor; its layers are the terms."""

    def params(self, seed: int) -> dict[str, Floats]:
        return {"factors": np.zeros(2, np.float32)}

    def outputs(self, params: Arrays, inputs: Arrays) -> dict[str, NDArray[Any]]:
        first, second = (
            factor * inputs[name].reshape(-1, 1)
            for factor, name in zip(params["factors"], ("minuend", "subtrahend"), strict=True)
        )
        return {"output": first - second, "first": first, "second": second}

    def gradient(self, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        error = self.outputs(params, batch)["output"] - batch["label"].reshape(-1, 1)
        signs = (batch["minuend"], -batch["subtrahend"])
        factors = [float((error * each.reshape(-1, 1)).mean()) for each in signs]
        return float((error**2).mean()), {"factors": np.array(factors, np.float32)}


class NoModel:
    """Lacks the methods of a model."""


def broken() -> Any:
    """Cannot make its model."""
    raise RuntimeError("no such file: weights")


class DiesOnce:
    """Counts its steps: each gradient is 1. Its process is killed in one of them, the first time.

    The file at `mark` says that it has died.
    """

    def __init__(self, mark: str, step: int) -> None:
        self.mark = Path(mark)
        self.left = step

    def params(self, seed: int) -> dict[str, Floats]:
        return {"steps": np.zeros(1, np.float32)}

    def outputs(self, params: Arrays, inputs: Arrays) -> NDArray[Any]:
        return np.zeros((len(inputs["features"]), 1))

    def gradient(self, params: Arrays, batch: Arrays) -> tuple[float, Arrays]:
        self.left -= 1
        if not self.left and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return 0.0, {"steps": np.ones(1, np.float32)}


def train_and_die(mark: str, task: Any, ctx: worker.Context) -> None:
    """Train a network; the process is killed at the seventh batch, the first time.

    The file at `mark` says that it has died.
    """
    given = ctx.batches

    def batches(*args: Any, **options: Any) -> Iterator[Any]:
        for number, batch in enumerate(given(*args, **options)):
            if number == 7 and not Path(mark).exists():
                Path(mark).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    ctx.batches = batches  # type: ignore[method-assign]
    train_net(task, ctx)
