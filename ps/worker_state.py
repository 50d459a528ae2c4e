"""A worker's own state on disk: the residual of its compressed pushes, and where that belongs.

One safetensors file, replaced whole. The residual goes with one push number: a push later its
values have been sent already, a push earlier they have not been taken yet. So whoever restores it
must stand at that very number, or goes on without it.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ps.compression import Writing
from shards.errors import BadInput, GiveUp
from shards.messages import Count, Name

_KEY = "downpour"

Arrays = Mapping[str, NDArray[np.float32]]


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """Whose residual it is, how its pushes are written, and after which push it was taken.

    `step` and `clock` are told for people; a worker's are what the shards have of it.
    """

    worker: Name
    table: Name
    floats: Count
    push: Writing
    seq: Count
    step: Count
    clock: Count


def save_state(path: Path, state: WorkerState, arrays: Arrays) -> None:
    """Write the file, or leave the one that was there; raises GiveUp naming it."""
    packed = save(dict(arrays), {_KEY: msgspec.json.encode(state).decode()})
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
            told = (file.metadata() or {}).get(_KEY, "")
            state = msgspec.json.decode(told, type=WorkerState)
            return state, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise BadInput(f"worker state {path}: {error.strerror or error}") from None
    except (SafetensorError, msgspec.DecodeError) as error:
        detail = " ".join(str(error).split())[:120]
        raise BadInput(f"worker state {path}: expected what save wrote, got {detail}") from None
