"""What experiments train: small problems in NumPy, with real gradients.

A workload gives initial weights, the batches of each worker, the gradient of a batch at given
weights, and a measurement on held-out data. Batches are drawn with replacement from the whole
training set, by a stream that seed and worker decide; so the data of a worker's n-th step does not
depend on the order of events.
"""

from collections.abc import Iterator
from functools import cache
from importlib.resources import as_file, files
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.tables import DenseTable, TensorSpec
from worker.strategies.base import Floats

Bytes = NDArray[np.uint8]
Rows = NDArray[np.int64]
Batch = NDArray[Any]

_BLOCK = 256


class Measurement(NamedTuple):
    """The loss and the error of weights on held-out data; the error is a share in percent."""

    loss: float
    error: float


class Workload(Protocol):
    """A problem to train."""

    @property
    def table(self) -> DenseTable:
        """The table of its weights."""

    @property
    def worst_error(self) -> float:
        """The error in percent of a guess, which a diverged run counts with."""

    def start(self, seed: int) -> Floats:
        """Initial weights, an arena of the table."""

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        """What each gradient of a worker is computed from, without end."""

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        """Write the gradient at `weights` to `out`, zeros in the padding included; returns the
        loss."""

    def measure(self, weights: Floats) -> Measurement:
        """Test the weights."""


class Quad:
    """loss = 1/2 sum h_i w_i^2, with h from 1/`condition` to 1, and noise on the gradient.

    Every weight starts at 1. The error is 100 times the loss, relative to the loss at the start.
    """

    worst_error = 100.0

    def __init__(self, size: int = 64, condition: float = 100.0, noise: float = 0.1) -> None:
        self.table = DenseTable("quad", (TensorSpec("w", (size,)),))
        self.steep = np.geomspace(1 / condition, 1.0, size).astype(np.float32)
        self.noise = np.float32(noise)
        self._size = size

    def start(self, seed: int) -> Floats:
        arena = self.table.empty()
        arena[: self._size] = 1.0
        return arena

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        while True:
            yield from dice.standard_normal((_BLOCK, 1, self._size), np.float32)

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        size = self._size
        at = weights[:size]
        out[size:] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run overflows
            np.multiply(self.steep, at, out=out[:size])
            loss = 0.5 * float(at @ out[:size])
            out[:size] += self.noise * batch[0]
        return loss

    def measure(self, weights: Floats) -> Measurement:
        at = weights[: self._size].astype(np.float64)
        steep = self.steep.astype(np.float64)
        loss = 0.5 * float(steep @ at**2)
        return Measurement(loss, 100 * loss / (0.5 * float(steep @ np.ones_like(at))))


class Images(NamedTuple):
    """Images (n, 784) and labels (n,), in bytes, of the two parts."""

    train: Bytes
    labels: Rows
    test: Bytes
    test_labels: Rows


@cache
def mnist() -> Images:
    """The packaged MNIST: 60,000 images to train with and 10,000 to test with."""
    from worker.data.idx import open_idx
    from worker.data.wanted import Wanted

    with as_file(files("deploy") / "demo" / "mnist") as folder:
        train = open_idx(folder, Wanted(split="train", classes=10))
        test = open_idx(folder, Wanted(split="test", classes=10))
    return Images(
        train.images.reshape(train.rows, -1),
        train.labels.astype(np.int64),
        test.images.reshape(test.rows, -1),
        test.labels.astype(np.int64),
    )


