"""The prediction of a network for the rows of a partition, as Spark's tasks run it.

Rows come in as Arrow batches and leave as Arrow batches with more columns; those that they have are
passed on as they are. A Python process of Spark builds a network once and keeps it.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from shards.errors import BadInput
from worker.data.column_values import DENSE_TAG, VECTOR, is_vector, number_array, sparse_vectors
from worker.job.stored_rows import StoredRows
from worker.ml.nets import Floats, LoadedNet, NetSpec, build

_ROWS = 1024  # of one call of a network


class Predictor(msgspec.Struct, frozen=True):
    """The computation of every task.

    `key` identifies the network with its `weights` and `rows` among those that a process has
    loaded. `shapes` are those of a row of each input in training, for the error of a row that does
    not fit. `inputs` are the network's inputs by the columns that they are read from, which the
    result leaves out.
    The columns that are added: that of each of the `layers`, and of a classifier the scores, the
    probabilities and the class, of a regression the value; the last three are left out where their
    name in `outputs` is empty.
    """

    key: str
    net: NetSpec
    weights: Mapping[str, Floats]
    rows: StoredRows
    shapes: Mapping[str, tuple[int, ...]]
    inputs: Mapping[str, str]
    layers: Mapping[str, str]
    outputs: tuple[str, ...]
    classifies: bool
    several: bool


_loaded: dict[str, LoadedNet] = {}
"""The network of the latest predictions in this process."""


def predict(
    batches: Iterator[pa.RecordBatch],
    _part: int,
    _attempt: int,
    _gpus: Sequence[str],
    *,
    of: Predictor,
) -> Iterator[pa.RecordBatch]:
    """The batches with the columns of the predictor in place of its inputs.

    Spark shows the traceback of a task, twice; of an error of the rows only its line matters.
    """
    try:
        yield from _predict_batches(batches, of)
    except BadInput as error:
        raise error.with_traceback(None) from None


def _predict_batches(batches: Iterator[pa.RecordBatch], of: Predictor) -> Iterator[pa.RecordBatch]:
    net = _load(of)
    with threadpool_limits(1):
        for batch in batches:
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            inputs = {
                name: _check_size(read_input(columns.pop(column), name, of.net), name, of)
                for column, name in of.inputs.items()
            }
            if batch.num_rows:
                columns |= _predict_columns(net, inputs, batch.num_rows, of)
                yield pa.RecordBatch.from_pydict(columns)


def _load(of: Predictor) -> LoadedNet:
    if of.key not in _loaded:
        _loaded.clear()
        net = build(of.net)
        net.load(of.weights, of.rows)
        _loaded[of.key] = net
    return _loaded[of.key]


def _predict_columns(
    net: LoadedNet, inputs: Mapping[str, NDArray[Any]], rows: int, of: Predictor
) -> dict[str, pa.Array]:
    """The columns that a predictor adds."""
    layers = list(of.layers)
    outputs: list[list[NDArray[Any]]] = []
    for first in range(0, rows, _ROWS):
        part = {name: values[first : first + _ROWS] for name, values in inputs.items()}
        try:
            outputs.append(net.outputs(part, layers))
        except BadInput:
            raise
        except Exception as error:  # noqa: BLE001  # a network may fail in its own way
            shapes = ", ".join(f"{name} {values.shape[1:]}" for name, values in part.items())
            trained = ", ".join(f"{name} {of.shapes[name]}" for name in part)
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise BadInput(
                f"transform: model {of.net.model}",
                expected=f"rows of {trained}, as in training",
                got=f"{shapes}: {line}",
            ) from None
    output, *others = (np.concatenate(parts) for parts in zip(*outputs, strict=True))
    arrays = {
        of.layers[layer]: vectors(values.reshape(rows, -1))
        for layer, values in zip(layers, others, strict=True)
    }
    columns = _score(output, of) if of.classifies else (_values(output, of),)
    arrays |= {name: make for name, make in zip(of.outputs, columns, strict=True) if name}
    return arrays


def _score(output: NDArray[Any], of: Predictor) -> tuple[Any, ...]:
    """The scores, the probabilities and the class of each row."""
    scores = output.reshape(len(output), -1).astype(np.float64)
    raw, probability, prediction = of.outputs
    powers = np.exp(scores - scores.max(axis=1, keepdims=True)) if probability else scores
    return (
        vectors(scores) if raw else None,
        vectors(powers / powers.sum(axis=1, keepdims=True)) if probability else None,
        pa.array(scores.argmax(axis=1).astype(np.float64)) if prediction else None,
    )


def _values(output: NDArray[Any], of: Predictor) -> Any:
    if of.several:
        return list_array(output, pa.float64())
    return pa.array(output.reshape(len(output)).astype(np.float64))


def read_input(column: Any, name: str, net: NetSpec) -> Any:
    """An input of a network by its name: `SparseVectors` if it reads them, else an array."""
    stays = name in net.sparse and is_vector(column.type)
    return (sparse_vectors if stays else input_array)(column, f"transform: {name}")


def _check_size(values: Any, name: str, of: Predictor) -> Any:
    """The values; raises BadInput for a size that was not trained, which rows by id do not see."""
    if of.rows.tables and values.shape[1:] != of.shapes[name]:
        expected, got = (f"{prod(shape)} values" for shape in (of.shapes[name], values.shape[1:]))
        raise BadInput(f"transform: {name}", expected=f"{expected}, as in training", got=got)
    return values


def input_array(column: pa.Array, where: str) -> NDArray[Any]:
    """An input of a network as (rows, ...), float32 or uint8, to write in; raises BadInput."""
    return np.array(number_array(column, where))


def list_array(values: NDArray[Any], kind: pa.DataType) -> pa.ListArray:
    """The rows of an array as lists of `kind`."""
    flat = np.ascontiguousarray(values, kind.to_pandas_dtype()).reshape(len(values), -1)
    offsets = np.arange(0, flat.size + 1, max(1, flat.shape[1]), dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(flat.ravel(), kind))


def vectors(values: NDArray[Any]) -> pa.StructArray:
    """The rows of an array as dense vectors of Spark ML."""
    rows = len(values)
    parts = [
        pa.array(np.full(rows, DENSE_TAG, np.int8)),
        pa.nulls(rows, pa.int32()),
        pa.nulls(rows, pa.list_(pa.int32())),
        list_array(values, pa.float64()),
    ]
    return pa.StructArray.from_arrays(parts, fields=list(VECTOR))
