"""What `launch` refuses, and what it passes to a GPU: exact types, whole arrays, no empty grid."""

from typing import Any

import numpy as np
import pytest

from cupy_kernels import sources
from cupy_kernels.emulator import Emulator
from cupy_kernels.kernel_spec import Dim3, Kernel, changes, over, reads, scalar, writes
from cupy_kernels.launch import BadLaunch, launch
from tests.cupy_kernels.cases import every_case
from tests.gpu import kernel_check_run

ROW = Kernel(
    "sample",
    "sample.cu",
    (
        reads("x", "rows*columns", align=16),
        writes("y", "rows*columns"),
        changes("count", "1", "u4", optional=True),
        scalar("rows"),
        scalar("columns", "i4"),
        scalar("scale", "f4"),
    ),
    over("rows*columns"),
    lambda **_: {},
    bytes_each=8,
    in_place=(("x", "y"),),
)


class Recorder:
    """An engine that remembers what it was given."""

    def run(
        self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, arguments: list[Any]
    ) -> None:
        self.grid, self.block, self.arguments = grid, block, arguments


def fitting() -> dict[str, Any]:
    return {
        "x": np.zeros((2, 8), np.float32),
        "y": np.zeros(16, np.float32),
        "count": None,
        "rows": 2,
        "columns": 8,
        "scale": 0.5,
    }