class Mlp:
    """MNIST through dense layers with ReLU: 784, the `hidden` sizes, 10; softmax and its loss.

    `tested` images are measured, the first of the test set. A gradient is the mean of `batch`.
    """

    worst_error = 90.0

    def __init__(
        self, batch: int = 4, hidden: tuple[int, ...] = (32,), tested: int = 10_000
    ) -> None:
        self.batch, self._tested = batch, tested
        self._data = mnist()
        sizes = (784, *hidden, 10)
        self._layers = list(pairwise(sizes))
        tensors = [
            TensorSpec(f"{part}{number}", (inputs, outputs) if part == "w" else (outputs,))
            for number, (inputs, outputs) in enumerate(self._layers)
            for part in ("w", "b")
        ]
        self.table = DenseTable("mlp", tuple(tensors))
        self._places = [
            (slice(start, start + one.size), one.shape)
            for one, start in zip(tensors, self.table.offsets, strict=True)
        ]
        self._range = np.arange(batch)

    def start(self, seed: int) -> Floats:
        arena = self.table.empty()
        dice = np.random.default_rng((seed, 3))
        for number, (inputs, outputs) in enumerate(self._layers):
            place, _ = self._places[2 * number]
            drawn = dice.standard_normal(inputs * outputs, np.float32)
            arena[place] = drawn * np.float32((2 / inputs) ** 0.5)
        return arena

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        while True:
            yield from dice.integers(len(self._data.labels), size=(_BLOCK, self.batch))

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        # A diverging run overflows on its way; what it returns is then not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            return self._gradient(weights, batch, out)

    def _gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        x = self._data.train[batch].astype(np.float32)
        x *= np.float32(1 / 255)
        right = self._data.labels[batch]
        parts = [weights[place].reshape(shape) for place, shape in self._places]
        activations = [x]
        for number in range(len(self._layers) - 1):
            hidden = activations[-1] @ parts[2 * number]
            hidden += parts[2 * number + 1]
            np.maximum(hidden, 0, out=hidden)
            activations.append(hidden)
        scores = activations[-1] @ parts[-2]
        scores += parts[-1]
        scores -= scores.max(1, keepdims=True)
        slope = np.exp(scores)
        slope /= slope.sum(1, keepdims=True)
        hit = slope[self._range, right]
        slope[self._range, right] -= 1
        slope *= np.float32(1 / self.batch)
        end = len(out)
        for number in reversed(range(len(self._layers))):
            (weight, shape), (bias, _) = self._places[2 * number : 2 * number + 2]
            np.matmul(activations[number].T, slope, out=out[weight].reshape(shape))
            out[weight.stop : bias.start] = 0
            slope.sum(0, out=out[bias])
            out[bias.stop : end] = 0
            end = weight.start
            if number:
                slope = slope @ parts[2 * number].T
                slope *= activations[number] > 0
        return -float(np.log(np.maximum(hit, 1e-30)).mean())

    def measure(self, weights: Floats) -> Measurement:
        if not np.isfinite(weights).all():
            return Measurement(float("nan"), self.worst_error)
        parts = [weights[place].reshape(shape) for place, shape in self._places]
        right = self._data.test_labels[: self._tested]
        with np.errstate(over="ignore", invalid="ignore"):
            x = self._tested_images
            for number in range(len(self._layers) - 1):
                x = np.maximum(x @ parts[2 * number] + parts[2 * number + 1], 0)
            scores = (x @ parts[-2] + parts[-1]).astype(np.float64)
            scores -= scores.max(1, keepdims=True)
            losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(right)), right]
        wrong = float((scores.argmax(1) != right).mean())
        return Measurement(float(losses.mean()), 100 * wrong)

    @property
    def _tested_images(self) -> Floats:
        return _scaled_tests(self._tested)


@cache
def _scaled_tests(count: int) -> Floats:
    return mnist().test[:count].astype(np.float32) * np.float32(1 / 255)


WORKLOADS = ("quad", "mlp", "deep")
_MISSING = {
    "l1": "the Adult data set is not packaged",
    "lenet": "only the mlp is trained in NumPy so far",
    "charlm": "no text is packaged to train a language model on",
}


@cache
def workload_of(name: str, batch: int = 4, tested: int = 10_000) -> Workload:
    """A workload by name: quad, mlp, or deep:N, with N hidden layers of 64; raises BadInput."""
    kind, _, option = name.partition(":")
    match kind:
        case "quad" if not option:
            return Quad()
        case "mlp" if not option:
            return Mlp(batch, tested=tested)
        case "deep" if option in {"1", "2", "4", "6"}:
            return Mlp(batch, (64,) * int(option), tested)
    if name in _MISSING:
        raise BadInput(f"workload {name} is missing: {_MISSING[name]}")
    raise BadInput(
        f"workload: expected one of {', '.join(WORKLOADS)}, deep as deep:1, 2, 4 or 6, got {name!r}"
    )
