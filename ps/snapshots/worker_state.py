"""A worker's own state on disk: the residual of its compressed pushes, what its strategy keeps
between pushes, and the push number that both belong to.

It is one safetensors file, replaced as a whole. A residual belongs to one push number: a later push
has sent some of its values already. So a worker cannot restore it once the shards hold later pushes
of that worker. What a strategy keeps, such as a momentum, may be older or newer than the shards
(worker/training/worker_state.py).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ps.path_checks import refuse_pipe
from ps.session.compression import Writing
from ps.snapshots.shard_file import (
    StateFile,
    read_arrays,
    tensors_check,
    write_arrays,
)
from ps.storage import Store
from ps.whole_files import Flush, whole_file
from shards.checksums import HEX_DIGITS
from shards.errors import UNDECODABLE, BadInput, GiveUp, quote
from shards.messages import Count, Name
from shards.shard_state import array_name

_KEY = "downpour"
_OWN = ""  # the arrays of a strategy are those of a table without a name, which no job has

Arrays = Mapping[str, NDArray[Any]]


class OwnState(msgspec.Struct, frozen=True):
    """State that a worker's driver keeps between pushes, besides the residual.

    `arrays` are flat, by name, and must not change any more. `values` can be written as JSON.
    """

    arrays: Arrays = {}
    values: dict[str, Any] = {}

    def name_arrays(self) -> Arrays:
        """The arrays by their names in a file."""
        return {array_name(_OWN, name): array for name, array in self.arrays.items()}


NO_STATE = OwnState()


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """The worker of a state, the tables' sizes and encodings, and the push after which it was
    taken.

    `step` and `clock` are only informative: a restored worker takes its own from the shards. `own`
    are the values of its driver's `OwnState`.
    """

    worker: Name
    incarnation: Count = 0
    floats: dict[Name, Count]
    push: dict[Name, Writing]
    seq: Count
    step: Count
    clock: Count
    own: dict[str, Any] = {}

    def own_state(self, arrays: Arrays) -> OwnState:
        """The driver's state, out of the arrays that were saved with this."""
        prefix = array_name(_OWN, "")
        driver_arrays = {
            n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)
        }
        return OwnState(driver_arrays, self.own)

    def check(self, present: "WorkerState", label: str) -> None:
        """Raise BadInput naming `label` unless this is a state of the worker in `present`."""
        for field in ("worker", "floats", "push"):
            expected, got = getattr(present, field), getattr(self, field)
            if expected != got:
                raise BadInput(f"{label}: {field}", expected=expected, got=got)


class SavedWorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A file with a worker's state for a snapshot, and its worker (residual_writer.py)."""

    worker: Name
    incarnation: Count
    seq: Count
    part: StateFile


def write_worker_state(
    store: Store, name: str, state: WorkerState, arrays: Arrays
) -> SavedWorkerState:
    """Write a state as the file `name`. Raises OSError if the store fails."""
    metadata = msgspec.json.encode(state).decode()
    return SavedWorkerState(
        worker=state.worker,
        incarnation=state.incarnation,
        seq=state.seq,
        part=write_arrays(store, name, arrays, metadata, state.seq),
    )


def read_worker_state(store: Store, note: SavedWorkerState) -> tuple[WorkerState, Arrays]:
    """Read and check a state; raises BadInput naming the file if damaged or another worker's."""
    metadata, arrays = read_arrays(store, note.part)
    label = f"worker state {store.place}/{note.part.file}"
    try:
        state = msgspec.json.decode(metadata, type=WorkerState)
    except UNDECODABLE as error:
        raise BadInput(f"{label}: {error}") from None
    for field in ("worker", "incarnation", "seq"):
        expected, got = getattr(note, field), getattr(state, field)
        if expected != got:
            raise BadInput(f"{label}: {field}", expected=quote(expected), got=quote(got))
    return state, arrays


def save_state(path: Path, state: WorkerState, arrays: Arrays) -> None:
    """Write the file, or leave the earlier one unchanged; raises GiveUp naming it."""
    metadata = msgspec.json.encode(state).decode()
    packed = save(dict(arrays), {_KEY: metadata + tensors_check(arrays, metadata)})
    try:
        with whole_file(path, flush=Flush.CONTENT, contended=True) as partial:
            partial.write_bytes(packed)
    except OSError as error:
        raise GiveUp(f"worker state {path}: {error.strerror}") from None


def load_state(path: Path) -> tuple[WorkerState, Arrays]:
    """Read the file of `save_state`; raises BadInput naming it."""
    refuse_pipe(path)
    try:
        with safe_open(path, "numpy") as file:
            whole = (file.metadata() or {}).get(_KEY, "")
            metadata, check = whole[:-HEX_DIGITS], whole[-HEX_DIGITS:]
            state = msgspec.json.decode(metadata, type=WorkerState)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise BadInput(f"worker state {path}: {error.strerror or error}") from None
    except (SafetensorError, *UNDECODABLE) as error:
        detail = " ".join(str(error).split())[:120]
        raise BadInput(f"worker state {path}", expected="a file of `save`", got=detail) from None
    if check != tensors_check(arrays, metadata):
        raise BadInput(f"worker state {path}: it does not match its checksum")
    return state, arrays