def offset(values: int) -> Any:
    """Floats that start 4 bytes past a multiple of 16."""
    memory = np.zeros(values + 8, np.float32)
    start = -(memory.ctypes.data // 4) % 4 + 1
    return memory[start : start + values]


SHARED = np.zeros(32, np.float32)
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a missing argument": ({"scale": ...}, r"expected arguments .* see \{'scale'\}"),
    "an unknown argument": ({"n": 1}, r"expected arguments .* see \{'n'\}"),
    "another dtype": ({"x": np.zeros((2, 8))}, "x: expected float32, got float64"),
    "a strided array": (
        {"x": np.zeros((8, 2), np.float32).T},
        r"x: expected a C-contiguous array, got strides \(4, 8\)",
    ),
    "too small an array": (
        {"y": np.zeros(15, np.float32)},
        r"y: expected 16 elements \(rows\*columns\), got 15",
    ),
    "a misaligned array": ({"x": offset(16)}, "x: expected an address aligned to 16 bytes"),
    "no array": ({"x": [0.0] * 16}, "x: expected an array, got list"),
    "None for what is needed": ({"y": None}, "y: expected an array, got NoneType"),
    "overlapping arrays": (
        {"x": SHARED[:16], "y": SHARED[4:20]},
        "x: expected memory apart from y's, got overlapping arrays",
    ),
    "a float for an integer": ({"rows": 2.0}, "rows: expected a number for int64, got float 2.0"),
    "a bool": ({"rows": True}, "rows: expected a number for int64, got bool"),
    "a double": ({"scale": np.float64(1)}, "scale: expected float32, got float64"),
    "a number too large": ({"columns": 2**31}, "columns: expected a number within int32"),
    "a negative size": ({"rows": -1}, "x: expected sizes of 0 or more"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_refused(name: str) -> None:
    """Before anything runs, in one line that names kernel, argument, expected and got."""
    changed, text = WRONG[name]
    arguments = {k: v for k, v in (fitting() | changed).items() if v is not ...}
    engine = Recorder()
    with pytest.raises(BadLaunch, match=f"^sample: {text}"):
        launch(ROW, engine=engine, **arguments)
    assert not hasattr(engine, "grid")


def test_a_read_only_output_is_refused() -> None:
    """A frame off the wire may be read, not written."""
    frozen = np.zeros(16, np.float32)
    frozen.flags.writeable = False
    with pytest.raises(BadLaunch, match="y: expected a writeable array"):
        launch(ROW, engine=Recorder(), **(fitting() | {"y": frozen}))
    launch(ROW, engine=Recorder(), **(fitting() | {"x": frozen}))


def test_numpy_arrays_need_an_engine() -> None:
    """Without one they would need a GPU's arrays; the error says both."""
    with pytest.raises(BadLaunch, match="x: expected a CuPy array, or an engine, got ndarray"):
        launch(ROW, **fitting())


def test_an_unknown_kernel_and_impossible_shapes_are_refused() -> None:
    """So are blocks beyond 1,024 threads and grids beyond CUDA's."""
    with pytest.raises(BadLaunch, match="no kernel named sgd"):
        launch("sgd")
    with pytest.raises(BadLaunch, match="expected 1 to 1024 threads"):
        launch(ROW, engine=Recorder(), block=(32, 33, 1), **fitting())
    with pytest.raises(BadLaunch, match="grid"):
        launch(ROW, engine=Recorder(), grid=(1, 2**16, 1), **fitting())


def test_scalars_arrive_in_the_kernels_own_types() -> None:
    """Numbers of Python become the exact C types, in the kernel's order; a grid of 0 becomes 1."""
    engine = Recorder()
    launch(ROW, engine=engine, **dict(reversed(fitting().items())))
    assert [a.dtype for a in engine.arguments[3:]] == [np.int64, np.int32, np.float32]
    assert engine.arguments[2] is None
    launch(ROW, engine=engine, **(fitting() | {"rows": 0}))
    assert engine.grid == (1, 1, 1)


def test_the_same_array_may_be_input_and_output_where_the_row_says_so() -> None:
    """In place, and only wholly."""
    x = np.zeros(16, np.float32)
    launch(ROW, engine=Recorder(), **(fitting() | {"x": x, "y": x}))


@pytest.mark.usefixtures("emulated")
def test_cupys_arrays_run_on_their_gpu(cupy: Any) -> None:
    """The module gets the expanded source once, the kernel arrays, exact scalars and a null."""
    x, scale = (cupy.asarray(np.ones(size, np.float32)) for size in (12, 4))
    for _ in range(2):
        launch("scale_forward", x=x, scale=scale, bias=None, y=x, rows=3, columns=4)
    ((code, options),) = cupy.modules
    assert code == sources.text("channels.cu")
    assert "#include" not in code
    assert "--fmad=false" in options
    assert len(cupy.calls) == 2
    name, grid, block, arguments, shared_bytes = cupy.calls[1]
    assert (name, grid, block, shared_bytes) == ("scale_forward", (1, 1, 1), (256, 1, 1), 0)
    assert arguments[0] is arguments[3] is x
    assert [a.dtype for a in arguments[2::3]] == [np.uint64, np.int32]
    assert (arguments[2], arguments[4]) == (0, np.int64(3))


@pytest.mark.usefixtures("emulated")
def test_large_shared_memory_is_asked_for(cupy: Any) -> None:
    """Beyond 48 KB a kernel's attribute is set before it is launched."""
    x = cupy.asarray(np.ones(6000, np.float32))
    settings: dict[str, Any] = {"size": 3, "share": 0.1, "beta": 0.75, "k": 1.0}
    launch("lrn_across_backward", dy=x, x=x, dx=x + 0, pixels=1, channels=6000, **settings)
    assert cupy.calls[0][-1] == 3 * 4 * 6000 > 48 * 1024


def test_arrays_of_numpy_and_of_cupy_are_not_mixed(cupy: Any) -> None:
    """One stray array of NumPy's is named; nothing runs."""
    x = cupy.asarray(np.ones(12, np.float32))
    with pytest.raises(BadLaunch, match="relu_forward: y: expected a CuPy array"):
        launch("relu_forward", x=x, y=np.ones(12, np.float32), slope=0.0, n=12)
    assert not cupy.calls


@pytest.mark.usefixtures("emulated")
def test_the_gpu_script_checks_every_case(cupy: Any) -> None:
    """What `make gpu` runs first finds nothing wrong on a GPU that is the emulator."""
    few = [case for case in every_case() if case.kernel.startswith(("update_adam", "softmax_l"))]
    failed = {name: found for name, found in kernel_check_run.run(cupy, few).items() if found}
    assert not failed
    assert len(cupy.calls) > len(few)


@pytest.mark.usefixtures("emulated")
def test_the_emulator_takes_what_launch_checked() -> None:
    """Contiguous arrays may have any shape; elements beyond the needed ones are kept."""
    x = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)
    y = np.full(15, 7, np.float32)
    launch("add_scaled", engine=Emulator(), x=x, y=y, a=1.0, b=0.0, n=12)
    assert y.tolist() == [*range(-6, 6), 7, 7, 7]
