"""Lists of any length and vectors with few values, one a row, without an object for each.

`values` has the values of all rows, one after another; row n begins at `offsets[n]`. So the ids of
all rows are one array, as `step(gather=...)` takes them:

    tags = batch["tags"]                                        # worker.Ragged
    with ctx.worker.step(gather={"tag": tags.values}) as step:
        totals = np.bincount(tags.row_numbers, step.rows("tag")[:, 0], len(tags))
        ...
        step.scatter("tag", np.repeat(error, tags.lengths)[:, None])
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray


class Ragged:
    """A column of lists: `values` of all rows, and `offsets`, int64 (rows + 1,), that begin at 0.

    It is a sequence of the rows' arrays, which are views of `values`.
    """

    def __init__(self, values: NDArray[Any], offsets: NDArray[np.int64]) -> None:
        """`offsets` has where each row begins among `values`, and where the last one ends."""
        self.values = values
        self.offsets = offsets

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> NDArray[Any]:
        row = range(len(self))[row]  # raises the IndexError that ends an iteration
        array: NDArray[Any] = self.values[self.offsets[row] : self.offsets[row + 1]]
        return array

    def __iter__(self) -> Iterator[NDArray[Any]]:
        return map(self.__getitem__, range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({len(self)} rows, {len(self.values)} values of {self.values.dtype})"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """The number of values of each row."""
        return np.diff(self.offsets)

    @property
    def row_numbers(self) -> NDArray[np.int64]:
        """The row of each value."""
        return np.repeat(np.arange(len(self)), self.lengths)


class SparseVectors:
    """A column of vectors of one `size`, of which only some values are stored, each at its index.

    Those of row n are from `offsets[n]` to `offsets[n + 1]` of `indices`, int64, and of `values`.
    All others are zero. Indexed by a slice, it is a column of these rows.
    """

    def __init__(
        self,
        indices: NDArray[np.int64],
        values: NDArray[Any],
        offsets: NDArray[np.int64],
        size: int,
    ) -> None:
        """`offsets`, (rows + 1,), begin at 0."""
        self.indices = indices
        self.values = values
        self.offsets = offsets
        self.size = size

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, rows: slice) -> "SparseVectors":
        first, last, step = rows.indices(len(self))
        assert step == 1, "rows that follow one another"
        offsets = self.offsets[first : max(first, last) + 1]
        stored = slice(offsets[0], offsets[-1])
        return SparseVectors(
            self.indices[stored], self.values[stored], offsets - offsets[0], self.size
        )

    def __repr__(self) -> str:
        return f"SparseVectors({len(self)} rows of {self.size}, {len(self.values)} values)"

    @property
    def shape(self) -> tuple[int, int]:
        """The rows, and the size of each."""
        return len(self), self.size

    @property
    def row_numbers(self) -> NDArray[np.int64]:
        """The row of each value."""
        return np.repeat(np.arange(len(self)), np.diff(self.offsets))

    def drop_zeros(self) -> "SparseVectors":
        """These vectors without stored zeros."""
        stays = self.values != 0
        offsets = np.concatenate([[0], np.cumsum(stays)])[self.offsets]
        return SparseVectors(self.indices[stays], self.values[stays], offsets, self.size)
