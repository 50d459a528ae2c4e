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

from cupy_kernels.ops.rows import Ids
from shards import row_codecs
from shards.errors import BadMessage
from shards.messages import Kind
from shards.tables import ID_BYTES, KeyRange, SparseTable, buckets_of
from shards.wire_format import Buffer

Floats = NDArray[np.float32]


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
    if count > 1 and not (ids[1:] > ids[:-1]).all():
        (number,) = np.nonzero(ids[1:] <= ids[:-1])
        at = number[0] + 1
        raise BadMessage(
            f"{subject}: expected them in strictly ascending order,"
            f" got {ids[at]} after {ids[at - 1]}"
        )
    if count:
        of_ids = buckets_of(ids)
        outside = (of_ids < buckets.start) | (of_ids >= buckets.stop)
        if outside.any():
            at = int(outside.argmax())
            raise BadMessage(
                f"{subject}: expected buckets {buckets}, got id {ids[at]} of bucket {of_ids[at]}"
            )
    return ids


def check_rows(label: str, table: SparseTable, ids: Ids, kind: Kind, frame: Buffer) -> RowGradient:
    """The rows in a frame, one for each of `ids`; raises BadMessage."""
    rows = row_codecs.decode(
        f"{label}: rows of table {table.name}", kind, frame, len(ids), table.dim
    )
    return RowGradient(ids, rows)
