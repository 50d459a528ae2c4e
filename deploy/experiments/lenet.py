"""MNIST through the LeNet of the demo, with the project's own Caffe layers.

431,080 weights. A gradient of 64 images takes some 20 ms, about a hundred times an `mlp`'s.
"""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deploy.experiments.images import HELD_OUT, Bytes, choose_images, mnist, open_demo
from deploy.experiments.problem import BLOCK, Batch, Measurement, Rows
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.caffe.weights import lay_out
from worker.strategies.base import Floats

_TESTED_TOGETHER = 500


class LeNetImages:
    """A gradient is the mean over `batch` images; loss and error are those of `tested` test images.

    With `held_out` training images are measured, which no gradient then sees.
    """

    worst_error = 90.0

    def __init__(self, batch: int = 64, tested: int = 10_000, *, held_out: bool = False) -> None:
        self.batch, self._tested = batch, tested
        self._held_out = held_out
        with open_demo() as folder:
            solver = read_solver(folder / "lenet_solver.prototxt")
        self._trained, self._test = solver.train, solver.tests[0].net
        self._local = threading.local()  # a model keeps buffers between calls
        self.table = self._model.table

    @property
    def _model(self) -> CaffeModel:
        """This thread's model."""
        if not hasattr(self._local, "model"):
            self._local.model = CaffeModel(self._trained)
        model: CaffeModel = self._local.model
        return model

    def start(self, seed: int) -> Floats:
        return self._model.initial(seed)

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        count = len(mnist().labels) - (HELD_OUT if self._held_out else 0)
        while True:
            yield from dice.integers(count, size=(BLOCK, self.batch))

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        data = mnist()
        columns = _columns(data.train[batch], data.labels[batch])
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run overflows
            return self._model.gradient(weights, columns, out, step=0, seed=0)

    def measure(self, weights: Floats) -> Measurement:
        if not np.isfinite(weights).all():
            return Measurement(float("nan"), self.worst_error)
        images, labels = choose_images(self._tested, held_out=self._held_out)
        model = CaffeModel(self._test)
        laid = lay_out(weights, self.table, model.net)
        sums, counted = np.zeros(2), 0
        with np.errstate(over="ignore", invalid="ignore"):
            for first in range(0, self._tested, _TESTED_TOGETHER):
                rows = slice(first, min(first + _TESTED_TOGETHER, self._tested))
                columns = _columns(images[rows], labels[rows])
                outputs, many = model.outputs(laid, columns), rows.stop - rows.start
                sums += many * np.array([outputs["loss"], 1 - outputs["accuracy"]])
                counted += many
        loss, wrong = sums / counted
        return Measurement(float(loss), 100 * float(wrong))


def _columns(images: Bytes, labels: Rows) -> dict[str, NDArray[Any]]:
    """Images (n, 784) and their labels as the network's data layer names them."""
    return {"data": images.reshape(-1, 1, 28, 28), "label": labels}
