"""The test of a network on rows that this process holds, while the workers of a fit train."""

from typing import Any

import numpy as np
import pyarrow as pa

import ps
from shards.errors import BadInput
from worker.job.stored_rows import StoredRows
from worker.ml.linear import LABEL, Rows
from worker.ml.nets import NetSpec, build_imported, by_name
from worker.ml.predict import input_array, read_input

_ROWS = 1024  # of one call of the network


class NetTest:
    """The rows marked for tests, and a network of its own to compute their figures with."""

    def __init__(
        self, net: NetSpec, tables: ps.Dense | ps.Tables, rows: pa.Table, *, classifies: bool
    ) -> None:
        """`rows` has the inputs of the network and `label`; `tables` describe its parameters."""
        self._net = build_imported(net, 1)
        self._tables = tables
        if not rows.num_rows:
            raise BadInput("the DataFrame", expected="rows marked to test on", got="none")
        columns = {name: rows[name].combine_chunks() for name in rows.column_names}
        label = columns.pop(LABEL)
        self._inputs = {name: read_input(column, name, net) for name, column in columns.items()}
        is_list = pa.types.is_list(label.type)
        self._labels: Any = input_array(label, LABEL) if is_list else label.to_numpy()
        self._classifies = classifies

    def figures(self, params: Any) -> dict[str, float]:
        """The mean loss, and of classes the accuracy; the loss is that of a `torch` module."""
        return self.figures_of_rows(params, StoredRows())

    def figures_of_rows(self, params: Any, rows: Rows) -> dict[str, float]:
        """The `figures` of a network that reads rows by id."""
        self._net.load(by_name(self._tables, params), rows)
        count = len(self._labels)
        parts = [
            {name: values[first : first + _ROWS] for name, values in self._inputs.items()}
            for first in range(0, count, _ROWS)
        ]
        outputs = np.concatenate([self._net.outputs(part, [])[0] for part in parts])
        scores = outputs.reshape(count, -1).astype(np.float64)
        if not self._classifies:
            return {"loss": float(np.square(scores - self._labels.reshape(scores.shape)).mean())}
        scores -= scores.max(axis=1, keepdims=True)
        right = scores[np.arange(count), self._labels]
        loss = np.log(np.exp(scores).sum(axis=1)) - right
        accuracy = float((scores.argmax(axis=1) == self._labels).mean())
        return {"accuracy": accuracy, "loss": float(loss.mean())}
