"""A worker's own state on disk: the residual of its compressed pushes, and where that belongs.

One safetensors file, replaced whole. The residual goes with one push number: a push later its
values have been sent already, a push earlier they have not been taken yet. So whoever restores it
must stand at that very number, or bring the shards there: a state for a snapshot also holds the
pushes that the shards' state may lack (channel_recorder.py), as the floats that they stand for.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ps.session.compression import Writing
from ps.snapshots.object_store import Store
from ps.snapshots.shard_file import (
    CHECK_LENGTH,
    StateFile,
    read_arrays,
    tensors_check,
    write_arrays,
)
from shards.errors import UNDECODABLE, BadInput, GiveUp, quoted
from shards.messages import Count, Name

_KEY = "downpour"

Arrays = Mapping[str, NDArray[np.float32]]


class Repeated(msgspec.Struct, frozen=True, kw_only=True):
    """A push to make again; its gradient is the array `name`."""

    seq: Count
    steps: Count
    samples: Count
    loss: float
    read_versions: tuple[Count, ...]

    @property
    def name(self) -> str:
        return f"push.{self.seq}"


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """Whose residual it is, how its pushes are written, and after which push it was taken.

    `pushes` are those from `base` to there. `step` and `clock` are told for people; a worker's are
    what the shards have of it.
    """

    worker: Name
    incarnation: Count = 0
    table: Name
    floats: Count
    push: Writing
    seq: Count
    step: Count
    clock: Count
    base: Count
    pushes: tuple[Repeated, ...] = ()

    @property
    def follows(self) -> range:
        """The numbers of the last applied push that a worker can go on after with this."""
        return range(self.base, self.seq + 1)

    def check(self, own: "WorkerState", what: str) -> None:
        """Raises BadInput naming `what` where this is no state of who has `own` now."""
        for field in ("worker", "table", "floats", "push"):
            expected, got = getattr(own, field), getattr(self, field)
            if expected != got:
                raise BadInput(f"{what}: {field}: expected {expected}, got {got}")


class SavedWorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A file with a state that goes into a snapshot, and whose it is (residual_writer.py)."""

    worker: Name
    incarnation: Count
    base: Count
    seq: Count
    part: StateFile


def write_kept(store: Store, name: str, state: WorkerState, arrays: Arrays) -> SavedWorkerState:
    """Write a state as the file `name`. Raises OSError where the store fails."""
    told = msgspec.json.encode(state).decode()
    return SavedWorkerState(
        worker=state.worker,
        incarnation=state.incarnation,
        base=state.base,
        seq=state.seq,
        part=write_arrays(store, name, arrays, told, state.seq),
    )


def read_kept(store: Store, kept: SavedWorkerState) -> tuple[WorkerState, Arrays]:
    """Read it back, checked; raises BadInput naming the file, also where it is another's."""
    told, arrays = read_arrays(store, kept.part)
    what = f"worker state {store.place}/{kept.part.file}"
    try:
        state = msgspec.json.decode(told, type=WorkerState)
    except UNDECODABLE as error:
        raise BadInput(f"{what}: {error}") from None
    for field in ("worker", "incarnation", "base", "seq"):
        expected, got = getattr(kept, field), getattr(state, field)
        if expected != got:
            raise BadInput(f"{what}: {field}: expected {quoted(expected)}, got {quoted(got)}")
    return state, arrays


def save_state(path: Path, state: WorkerState, arrays: Arrays) -> None:
    """Write the file, or leave the one that was there; raises GiveUp naming it."""
    told = msgspec.json.encode(state).decode()
    packed = save(dict(arrays), {_KEY: told + tensors_check(arrays, told)})
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            file.write(packed)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise GiveUp(f"worker state {path}: {error.strerror}") from None


def load_state(path: Path) -> tuple[WorkerState, Arrays]:
    """Read it back; raises BadInput naming the file."""
    try:
        with safe_open(path, "numpy") as file:
            whole = (file.metadata() or {}).get(_KEY, "")
            told, check = whole[:-CHECK_LENGTH], whole[-CHECK_LENGTH:]
            state = msgspec.json.decode(told, type=WorkerState)
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise BadInput(f"worker state {path}: {error.strerror or error}") from None
    except (SafetensorError, *UNDECODABLE) as error:
        detail = " ".join(str(error).split())[:120]
        raise BadInput(f"worker state {path}: expected what save wrote, got {detail}") from None
    if check != tensors_check(arrays, told):
        raise BadInput(f"worker state {path}: it does not match its checksum")
    return state, arrays
