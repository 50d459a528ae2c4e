"""A shard's whole state at one version, as a value and as frames.

The state is the shard's progress and a number of named arrays: `TABLE/weights` and `TABLE/SLOT` for
each table of which the shard holds a section. Where a rule needs past versions, `TABLE/past.1` is
the one before the present, and so on. A sparse table has `TABLE/ids`, `TABLE/rows` (a row's weights
and slots) and `TABLE/meta`, in the order of mixed ids (sparse_part.py). The first frame is the
progress and the name, dtype and shape of each array; one frame for each array follows. `Install`,
`State`, the copies of a shard and the base of a WAL have this one form.
"""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids, mix
from shards import wire_format
from shards.errors import BadInput, BadMessage
from shards.ledger import Ledger
from shards.messages import Count, LiveSettings, Name
from shards.reports import Reports
from shards.tables import KeyRange, Layout, buckets_of
from shards.wire_format import Buffer

WEIGHTS = "weights"
IDS = "ids"
ROWS = "rows"
META = "meta"

Arrays = dict[str, NDArray[Any]]
# Plain numbers only: an array of objects from another process would hold foreign pointers.
_Dtype = Annotated[str, Meta(pattern="^[<|][biuf][1248]$")]


class SavedProgress(msgspec.Struct, frozen=True):
    """The part of a snapshot that is not arrays, all of one version.

    `updates` counts the updates of each table; a push that leaves a table out does not count there.
    `buffered` is the number of pushes in the buffer, if the shard has one, and `collected` how many
    of them each table has. `settings` are those that an operator has changed (None: no operator
    has, and those of the spec are in force). `reports` are those of a quorum, by table.
    """

    version: Count
    steps: Count
    samples: Count
    ledger: Ledger
    updates: dict[Name, Count] = {}
    buffered: Count = 0
    collected: dict[Name, Count] = {}
    settings: LiveSettings | None = None
    reports: dict[Name, Reports] = {}


class ShardState(msgspec.Struct, frozen=True):
    """One shard's whole state at one version; a dense table's arrays are flat float32 of the
    shard's own keys, a sparse table's have a first axis of rows.

    `description` (JSON of a ps.Cluster) is the shard's answer to clients that know no more of the
    job than its address; the operator adds it to the state to install, and no snapshot holds it.
    """

    saved: SavedProgress
    arrays: Arrays
    description: bytes = b""


class _Array(msgspec.Struct, frozen=True, array_like=True):
    name: str
    dtype: _Dtype
    shape: tuple[Count, ...]


class _Contents(msgspec.Struct, frozen=True):
    saved: SavedProgress
    arrays: list[_Array]
    description: bytes = b""


def array_name(table: str, slot: str) -> str:
    """The name of a table's array in a state; `slot` is a slot's name or WEIGHTS."""
    return f"{table}/{slot}"


def empty_tables(layout: Layout) -> Arrays:
    """The arrays of a shard's state for sparse tables without rows: their empty ids are enough."""
    return {array_name(table.name, IDS): np.zeros(0, np.uint64) for table in layout.sparse}


def past_names(versions: int) -> list[str]:
    """The names of the arrays that hold the last versions before the present one."""
    return [f"past.{age}" for age in range(1, versions + 1)]


def of_table(arrays: Arrays, table: str) -> Arrays:
    """The arrays of one table, by WEIGHTS and the names of its slots."""
    split = ((name.rpartition("/"), array) for name, array in arrays.items())
    return {slot: array for (owner, _, slot), array in split if owner == table}


def check_row_ids(subject: str, ids: Ids, buckets: KeyRange) -> None:
    """Raise BadInput unless ids are those of a state: in the order of mixed ids, of these buckets.

    An id out of order has the row of another one, although every id and every row may be there.
    """
    mixed, of_ids = mix(ids), buckets_of(ids)
    # Strictly rising: mixing is a bijection, so equal hashes would be one id twice.
    if not (mixed[1:] > mixed[:-1]).all():
        raise BadInput(subject, expected="ids in the order of their hashes, each once")
    if len(ids) and not buckets.start <= of_ids[0] <= of_ids[-1] < buckets.stop:
        got = f"buckets {of_ids[0]} to {of_ids[-1]}"
        raise BadInput(subject, expected=f"ids of buckets {buckets}", got=got)


def encode(state: ShardState) -> tuple[bytes | NDArray[Any], ...]:
    """The frames of a state; the arrays are not copied, the ledger is."""
    described = [_Array(name, array.dtype.str, array.shape) for name, array in state.arrays.items()]
    contents = _Contents(state.saved, described, state.description)
    return wire_format.encode_state(contents), *state.arrays.values()


def decode(frames: Sequence[Buffer]) -> tuple[ShardState, Sequence[Buffer]]:
    """A state, with views of its frames as arrays, and the frames after it; raises BadMessage."""
    if not frames:
        raise BadMessage("state: expected at least one frame, got none")
    contents = wire_format.decode_state(frames[0], _Contents)
    end = 1 + len(contents.arrays)
    # More are no fault: in a copy between replicas the requests that wait follow (replica.py).
    if len(frames) < end:
        raise BadMessage(f"state: expected {end} frames, got {len(frames)}")
    arrays = {}
    for array, frame in zip(contents.arrays, frames[1:end], strict=True):
        dtype, size = np.dtype(array.dtype), memoryview(frame).nbytes
        if size != dtype.itemsize * prod(array.shape):
            raise BadMessage(
                f"state: {array.name} of {array.dtype} and shape {array.shape} takes"
                f" {dtype.itemsize * prod(array.shape)} bytes, got {size}"
            )
        # A view of the frame: `restore` copies whatever outlives the message.
        arrays[array.name] = np.frombuffer(frame, dtype).reshape(array.shape)
    return ShardState(contents.saved, arrays, contents.description), frames[end:]
