"""Caffe's solver states: what a solver keeps in addition to the weights, in .solverstate files.

A file has the iteration, the name of the file with the weights, and the history: for each tensor in
the net's order one array for each slot of the update rule, all tensors of the first slot before
those of the second. `.solverstate` is binary protobuf, `.solverstate.h5` is HDF5.
"""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.rules import Rule
from shards.tables import DenseTable
from worker.caffe import caffe_pb2, hdf5
from worker.caffe.blobs import add_blob, array_of, read_limited, write_whole

Floats = NDArray[np.float32]

SUFFIXES = ".solverstate or .solverstate.h5"
_BINARY = ".solverstate"
_HISTORY = "history/"
_COUNTS = ("iter", "current_step")


class SolverState(msgspec.Struct, frozen=True):
    """The content of a file: the number of updates so far, and the history as float32 arrays.

    `learned_net` is the path of the weights as Caffe wrote it; `current_step` is the number of
    steps of a "step" or "multistep" policy so far, which follows from the iteration.
    """

    iteration: int
    history: tuple[Floats, ...]
    learned_net: str = ""
    current_step: int = 0


def is_solver_state(path: Path) -> bool:
    """Return whether the suffix is that of a solver state."""
    return path.suffix == _BINARY or path.suffixes[-2:] == [_BINARY, ".h5"]


def read_solver_state(path: Path) -> SolverState:
    """The state in a file of either format; raises BadInput."""
    state = _read_binary(path) if path.suffix == _BINARY else _read_hdf5(path)
    if state.iteration < 0:
        raise BadInput(f"{path}: iter", expected="at least 0", got=state.iteration)
    return state


def write_solver_state(path: Path, state: SolverState) -> None:
    """Write a state in the format of the suffix, whole or not at all; raises BadInput."""
    if not is_solver_state(path):
        raise BadInput(path, expected=SUFFIXES, got=f"{path.suffix!r}")
    if path.suffix == _BINARY:
        message = caffe_pb2.SolverState(
            iter=state.iteration, learned_net=state.learned_net, current_step=state.current_step
        )
        for array in state.history:
            add_blob(message.history, array)
        write_whole(path, message.SerializeToString())
        return
    arrays = {f"{_HISTORY}{number}": array for number, array in enumerate(state.history)}
    for name, count in zip(_COUNTS, (state.iteration, state.current_step), strict=True):
        arrays[name] = np.array([count], np.int32)
    hdf5.write_arrays(path, arrays, {"learned_net": state.learned_net})


def slots_of(state: SolverState, table: DenseTable, rule: Rule, source: str) -> dict[str, Floats]:
    """The rule's slots as arenas of the table, by name; raises BadInput if they do not fit.

    Caffe keeps a history for plain SGD, too; it has no effect, and is not read.
    """
    names, tensors = rule.slot_names, table.tensors
    expected = len(tensors) * max(1, len(names))
    if len(state.history) != expected:
        raise BadInput(
            f"{source}: history",
            expected=(
                f"{expected} arrays, {max(1, len(names))} for each of {len(tensors)} tensors"
            ),
            got=len(state.history),
        )
    slots = {}
    for number, slot in enumerate(names):
        slots[slot] = table.empty()
        views = table.views(slots[slot])
        for index, tensor in enumerate(tensors, number * len(tensors)):
            array = state.history[index]
            if array.size != tensor.size:
                raise BadInput(
                    f"{source}: history {index}",
                    expected=f"shape {tensor.shape} of {tensor.name}",
                    got=array.shape,
                )
            views[tensor.name][...] = array.reshape(tensor.shape)
    return slots


def history_of(slots: Mapping[str, Floats], table: DenseTable, rule: Rule) -> tuple[Floats, ...]:
    """The slots, arenas of the table, in Caffe's order; zeros for a rule without slots."""
    arenas = [slots[name] for name in rule.slot_names] or [table.empty()]
    return tuple(view for arena in arenas for view in table.views(arena).values())


def _read_binary(path: Path) -> SolverState:
    data, message = read_limited(path), caffe_pb2.SolverState()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise BadInput(
            path, expected="a .solverstate", got=f"{len(data)} bytes of something else"
        ) from None
    if not message.HasField("iter"):
        raise BadInput(path, expected="a .solverstate with the field iter", got="none")
    history = tuple(
        array_of(blob, f"{path}: history {number}") for number, blob in enumerate(message.history)
    )
    return SolverState(message.iter, history, message.learned_net, message.current_step)


def _read_hdf5(path: Path) -> SolverState:
    arrays = hdf5.read_arrays(path, ("history", *_COUNTS))
    counts = []
    for name in _COUNTS:
        value = arrays.pop(name, None)
        if value is None or value.size != 1 or value.dtype.kind not in "iu":
            got = "none" if value is None else f"shape {value.shape} of {value.dtype}"
            raise BadInput(f"{path}: {name}", expected="one whole number", got=got)
        counts.append(int(value.reshape(())))
    names = [f"{_HISTORY}{number}" for number in range(len(arrays))]
    if set(names) != arrays.keys():
        raise BadInput(f"{path}: history", expected=f"arrays 0 to {len(names) - 1}")
    history = tuple(np.asarray(arrays[name], np.float32) for name in names)
    return SolverState(counts[0], history, hdf5.read_string(path, "learned_net"), counts[1])
