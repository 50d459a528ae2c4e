"""Caffe's solver states are read and written, and their history is the slots of our rules."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from shards import rules
from shards.errors import BadInput
from tests.support.small_nets import SMALL, network
from worker.caffe import caffe_pb2
from worker.caffe.solver_state import (
    SolverState,
    history_of,
    is_solver_state,
    read_solver_state,
    slots_of,
    write_solver_state,
)

TABLE = network(SMALL).table
HISTORY = tuple(
    np.random.default_rng(at).random(tensor.shape, np.float32)
    for at, tensor in enumerate(TABLE.tensors * 2)
)
STATE = SolverState(100, HISTORY, "lenet_iter_100.caffemodel", 2)
FILES = ["s.solverstate", "s.solverstate.h5"]


def same(one: SolverState, other: SolverState) -> None:
    assert (one.iteration, one.learned_net, one.current_step) == (
        other.iteration,
        other.learned_net,
        other.current_step,
    )
    for a, b in zip(one.history, other.history, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", FILES)
def test_a_state_comes_back(tmp_path: Path, name: str) -> None:
    """All fields, every float."""
    assert is_solver_state(tmp_path / name)
    write_solver_state(tmp_path / name, STATE)
    same(read_solver_state(tmp_path / name), STATE)


def test_the_layout_is_caffes(tmp_path: Path) -> None:
    """The message's fields, and the datasets of HDF5 with whole numbers as arrays of one."""
    for name in FILES:
        write_solver_state(tmp_path / name, STATE)
    message = caffe_pb2.SolverState()
    message.ParseFromString((tmp_path / FILES[0]).read_bytes())
    assert (message.iter, message.current_step) == (100, 2)
    assert [tuple(blob.shape.dim) for blob in message.history] == [a.shape for a in HISTORY]
    with h5py.File(tmp_path / FILES[1]) as file:
        assert sorted(file) == ["current_step", "history", "iter", "learned_net"]
        assert (file["iter"].shape, file["iter"][0]) == ((1,), 100)
        assert file["learned_net"][()] == b"lenet_iter_100.caffemodel"
        assert sorted(file["history"], key=int) == [str(at) for at in range(len(HISTORY))]


@pytest.mark.parametrize(
    ("rule", "slots"),
    [
        (rules.SGD(), 0),
        (rules.Momentum(), 1),
        (rules.Nesterov(), 1),
        (rules.Adagrad(), 1),
        (rules.RMSProp(), 1),
        (rules.AdaDelta(), 2),
        (rules.Adam(), 2),
    ],
)
def test_a_history_is_the_slots_of_a_rule(rule: rules.Rule, slots: int) -> None:
    """In the order of the tensors, the first slot of all of them before the second."""
    count = len(TABLE.tensors)
    history = HISTORY[: count * max(1, slots)]
    found = slots_of(SolverState(1, history), TABLE, rule, "s")
    assert tuple(found) == rule.slot_names
    for at, name in enumerate(found):
        for tensor, array in zip(TABLE.tensors, history[at * count :], strict=False):
            np.testing.assert_array_equal(TABLE.views(found[name])[tensor.name], array)
    back = history_of(found, TABLE, rule)
    assert len(back) == len(history)
    if slots:
        for one, other in zip(back, history, strict=True):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(BadInput, match=rf"s: history: expected {len(history)} arrays, .* got 3"):
        slots_of(SolverState(1, HISTORY[:3]), TABLE, rule, "s")


def test_another_nets_history_is_refused() -> None:
    """The first array that does not fit is named with both shapes."""
    history = (*HISTORY[:2], np.zeros(3, np.float32), HISTORY[3])
    line = r"s: history 2: expected shape \(4, 12\) of ip1/0, got \(3,\)"
    with pytest.raises(BadInput, match=line):
        slots_of(SolverState(1, history), TABLE, rules.Momentum(), "s")


def test_files_that_are_no_states(tmp_path: Path) -> None:
    """Each is named with what is wrong with it."""
    binary, hdf5 = (tmp_path / name for name in FILES)
    binary.write_bytes(b"\xff" * 9)
    with pytest.raises(BadInput, match=r"expected a \.solverstate, got 9 bytes of something else"):
        read_solver_state(binary)
    binary.write_bytes(b"")
    with pytest.raises(BadInput, match="with the field iter, got none"):
        read_solver_state(binary)
    binary.write_bytes(caffe_pb2.SolverState(iter=-1).SerializeToString())
    with pytest.raises(BadInput, match="iter: expected at least 0, got -1"):
        read_solver_state(binary)
    for items, error in (
        ({"iter": [1]}, "current_step: expected one whole number, got none"),
        ({"iter": [1.5], "current_step": [0]}, "iter: expected one whole number, got shape"),
        ({"iter": [1], "current_step": [0], "history/7": [1]}, "history: expected arrays 0 to 0"),
    ):
        with h5py.File(hdf5, "w") as file:
            for name, value in items.items():
                file[name] = value
        with pytest.raises(BadInput, match=error):
            read_solver_state(hdf5)
    with pytest.raises(BadInput, match=r"expected \.solverstate or \.solverstate\.h5, got '\.h5'"):
        write_solver_state(tmp_path / "w.h5", STATE)
