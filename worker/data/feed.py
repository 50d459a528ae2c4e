"""The rows of a worker of `worker.run`, once, in the order in which they arrive.

Nothing is kept on disk. worker/data/batches.py has epochs, and the same rows after a retry.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from numpy.typing import NDArray

from shards import argument_checks
from shards.errors import BadInput
from worker.data.column_spool import join_arrays
from worker.data.column_values import column_arrays, slice_rows

Arrays = dict[str, NDArray[Any]]


class RowFeed:
    """The rows of a worker, each once, in the order in which they arrive.

    Each record batch becomes arrays once, and what is given out are views of these, without a copy
    unless rows of two record batches are in one minibatch. So a column of lists is an array
    (rows, length) where all lists of a record batch have one length, and an array of objects
    otherwise.

    Rows that were given out before a task failed come again when it is retried; use
    `Context.batches` where a retried step must have the same rows.
    """

    def __init__(self, stream: Iterator[Any], where: str) -> None:
        self._stream = (piece for batch in stream for piece in slice_rows(batch))
        self._where = where
        self._waiting: deque[tuple[int, Arrays]] = deque()  # of each record batch, with its rows
        self._first = 0  # the first row of the first of them that is not given out
        self._rows = 0  # that wait
        self._ended = False

    def should_stop(self) -> bool:
        """Return whether there are no more rows."""
        return not self._fill(1)

    def next_batch(self, rows: int) -> Arrays:
        """The next rows as an array a column: as many as asked for, fewer at the end.

        Raises BadInput when no rows are left; `should_stop` says so before.
        """
        missing = min(self._fill(argument_checks.whole("next_batch: rows", rows, 1)), rows)
        if not missing:
            raise BadInput(self._where, expected="a call only while should_stop() is false")
        parts: list[Arrays] = []
        while missing:
            count, arrays = self._waiting[0]
            start, end = self._first, min(self._first + missing, count)
            parts.append({name: array[start:end] for name, array in arrays.items()})
            missing -= end - start
            self._rows -= end - start
            self._first = end
            if end == count:
                self._waiting.popleft()
                self._first = 0
        return {name: join_arrays([part[name] for part in parts]) for name in parts[0]}

    def terminate(self) -> None:
        """Give out no more rows; those that are left are not read."""
        self._waiting.clear()
        self._first, self._rows, self._ended = 0, 0, True

    def _fill(self, rows: int) -> int:
        """Read until this many rows wait, or the stream ends; returns how many wait."""
        while self._rows < rows and not self._ended:
            batch = next(self._stream, None)
            if batch is None:
                self._ended = True
            elif batch.num_rows:
                self._waiting.append((batch.num_rows, column_arrays(batch, self._where)))
                self._rows += batch.num_rows
        return self._rows
