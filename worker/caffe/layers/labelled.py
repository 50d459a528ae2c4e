"""Layers of scores and labels: the rows of scores, and a label for each.

Labels are numbers of any type and must be whole and in [0, classes), except for the ignored label,
which may be any. The scores' class axis is moved last and the rest flattened to rows.
"""

from math import prod

import numpy as np

from cupy_kernels.types import AnyArray, Array, Labels
from worker.caffe.layer import Layer, as_stored, contiguous, to_nchw
from worker.caffe.layers.loss_divisor import divisor


class Labelled(Layer):
    """A layer of scores, as rows of classes, and labels, one for each row."""

    BOTTOMS = range(2, 3)
    TOPS = range(1, 3)

    def set_up_rows(self, axis: int, ignored: int | None) -> None:
        """Set the class axis and the ignored label; check that each row of scores has a label."""
        scores, labels = self.bottoms[:2]
        self._axis = self.axis(axis, scores)
        self._ignored = ignored
        self.classes = scores[self._axis]
        if prod(scores) != prod(labels) * self.classes:
            raise self.bad(
                f"expected a label for each of {prod(scores) // self.classes} rows of scores of"
                f" shape {self.describe_bottom(0)}, got labels of shape {self.describe_bottom(1)}"
            )

    def scores(self, bottom: AnyArray) -> Array:
        """The scores as (rows, classes), in Caffe's order; (n, c, h, w) needs no copy."""
        moved = np.moveaxis(to_nchw(bottom), self._axis, -1)
        self._shape = moved.shape
        return contiguous(moved, self.work, "scores").reshape(-1, self.classes)

    def back(self, rows: Array, role: str) -> AnyArray:
        """The inverse of `scores`."""
        return as_stored(np.moveaxis(rows.reshape(self._shape), -1, self._axis), self.work, role)

    def divisor(self, mode: int) -> int | None:
        """The divisor of a loss over the latest scores, in a mode of normalisation."""
        rows = prod(self._shape[:-1])
        return divisor(mode, rows, prod(self._shape[: self._axis]))

    def check_column(self, bottom: int, column: AnyArray) -> None:
        if bottom == 1:
            self.labels(column)

    def labels(self, bottom: AnyArray) -> Labels:
        """The labels as indices."""
        return self.indices(1, bottom, self.classes, ignored=self._ignored)
