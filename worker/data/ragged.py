"""Lists of any length, one a row, without an object for each.

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
