"""An array determines its backend, for memory and copies; emulated arrays act like a GPU's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cupy_kernels import backends
from cupy_kernels.backends import GPU, HOST, Backend, EmulatorBackend, backend_of
from cupy_kernels.emulator import Emulator, Schedule
from cupy_kernels.emulator.array import Emulated
from cupy_kernels.launch import BadLaunch, launch
from cupy_kernels.types import AnyArray
from cupy_kernels.workspace import Workspace

THERE = EmulatorBackend(Emulator())


def emulated(*shape: int) -> Any:
    """0, 1, 2, ... as float32."""
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return backends.copy_to(values, THERE)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "a slice": lambda x: x[1:],
    "a strided slice": lambda x: x[:, ::2],
    "one element": lambda x: x[1, 2],
    "reshape": lambda x: x.reshape(-1),
    "transpose": lambda x: x.transpose(1, 0),
    "T": lambda x: x.T,
    "moveaxis": lambda x: np.moveaxis(x, 0, 1),
    "view": lambda x: x.view(np.uint8),
    "empty_like": np.empty_like,
    "copy": lambda x: x.copy(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_an_engine_goes_with_every_view(name: str) -> None:
    """Arrays derived from an emulated array use the same emulator."""
    found = VIEWS[name](emulated(2, 4))
    assert isinstance(found, Emulated)
    assert backend_of(found) == THERE


def test_memory_of_its_own_is_counted() -> None:
    """Views are free; every allocation is counted."""
    x = emulated(4, 6)
    before = Emulated.allocations
    for view in (x[1:], x.reshape(6, 4), x.T, x[0, 0], x.view(np.uint32)):
        assert np.shares_memory(view, x)
    assert Emulated.allocations == before
    assert len([x.copy(), np.empty_like(x), x.T.reshape(-1)]) == 3
    assert Emulated.allocations == before + 3


LOOKS: dict[str, Callable[[Any], Any]] = {
    "arithmetic": lambda x: x + 1,
    "in place": lambda x: x.__iadd__(1),
    "a comparison": lambda x: x == 0,
    "a sum": lambda x: x.sum(),
    "a NumPy function": lambda x: np.concatenate([x, x]),
    "a number": lambda x: float(x[0]),
    "an index": lambda x: [7, 8][x[0]],
    "a truth": lambda x: bool(x[0]),
    "a list": lambda x: x.tolist(),
    "a copy to the host": lambda x: np.copyto(np.empty(3, np.float32), x),
}


@pytest.mark.parametrize("name", LOOKS)
def test_numpy_neither_computes_on_it_nor_looks(name: str) -> None:
    """NumPy cannot compute on emulated memory, as on a GPU's; the error says how to read it."""
    with pytest.raises(TypeError, match=r"an Emulated array; as_host\(\) reads it"):
        LOOKS[name](emulated(3))


@pytest.mark.usefixtures("emulated")
def test_a_launch_finds_its_engine_from_the_arrays() -> None:
    """Without an engine, the kernel runs on the backend of the arrays."""
    x, y = emulated(2, 6)[1], backends.empty((6,), np.float32, emulated(1))
    launch("relu_forward", x=x, y=y, slope=0.0, n=6)
    assert backends.as_host(y).tolist() == [6, 7, 8, 9, 10, 11]


def test_a_launch_over_two_places_is_refused() -> None:
    """A stray array is named, NumPy's or another emulator's."""
    x, other = (
        emulated(6),
        backends.copy_to(emulated(6), EmulatorBackend(Emulator(Schedule.REVERSED))),
    )
    with pytest.raises(BadLaunch, match="y: expected an array on the same device as the others"):
        launch("relu_forward", x=x, y=other, slope=0.0, n=6)
    with pytest.raises(BadLaunch, match="y: expected a CuPy array, or an engine, got ndarray"):
        launch("relu_forward", x=x, y=backends.as_host(x), slope=0.0, n=6)


@pytest.mark.usefixtures("emulated")
def test_arrays_move_between_places(cupy: Any) -> None:
    """There and back, whole and by slices, with the dtype of where they arrive."""
    values = np.arange(12, dtype=np.uint8).reshape(3, 4)
    homes: dict[Backend, Any] = {HOST: np.ndarray, THERE: Emulated, GPU: cupy.ndarray}
    for place, kind in homes.items():
        for source in homes:
            there = backends.zeros((3, 4), np.float32, backends.copy_to(values, place))
            assert isinstance(there, kind)
            assert backend_of(there) == place
            backends.copy(backends.copy_to(values, source), there)
            backends.copy(backends.copy_to(values[0], source), there[2])
            back = backends.as_host(there)
            assert type(back) is np.ndarray
            np.testing.assert_array_equal(back, [values[0], values[1], values[0]])


def test_an_operation_has_the_body_of_its_array(cupy: Any) -> None:
    """NumPy's arrays, memory-mapped ones and numbers on the host, the others in kernels."""
    on_gpu: AnyArray = cupy.asarray(np.zeros(2, np.float32))

    def on_cpu(x: Any, times: int = 1) -> list[str]:
        return ["host"] * times

    def in_kernels(x: Any, times: int = 1) -> list[str]:
        return ["kernels"] * times

    operation = backends.HostOperation(on_cpu).with_kernels(in_kernels)
    for array, body in (
        (np.zeros(2), "host"),
        (np.zeros(2).view(np.memmap), "host"),
        (np.float32(1), "host"),
        (emulated(2), "kernels"),
        (on_gpu, "kernels"),
        ([np.zeros(2), np.zeros(3)], "host"),
        ((on_gpu, on_gpu), "kernels"),
    ):
        assert operation(array) == [body]
        assert operation(array, times=2) == [body, body]


def test_a_workspace_allocates_where_its_arrays_live() -> None:
    """A role's memory is reused on one backend, and allocated again on another."""
    work, x = Workspace(), emulated(4)
    first = work.take("y", (4,), x)
    assert backend_of(first) == THERE
    before = Emulated.allocations
    assert np.shares_memory(work.take("y", (2, 2), x), first)
    assert Emulated.allocations == before
    assert backend_of(work.zeros("y", (4,))) == HOST
    assert not backends.as_host(work.zeros("y", (4,), x)).any()
