"""Rows on the wire: the frames of ids and of rows, and their checks.

A frame of ids holds uint64 in strictly ascending order, so none is repeated, and all of them in the
buckets of the receiving shard. A frame of rows holds `dim` floats for each id, in their order, in
the encoding that its part names (row_codecs.py).
The answer to a pull has two frames: the rows in the order of the ids asked, and for each of these
one bit that says whether the row is stored. A row that is not has its first values.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids, are_ordered
from shards import row_codecs
from shards.errors import BadMessage
from shards.messages import Kind
from shards.tables import BUCKET_BITS, ID_BYTES, KeyRange, SparseTable, buckets_of
from shards.wire_format import Buffer

Floats = NDArray[np.float32]

_HASH_BITS = 64 - BUCKET_BITS  # of a mixed id, within its bucket


class RowGradient(NamedTuple):
    """The gradients of some rows: distinct ids in ascending order, and float32 (n, dim)."""

    ids: Ids
    rows: Floats


def check_ids(label: str, table: SparseTable, buckets: KeyRange, frame: Buffer) -> Ids:
    """The ids in a frame, without a copy; raises BadMessage."""
    subject = f"{label}: ids of table {table.name}"
    size = memoryview(frame).nbytes
    count = size // ID_BYTES
    if size % ID_BYTES or count > table.message_rows:
        raise BadMessage(
            f"{subject}: expected at most {table.message_rows} ids of {ID_BYTES} bytes,"
            f" got {size} bytes"
        )
    ids = np.frombuffer(frame, np.uint64)
    low, high = buckets.start << _HASH_BITS, (buckets.stop << _HASH_BITS) - 1
    # Before anything reads them: compiled loops trust that each id has a cell in this index.
    if count and not (len(buckets) and are_ordered(ids, low, high)):
        raise BadMessage(f"{subject}: {_describe_fault(buckets, ids)}")
    return ids


def _describe_fault(buckets: KeyRange, ids: Ids) -> str:
    """In words what `are_ordered` has seen in one pass."""
    (repeated,) = np.nonzero(ids[1:] <= ids[:-1])
    if repeated.size:
        at = repeated[0] + 1
        return f"expected them in strictly ascending order, got {ids[at]} after {ids[at - 1]}"
    # A second pass, for the words alone: only messages of a broken peer come here.
    of_ids = buckets_of(ids)
    at = int(((of_ids < buckets.start) | (of_ids >= buckets.stop)).argmax())
    return f"expected buckets {buckets}, got id {ids[at]} of bucket {of_ids[at]}"


def check_rows(label: str, table: SparseTable, ids: Ids, kind: Kind, frame: Buffer) -> RowGradient:
    """The rows in a frame, one for each of `ids`; raises BadMessage."""
    rows = row_codecs.decode(
        f"{label}: rows of table {table.name}", kind, frame, len(ids), table.dim
    )
    return RowGradient(ids, rows)
