"""Inference: a network's outputs and inner blobs over rows, in one pass and in order.

The rows are Arrow record batches, as in training, so the same functions serve a local file and,
inside `mapInArrow`, a Spark partition.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ps.snapshots.checked_json import CHECK
from ps.snapshots.shard_file import tensors_check
from shards.errors import UNDECODABLE, BadInput, quoted
from shards.tables import DenseTable
from worker.arrow_columns import read_columns
from worker.caffe.model import CaffeModel
from worker.caffe.weights import into_arena, read_caffemodel, write_whole
from worker.columns import DATA, ColumnKind, ColumnSpec
from worker.columns import LABEL as LABELS
from worker.data.encoded import decoded

Floats = NDArray[np.float32]

ID, LABEL = "SampleID", "label"


def evaluate(
    model: CaffeModel, weights: Floats, rows: Iterable[pa.RecordBatch], batch_size: int
) -> dict[str, float]:
    """The net's scalar outputs (loss, accuracy ...), averaged with equal weight over all rows."""
    sums: dict[str, float] = {}
    seen = 0
    for part in slices(decoded(rows, model.net.column_specs, "rows"), batch_size):
        count = part.num_rows
        batch = to_batch(part, seen, model.net.column_specs)
        for name, value in model.outputs(weights, batch).items():
            sums[name] = sums.get(name, 0.0) + value * count
        seen += count
    if not seen:
        raise BadInput(f"{model.net.description.file}: expected rows to test on, got none")
    return {name: total / seen for name, total in sums.items()}


def features(
    model: CaffeModel,
    weights: Floats,
    rows: Iterable[pa.RecordBatch],
    blobs: Sequence[str],
    batch_size: int,
) -> Iterator[pa.RecordBatch]:
    """For each row its id, each blob flattened into a list of float32, and its label.

    The columns are `SampleID` (the row's `id`, or its place if it has none), one for each blob, and
    `label` if the rows have one.
    """
    check_blobs(model, blobs)
    seen = 0
    for part in slices(decoded(rows, model.net.column_specs, "rows"), batch_size):
        values = model.forward(weights, to_batch(part, seen, model.net.column_specs), blobs)
        names = part.schema.names
        ids = part.column("id") if "id" in names else pa.array(range(seen, seen + part.num_rows))
        arrays = {ID: ids.cast(pa.int64())}
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
            raise BadInput(
                f"{model.net.description.file}: expected blobs among {known}; got {name}"
            )


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
    there = [each for each in columns if each.kind is ColumnKind.IMAGE or each.among(names)]
    return read_columns(part, there, where, first_row=first_row)


def read_weights(
    path: Path, table: DenseTable, start: Floats, needed: Collection[str] | None = None
) -> Floats:
    """`start` with the tensors of a .caffemodel or .safetensors file in their places, by name.

    Layers that the file lacks keep their start. Raises BadInput unless the file has the tensors
    `needed`, or, if this is None, at least one tensor of the table.
    """
    arena = start.copy()
    read = _read_safetensors if path.suffix == ".safetensors" else _read_caffemodel
    missing = read(path, table, arena)
    if needed is not None:
        lacking = [name for name in missing if name in needed]
    else:
        lacking = list(missing) if len(missing) == len(table.tensors) else []
    if lacking:
        layer = lacking[0].rpartition("/")[0]
        raise BadInput(f"{path}: expected weights of layer {layer}, got a file without")
    return arena


def starting_weights(model: CaffeModel, files: Sequence[str | Path], seed: int) -> Floats | None:
    """Weights to start from: the fillers' values, overwritten by each file in turn.

    None if there are no files.
    """
    if not files:
        return None
    arena: Floats = model.initial(seed)
    for file in files:
        arena = read_weights(Path(file), model.table, arena)
    return arena


def _read_caffemodel(path: Path, table: DenseTable, arena: Floats) -> tuple[str, ...]:
    return into_arena(read_caffemodel(path), table, arena, str(path))


def _read_safetensors(path: Path, table: DenseTable, arena: Floats) -> tuple[str, ...]:
    """Fill `arena`; returns the tensors that the file lacks."""
    try:
        with safe_open(path, "numpy") as file:
            check = (file.metadata() or {}).get(CHECK)  # absent in files of other programs
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, *UNDECODABLE) as error:
        text = quoted(" ".join(str(error).split()), 200)
        raise BadInput(f"{path}: expected a .safetensors file: {text}") from None
    if check is not None and check != tensors_check(tensors, ""):
        raise BadInput(f"{path}: it does not match its checksum: it is damaged")
    views = table.views(arena)
    for name in [name for name in views if name in tensors]:
        if tensors[name].shape != views[name].shape:
            raise BadInput(
                f"{path}: tensor {name}: expected shape {views[name].shape},"
                f" got {tensors[name].shape}"
            )
        views[name][...] = tensors[name]
    return tuple(name for name in views if name not in tensors)


def write_safetensors(path: Path, table: DenseTable, arena: Floats) -> None:
    """Write the table's tensors by name, without padding, with their checksum as metadata.

    The file appears whole or not at all; raises BadInput.
    """
    tensors = {name: np.ascontiguousarray(view) for name, view in table.views(arena).items()}
    # The library would write a file that only its owner can read.
    write_whole(path, save(tensors, {CHECK: tensors_check(tensors, "")}))


def _lists(values: NDArray[np.generic], rows: int, name: str) -> pa.Array:
    if values.ndim == 0 or len(values) != rows:
        raise BadInput(f"blob {name}: expected a value a row, got shape {values.shape}")
    flat = np.ascontiguousarray(values.reshape(rows, -1), np.float32)
    offsets = np.arange(0, flat.size + 1, flat.shape[1], dtype=np.int32)
    return pa.ListArray.from_arrays(offsets, flat.ravel())
