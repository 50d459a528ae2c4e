"""Minibatches from a stream of Arrow record batches, such as a Spark partition.

The invariant: the sequence of minibatches depends only on the rows, their order in the stream, the
seed, the worker's name and the batch size. How the stream is cut into record batches, when they
arrive and at which step this incarnation of the worker started do not matter, so a retried task
that starts at step k continues with exactly the batch that step k would have had.

The rows form one sequence: epoch after epoch, each a permutation of all rows. Minibatch k is places
[k*n, (k+1)*n) of it. So every batch is full: the tail of an epoch shares a batch with the head of
the next, and a partition smaller than a batch repeats within one. Without a number of epochs the
sequence is endless; with one, the last batch may be shorter.

The rows are decoded and kept by a spool: `ImageSpool` has what a net reads, `ColumnSpool` columns
of any type. The first epoch trains while they arrive. They are shuffled within
blocks of `shuffle_rows`, since later rows are not available yet. Every later epoch is a permutation
of the whole spool. Each permutation has its own generator, keyed by (seed, worker, epoch, block),
so none depends on another and skipping is cheap.
"""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import count
from typing import Any, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from ps.closing_context import ClosingContext
from shards.errors import BadInput

Indices = NDArray[np.int64]

# The number of rows that must arrive before the first batch can be cut.
SHUFFLE_ROWS = 4096


class RowStore(Protocol):
    """Decodes record batches and keeps their rows: `ImageSpool`, or `ColumnSpool`."""

    @property
    def rows(self) -> int:
        """The rows so far."""
        ...

    def append(self, batch: Any, /) -> None:
        """Append the rows of a record batch."""
        ...

    def take(self, rows: NDArray[Any], /) -> dict[str, Any]:
        """The rows with these numbers, in this order, as new arrays."""
        ...

    def close(self) -> None:
        """Free the space."""
        ...


class Batches(ClosingContext, Iterator[dict[str, NDArray[Any]]]):
    """An iterator over minibatches of `batch_size` rows, from step `start_step` on.

    `stream` yields pyarrow record batches, of any sizes, which `spool` decodes and keeps. Each
    minibatch has its columns by name, as new arrays: {"data": (batch_size, c, h, w), "label":
    (batch_size,) int64} of an `ImageSpool` by default. A stream without rows gives no batch.

    With `shuffle` false, rows come in the stream's order, epoch after epoch. With `epochs`, the
    sequence ends after so many.

    Close it, or use it as a context manager: that closes the spool. Iterating raises BadInput for a
    row that does not fit, naming it, and for a full disk.
    """

    def __init__(
        self,
        stream: Iterable[Any],
        spool: RowStore,
        batch_size: int,
        seed: int,
        worker: str,
        *,
        start_step: int = 0,
        shuffle: bool = True,
        shuffle_rows: int = SHUFFLE_ROWS,
        epochs: int | None = None,
    ) -> None:
        if batch_size < 1 or shuffle_rows < 1 or start_step < 0:
            raise BadInput(
                f"worker {worker}",
                expected="batch_size and shuffle_rows of 1 or more and start_step of 0 or more",
                got=f"{batch_size}, {shuffle_rows} and {start_step}",
            )
        self._stream = iter(stream)
        self._batch_size = batch_size
        self._key = f"{seed}/{worker}"
        self._shuffle = shuffle
        self._shuffle_rows = shuffle_rows
        self._epochs = epochs
        self._spool = spool
        self._order = self._places(start_step * batch_size)
        self._waiting: Indices = np.empty(0, np.int64)

    @property
    def rows(self) -> int:
        """Rows spooled so far; all of them once the first epoch is over."""
        return self._spool.rows

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, NDArray[Any]]:
        parts, missing = [], self._batch_size
        while missing:
            if not self._waiting.size:
                rows = next(self._order, None)
                if rows is None:
                    break
                self._waiting = rows
            parts.append(self._waiting[:missing])
            self._waiting = self._waiting[missing:]
            missing -= parts[-1].size
        if not parts:
            raise StopIteration
        return self._spool.take(np.concatenate(parts))

    def close(self) -> None:
        """Drop the spool. Idempotent."""
        self._spool.close()

    def _places(self, skipped: int) -> Iterator[Indices]:
        """The sequence of rows, from place `skipped` on, in pieces that are never empty."""
        for block in count():
            start = block * self._shuffle_rows
            size = min(self._spool_up_to(start + self._shuffle_rows) - start, self._shuffle_rows)
            if size > max(skipped - start, 0):
                yield (start + self._permutation(size, 0, block))[max(skipped - start, 0) :]
            if size < self._shuffle_rows:
                break
        if not self.rows:
            return
        first, offset = divmod(max(skipped - self.rows, 0), self.rows)
        epochs = count(first + 1) if self._epochs is None else range(first + 1, self._epochs)
        for epoch in epochs:
            yield self._permutation(self.rows, epoch, 0)[offset:]
            offset = 0

    def _permutation(self, size: int, epoch: int, block: int) -> Indices:
        if not self._shuffle:
            return np.arange(size)
        key = blake2b(f"{self._key}/{epoch}/{block}".encode(), digest_size=16).digest()
        philox = np.random.Philox(key=int.from_bytes(key, "little"))
        return np.random.Generator(philox).permutation(size)

    def _spool_up_to(self, rows: int) -> int:
        """Read the stream until `rows` are spooled or it ends; returns the rows spooled."""
        while self.rows < rows:
            batch = next(self._stream, None)
            if batch is None:
                break
            if batch.num_rows:
                self._spool.append(batch)
        return self.rows
