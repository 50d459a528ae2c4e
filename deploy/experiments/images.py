"""MNIST through dense layers, in NumPy."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import cache
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from deploy.experiments.problem import BLOCK, Batch, Measurement, Rows, cross_entropy
from shards.errors import BadInput
from shards.tables import DenseTable, TensorSpec
from worker.strategies.base import Floats

Bytes = NDArray[np.uint8]
_PAIRS = 5  # of digits
HELD_OUT = 10_000
"""The number of training images, the last ones, that a choice of rates is measured on."""


class Images(NamedTuple):
    """Images (n, 784) and labels (n,), in bytes, of the two parts."""

    train: Bytes
    labels: Rows
    test: Bytes
    test_labels: Rows


def open_demo() -> AbstractContextManager[Path]:
    """The folder of the packaged demo, for as long as the context lasts.

    Raises BadInput where the code is a copy for executors, which has no data.
    """
    folder = files("deploy") / "demo"
    if not folder.is_dir():
        raise BadInput("the demo's data", expected=f"the folder {folder}", got="code without it")
    return as_file(folder)


@cache
def mnist() -> Images:
    """The packaged MNIST: 60,000 images to train with and 10,000 to test with."""
    from worker.data.idx import open_idx
    from worker.data.read_options import ReadOptions

    with open_demo() as demo:
        folder = demo / "mnist"
        train = open_idx(folder, ReadOptions(split="train", classes=10))
        test = open_idx(folder, ReadOptions(split="test", classes=10))
    return Images(
        train.images.reshape(train.rows, -1),
        train.labels.astype(np.int64),
        test.images.reshape(test.rows, -1),
        test.labels.astype(np.int64),
    )


class Mlp:
    """MNIST through dense layers with ReLU: 784, the `hidden` sizes, 10; softmax and its loss.

    `tested` images of the test set are measured (`choose_images`). A gradient is the mean of
    `batch`. With `own_digits` each of five workers has two digits of its own, and the sixth those
    of the first. With `held_out` the last 10,000 training images are measured, and not trained
    with.
    """

    worst_error = 90.0

    def __init__(
        self,
        batch: int = 4,
        hidden: tuple[int, ...] = (32,),
        tested: int = 10_000,
        *,
        own_digits: bool = False,
        held_out: bool = False,
    ) -> None:
        self.batch, self._tested, self._own_digits = batch, tested, own_digits
        self._held_out = held_out
        self._data = mnist()
        sizes = (784, *hidden, 10)
        self._layers = list(pairwise(sizes))
        tensors = [
            TensorSpec(f"{part}{number}", (inputs, outputs) if part == "w" else (outputs,))
            for number, (inputs, outputs) in enumerate(self._layers)
            for part in ("w", "b")
        ]
        self.table = DenseTable("mlp", tuple(tensors))
        self._slices = [
            (slice(start, start + tensor.size), tensor.shape)
            for tensor, start in zip(tensors, self.table.offsets, strict=True)
        ]
        self._range = np.arange(batch)

    def start(self, seed: int) -> Floats:
        arena = self.table.empty()
        dice = np.random.default_rng((seed, 3))
        for number, (inputs, outputs) in enumerate(self._layers):
            part, _ = self._slices[2 * number]
            drawn = dice.standard_normal(inputs * outputs, np.float32)
            arena[part] = drawn * np.float32((2 / inputs) ** 0.5)
        return arena

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice, labels = np.random.default_rng((seed, worker, 2)), self._data.labels
        labels = labels[:-HELD_OUT] if self._held_out else labels
        rows = np.arange(len(labels))
        if self._own_digits:
            rows = np.flatnonzero(labels % _PAIRS == worker % _PAIRS)
        while True:
            yield from rows[dice.integers(len(rows), size=(BLOCK, self.batch))]

    def gradients(self, weights: Floats, batches: Batch, out: Floats) -> None:
        self.gradient(weights, batches, out)

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        """Gradients of one model or, along a first axis, of several; returns the mean loss."""
        # A diverging run overflows on its way; what it returns is then not finite.
        with np.errstate(over="ignore", invalid="ignore"):
            x = self._data.train[batch].astype(np.float32)
            x *= np.float32(1 / 255)
            parts = self._split(weights)
            activations = [x]
            for number in range(len(self._layers) - 1):
                hidden = activations[-1] @ parts[2 * number]
                hidden += parts[2 * number + 1]
                np.maximum(hidden, 0, out=hidden)
                activations.append(hidden)
            scores = activations[-1] @ parts[-2]
            scores += parts[-1]
            right = self._data.labels[batch].ravel()
            rows = self._range if right.size == self.batch else np.arange(right.size)
            flat = scores.reshape(-1, scores.shape[-1])
            loss, flat = cross_entropy(flat, rows, right, self.batch)
            slope = flat.reshape(scores.shape)
            end = out.shape[-1]
            for number in reversed(range(len(self._layers))):
                (weight, shape), (bias, _) = self._slices[2 * number : 2 * number + 2]
                slot = out[..., weight].reshape(*weights.shape[:-1], *shape)
                np.matmul(activations[number].swapaxes(-1, -2), slope, out=slot)
                out[..., weight.stop : bias.start] = 0
                slope.sum(-2, out=out[..., bias])
                out[..., bias.stop : end] = 0
                end = weight.start
                if number:
                    slope = slope @ parts[2 * number].swapaxes(-1, -2)
                    slope *= activations[number] > 0
        return loss

    def _split(self, weights: Floats) -> list[Floats]:
        """Views of the tensors of one model or of several; a bias is a row."""
        lead = weights.shape[:-1]
        return [
            weights[..., part].reshape(*lead, *(shape if len(shape) > 1 else (1, *shape)))
            for part, shape in self._slices
        ]

    def measure(self, weights: Floats) -> Measurement:
        if not np.isfinite(weights).all():
            return Measurement(float("nan"), self.worst_error)
        parts = [weights[part].reshape(shape) for part, shape in self._slices]
        x, right = _scale_tests(self._tested, held_out=self._held_out)
        with np.errstate(over="ignore", invalid="ignore"):
            for number in range(len(self._layers) - 1):
                x = np.maximum(x @ parts[2 * number] + parts[2 * number + 1], 0)
            scores = (x @ parts[-2] + parts[-1]).astype(np.float64)
            scores -= scores.max(1, keepdims=True)
            losses = np.log(np.exp(scores).sum(1)) - scores[np.arange(len(right)), right]
        wrong = float((scores.argmax(1) != right).mean())
        return Measurement(float(losses.mean()), 100 * wrong)


@cache
def _scale_tests(count: int, *, held_out: bool) -> tuple[Floats, Rows]:
    """The images to measure, from 0 to 1, and their labels."""
    images, labels = choose_images(count, held_out=held_out)
    return images.astype(np.float32) * np.float32(1 / 255), labels


@cache
def choose_images(count: int, *, held_out: bool = False) -> tuple[Bytes, Rows]:
    """The test images that are measured, and their labels: a random part, the same in each run.

    Each digit has its share. The first 2,000 images of the test set are harder than the others: the
    same weights are wrong on 7.75 % of them and on 5.57 % of all. With `held_out` the images are of
    the last HELD_OUT training images.
    """
    data = mnist()
    images, labels = data.test, data.test_labels
    if held_out:
        images, labels = data.train[-HELD_OUT:], data.labels[-HELD_OUT:]
    rows = _choose_rows(labels, count)
    return images[rows], labels[rows]


def _choose_rows(labels: Rows, count: int) -> Rows:
    """Rows in which each label has its share; a smaller choice is part of a larger one."""
    dice = np.random.default_rng(5)
    ranks = np.empty(len(labels))
    for label in np.unique(labels):
        rows = dice.permutation(np.flatnonzero(labels == label))
        ranks[rows] = (np.arange(len(rows)) + 0.5) / len(rows)
    return np.sort(np.argsort(ranks, kind="stable")[:count])
