"""The test of a network on rows that this process holds, while the workers of a fit train."""

from typing import Any

import numpy as np
import pyarrow as pa

import ps
from shards.errors import BadInput
from worker.ml.nets import LABEL, NetSpec, build_imported, by_name
from worker.ml.predict import input_array

_ROWS = 1024  # of one call of the network


class NetTest:
    """The rows marked for tests, and a network of its own to compute their figures with."""

    def __init__(self, net: NetSpec, dense: ps.Dense, rows: pa.Table, *, classifies: bool) -> None:
        """`rows` has the inputs of the network and `label`; `dense` describes its parameters."""
        self._net = build_imported(net, 1)
        self._dense = dense
        if not rows.num_rows:
            raise BadInput("the DataFrame", expected="rows marked to test on", got="none")
        columns = {name: rows[name].combine_chunks() for name in rows.column_names}
        label = columns.pop(LABEL)
        self._inputs = {name: input_array(column, name) for name, column in columns.items()}
        is_list = pa.types.is_list(label.type)
        self._labels: Any = input_array(label, LABEL) if is_list else label.to_numpy()
        self._classifies = classifies

    def figures(self, params: Any) -> dict[str, float]:
        """The mean loss, and of classes the accuracy; the loss is that of a `torch` module."""
        self._net.load(by_name(self._dense, params))
        rows = len(self._labels)
        parts = [
            {name: values[first : first + _ROWS] for name, values in self._inputs.items()}
            for first in range(0, rows, _ROWS)
        ]
        outputs = np.concatenate([self._net.outputs(part, [])[0] for part in parts])
        scores = outputs.reshape(rows, -1).astype(np.float64)
        if not self._classifies:
            return {"loss": float(np.square(scores - self._labels.reshape(scores.shape)).mean())}
        scores -= scores.max(axis=1, keepdims=True)
        right = scores[np.arange(rows), self._labels]
        loss = np.log(np.exp(scores).sum(axis=1)) - right
        accuracy = float((scores.argmax(axis=1) == self._labels).mean())
        return {"accuracy": accuracy, "loss": float(loss.mean())}
