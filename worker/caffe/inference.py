"""Inference: a network's outputs and inner blobs over rows, in one pass and in order.

The rows are Arrow record batches, as in training, so the same functions serve a local file and,
inside `mapInArrow`, a Spark partition.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.caffe.layers.accuracy import Accuracy
from worker.caffe.model import CaffeModel
from worker.data.arrow_columns import read_columns
from worker.data.columns import DATA, ColumnKind, ColumnSpec
from worker.data.columns import LABEL as LABELS
from worker.data.encoded import decode_images
from worker.data.read_options import MAX_SKIPPED

Floats = NDArray[np.float32]
Sums = dict[str, NDArray[np.float64]]

ID, LABEL = "SampleID", "label"


def evaluate(
    model: CaffeModel,
    weights: Floats,
    rows: Iterable[pa.RecordBatch],
    batch_size: int,
    skip_images: int = MAX_SKIPPED,
    copies: Sequence[CaffeModel] = (),
) -> dict[str, float]:
    """The net's scalar outputs (loss, accuracy ...), averaged with equal weight over all rows.

    It leaves out up to `skip_images` images that cannot be decoded. `copies` of the model compute
    other batches at the same time, each in a thread.
    """
    blobs = model.net.figures
    seen, sums = column_sums(model, weights, rows, blobs, batch_size, skip_images, copies)
    if not seen:
        raise BadInput(model.net.description.file, expected="rows to test on", got="none")
    return {name: float(total[0]) / seen for name, total in sums.items()}


def column_sums(
    model: CaffeModel,
    weights: Floats,
    rows: Iterable[pa.RecordBatch],
    blobs: Sequence[str],
    batch_size: int,
    skip_images: int = MAX_SKIPPED,
    copies: Sequence[CaffeModel] = (),
) -> tuple[int, dict[str, NDArray[np.float64]]]:
    """The number of rows, and for each blob the sum over them of each of its columns, float64.

    A blob of one row is flattened. One of the whole batch, such as a loss or the accuracies by
    class, counts once for each row of its batch. Without rows there are no sums. Up to
    `skip_images` images that cannot be decoded are left out. The sums are the same with `copies` of
    the model that compute other batches at the same time; a net with a state does without them.
    """
    model.net.reset()
    layers = [node.layer for node in model.net.nodes]
    of_batch = {top for layer in layers if isinstance(layer, Accuracy) for top in layer.spec.top}
    columns = model.net.column_specs

    def add_up(model: CaffeModel, part: pa.RecordBatch, first_row: int) -> Sums:
        count, sums = part.num_rows, {}
        batch = to_batch(part, first_row, columns)
        for name, value in model.forward(weights, batch, blobs).items():
            if name in of_batch or value.ndim == 0:
                sums[name] = count * value.ravel().astype(np.float64)
            else:
                sums[name] = _by_row(value, count, name).sum(axis=0, dtype=np.float64)
        return sums

    models = [model, *(() if model.net.keeps_state else copies)]
    parts = slices(decode_images(rows, columns, "rows", max_skipped=skip_images), batch_size)
    sums: Sums = {}
    seen = 0
    for count, of_part in _by_turns(models, parts, add_up):
        for name, total in of_part.items():
            sums[name] = sums[name] + total if name in sums else total
        seen += count
    return seen, sums


def _by_turns(
    models: Sequence[CaffeModel],
    parts: Iterable[pa.RecordBatch],
    add_up: Callable[[CaffeModel, pa.RecordBatch, int], Sums],
) -> Iterator[tuple[int, Sums]]:
    """The rows and the sums of each part, in order; each model computes in a thread."""
    first_row = 0
    if len(models) == 1:  # no other thread: this one may have a priority of its own
        for part in parts:
            yield part.num_rows, add_up(models[0], part, first_row)
            first_row += part.num_rows
        return
    waiting: deque[tuple[int, Future[Sums]]] = deque()
    with ThreadPoolExecutor(len(models), "batches") as pool:
        for number, part in enumerate(parts):
            if len(waiting) == len(models):  # the model of the oldest comes next
                count, sums = waiting.popleft()
                yield count, sums.result()
            model = models[number % len(models)]
            waiting.append((part.num_rows, pool.submit(add_up, model, part, first_row)))
            first_row += part.num_rows
        for count, sums in waiting:
            yield count, sums.result()


def features(
    model: CaffeModel,
    weights: Floats,
    rows: Iterable[pa.RecordBatch],
    blobs: Sequence[str],
    batch_size: int,
    skip_images: int = MAX_SKIPPED,
) -> Iterator[pa.RecordBatch]:
    """For each row its id, each blob flattened into a list of float32, and its label.

    The columns are `SampleID` (the row's `id`, of its own type, or its place if it has none), one
    for each blob, and `label` if the rows have one. Up to `skip_images` images that cannot be
    decoded are left out.
    """
    check_row_blobs(model, blobs)
    model.net.reset()
    seen = 0
    decoded_rows = decode_images(rows, model.net.column_specs, "rows", max_skipped=skip_images)
    for part in slices(decoded_rows, batch_size):
        values = model.forward(weights, to_batch(part, seen, model.net.column_specs), blobs)
        names = part.schema.names
        ids = part.column("id") if "id" in names else pa.array(range(seen, seen + part.num_rows))
        arrays = {ID: ids}
        arrays |= {name: _lists(values[name], part.num_rows, name) for name in blobs}
        if LABEL in names:
            arrays[LABEL] = part.column(LABEL)
        yield pa.RecordBatch.from_pydict(arrays)
        seen += part.num_rows


def check_blobs(model: CaffeModel, blobs: Sequence[str]) -> None:
    """Raise BadInput naming a blob that the net does not have."""
    for name in blobs:
        if name not in model.net.blobs:
            known = ", ".join(model.net.blobs)
            raise BadInput(model.net.description.file, expected=f"blobs among {known}", got=name)


def check_row_blobs(model: CaffeModel, blobs: Sequence[str]) -> None:
    """Raise BadInput naming a blob that the net lacks, or that does not have one value per row."""
    check_blobs(model, blobs)
    for name in blobs:
        if model.net.blobs[name] == ():
            raise BadInput(f"blob {name}", expected="a value per row", got="shape ()")


def slices(rows: Iterable[pa.RecordBatch], batch_size: int) -> Iterator[pa.RecordBatch]:
    """The rows in pieces of at most `batch_size`."""
    for batch in rows:
        for start in range(0, batch.num_rows, batch_size):
            yield batch.slice(start, batch_size)


def to_batch(
    part: pa.RecordBatch, first_row: int = 0, columns: Sequence[ColumnSpec] = (DATA, LABELS)
) -> dict[str, NDArray[np.generic]]:
    """A record batch as arrays: `columns`, which may lack those that the rows do not have.

    Raises BadInput for rows without images that the columns have.
    """
    where = "rows"
    names = part.schema.names
    present = [
        column for column in columns if column.kind is ColumnKind.IMAGE or column.among(names)
    ]
    return read_columns(part, present, where, first_row=first_row)


def _by_row(values: NDArray[np.generic], rows: int, name: str) -> Floats:
    """A blob as (rows, columns); raises BadInput for one of the whole batch."""
    if values.ndim == 0 or len(values) != rows:
        raise BadInput(f"blob {name}", expected="a value per row", got=f"shape {values.shape}")
    return np.ascontiguousarray(values.reshape(rows, -1), np.float32)


def _lists(values: NDArray[np.generic], rows: int, name: str) -> pa.Array:
    flat = _by_row(values, rows, name)
    offsets = np.arange(0, flat.size + 1, flat.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, flat.ravel())
