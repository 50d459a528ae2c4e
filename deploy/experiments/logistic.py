"""Sparse logistic regression with an L1 penalty, and the proximal rule that it is trained by.

The rows are like those of click prediction: each has 49 categories, hashed to 16,384 binary
features. They are made of MNIST: the category of each 4 x 4 patch is its pattern of dark pixels,
and the label is whether the digit is 5 or more.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from deploy.experiments.images import HELD_OUT, Bytes, choose_images, mnist
from deploy.experiments.problem import BLOCK, Batch, Measurement, Rows
from shards import argument_checks
from shards.rules import Decay, UpdateRule
from shards.tables import DenseTable, RateRun, TensorSpec
from worker.strategies.base import Floats

FEATURES = 16_384
PENALTY = 1e-5
_PATCH = 4
_DARK = 128  # the brightness from which a pixel counts


class Logistic:
    """The mean log loss of `batch` rows; the update rule applies the penalty.

    The measured loss includes PENALTY times the sum of absolute weights. `tested` rows of the test
    set are measured; with `held_out` rows of the training set, which no gradient then sees.
    """

    worst_error = 50.0

    def __init__(self, batch: int = 4, tested: int = 10_000, *, held_out: bool = False) -> None:
        self.batch = batch
        self.table = DenseTable("l1", (TensorSpec("w", (FEATURES,)),))
        self._rows, self._labels = _hash_features()
        if held_out:
            self._rows, self._labels = self._rows[:-HELD_OUT], self._labels[:-HELD_OUT]
        images, digits = choose_images(tested, held_out=held_out)
        self._tests, self._test_labels = _features(images), _label(digits)

    def start(self, seed: int) -> Floats:
        return self.table.empty()

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        while True:
            yield from dice.integers(len(self._labels), size=(BLOCK, self.batch))

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        rows, labels = self._rows[batch], self._labels[batch]
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run overflows
            margins = weights[rows].sum(1, dtype=np.float64) * labels
            slope = -labels / (1 + np.exp(margins)) / self.batch
            loss = float(np.logaddexp(0, -margins).mean())
        spread = np.repeat(slope, rows.shape[1])
        out[:FEATURES] = np.bincount(rows.ravel(), spread, FEATURES)
        out[FEATURES:] = 0
        return loss

    def measure(self, weights: Floats) -> Measurement:
        margins = weights[self._tests].sum(1, dtype=np.float64) * self._test_labels
        penalty = PENALTY * float(np.abs(weights, dtype=np.float64).sum())
        loss = float(np.logaddexp(0, -margins).mean()) + penalty
        if not np.isfinite(loss):
            return Measurement(float("nan"), self.worst_error)
        wrong = np.heaviside(-margins, 0.5)  # a margin of 0 is a guess
        return Measurement(loss, 100 * float(wrong.mean()))


@cache
def _hash_features() -> tuple[NDArray[np.int32], NDArray[np.float64]]:
    """The features of each training image, (n, 49), and its label."""
    data = mnist()
    return _features(data.train), _label(data.labels)


def _label(digits: Rows) -> NDArray[np.float64]:
    """1 or -1 for each digit."""
    return np.where(digits >= 5, 1.0, -1.0)


def _features(images: Bytes) -> NDArray[np.int32]:
    across = 28 // _PATCH
    dark = (images >= _DARK).reshape(-1, across, _PATCH, across, _PATCH)
    bits = dark.transpose(0, 1, 3, 2, 4).reshape(len(images), across**2, _PATCH**2)
    patterns = bits @ (1 << np.arange(_PATCH**2, dtype=np.uint64))
    names = patterns + (np.arange(across**2, dtype=np.uint64) << np.uint64(_PATCH**2))
    # The high bits of a product with an odd constant spread best (Knuth, TAOCP 3, section 6.4).
    hashed = (names * np.uint64(2654435761)) % np.uint64(1 << 32) >> np.uint64(18)
    features: NDArray[np.int32] = hashed.astype(np.int32)
    return features


class Proximal(UpdateRule, frozen=True, tag="proximal"):
    """w -= rate*g, then each weight moves by rate*l1 towards 0, and stops there.

    The step of proximal gradient descent for a penalty of l1 times the sum of absolute weights, as
    in Li et al. 2014. Weight decay is not supported.
    """

    l1: float = PENALTY

    def __post_init__(self) -> None:
        argument_checks.number("rule proximal: l1", self.l1, least=0, expected="0 or more")

    def prepare(self, backend: object = None) -> None:
        """Nothing is compiled: the formula is NumPy's."""

    def apply(
        self,
        weights: Floats,
        gradient: Floats,
        slots: tuple[Floats, ...],
        out: Floats,
        segments: Sequence[RateRun],
        *,
        rate: float,
        decay: Decay,
        count: int,
        read: Floats | None = None,
    ) -> None:
        np.multiply(gradient, np.float32(-rate), out)
        out += weights
        limit = np.float32(rate * self.l1)
        out -= np.clip(out, -limit, limit)
