"""An independent oracle of a sparse table: a dict of rows, updated row by row in plain loops."""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import mix
from deploy.simulation.row_model import OracleRow, first_row
from shards.rules import Rule
from shards.shard_state import IDS, META, ROWS, Arrays
from shards.tables import SparseTable

F = np.float32


class RowOracle:
    """The rows of one table, by id."""

    def __init__(self, table: SparseTable, rule: Rule, decay: float = 0.0) -> None:
        self.table, self.rule, self.decay = table, rule, F(decay)
        self.rows: dict[int, OracleRow] = {}

    def push(self, ids: NDArray[np.uint64], gradients: NDArray[np.float32], rate: float) -> None:
        """Update each row by its gradient; a new one begins with its first values."""
        for number, gradient in zip(ids.tolist(), gradients, strict=True):
            row = self.rows.setdefault(number, OracleRow(first_row(number, self.table)))
            row.update(self.rule, gradient, F(rate), self.decay)

    def gather(self, ids: NDArray[np.uint64]) -> NDArray[np.float32]:
        """The weights of these ids; nothing is stored."""
        shape = len(ids), self.table.dim
        weights = [
            self.rows[number].weights if number in self.rows else first_row(number, self.table)
            for number in ids.tolist()
        ]
        return np.array(weights, F).reshape(shape)

    def check_state(self, arrays: Arrays) -> None:
        """Assert that exported arrays hold exactly these rows."""
        ids = arrays[IDS].tolist()
        assert sorted(ids) == sorted(self.rows)
        hashes = mix(arrays[IDS]).tolist()
        assert hashes == sorted(hashes)
        for at, number in enumerate(ids):
            row = self.rows[number]
            assert np.array_equal(arrays[ROWS][at], row.floats(self.rule)), f"row {number}"
            assert arrays[META][at, 1] == row.count, f"row {number}"
            assert arrays[META][at, 2:3].view(F)[0] == row.row_slot, f"row {number}"
