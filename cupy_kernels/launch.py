"""The only way to run a kernel: every argument is checked against the kernel's row first.

CuPy's raw call trusts its caller: it passes a Python float as a double, ignores strides, offsets
and sizes, and lets a misaligned float4 fault somewhere later. So here arguments are passed by name,
arrays must be contiguous, large enough, aligned and of the parameter's own dtype, and scalars are
cast. The arrays determine where the kernel runs: with CuPy's on their device, on the current
stream; with emulated ones in their emulator; with NumPy's in the emulator that the caller passes.
"""

from functools import cache
from itertools import combinations
from typing import Any, Protocol

import numpy as np

from cupy_kernels import cupy_device
from cupy_kernels.backends import Backend, EmulatorBackend, backend_of
from cupy_kernels.kernel_spec import Dim3, Kernel, Parameter, Role, Sizes

MOST_THREADS = 1024
MOST_SHARED_BYTES = 227 * 1024


class BadLaunch(ValueError):
    """The arguments of a launch do not fit the kernel; the message names both."""


class Engine(Protocol):
    """Something that runs kernels. Arguments are arrays, NumPy scalars of exact type, or None."""

    def run(
        self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, arguments: list[Any]
    ) -> None: ...


def launch(
    kernel: str | Kernel,
    *,
    engine: Engine | None = None,
    grid: Dim3 | None = None,
    block: Dim3 | None = None,
    **arguments: Any,
) -> None:
    """Run a kernel on arguments given by name; on a GPU, queue it on the current stream.

    `grid` and `block` override the row's own. `engine` is for NumPy arrays only. Raises
    BadLaunch before anything runs.
    """
    row = kernel if isinstance(kernel, Kernel) else _row(kernel)
    names = [parameter.name for parameter in row.parameters]
    arguments = row.complete(arguments)
    if odd := set(names) ^ set(arguments):
        raise BadLaunch(f"{row.name}: expected arguments {names}, got {[*arguments]}: see {odd}")
    values = {p.name: _check_argument(row, p, arguments[p.name]) for p in row.parameters}
    sizes = {
        p.name: int(values[p.name])
        for p in row.parameters
        if p.role is Role.SCALAR and p.dtype.kind in "iu"
    }
    for parameter in row.arrays:
        _check_size(row, parameter, values[parameter.name], sizes)
    _check_overlaps(row, values)
    geometry = row.geometry
    shared_bytes = geometry.shared_bytes(sizes)
    shape = _shape(row, grid or geometry.grid(sizes), block or geometry.block, shared_bytes)
    (engine or _engine_of(row, values)).run(row, *shape, shared_bytes, list(values.values()))


class LaunchDevice:
    """The GPU that CuPy runs on."""

    def run(
        self, kernel: Kernel, grid: Dim3, block: Dim3, shared_bytes: int, arguments: list[Any]
    ) -> None:
        """Queue a checked launch on CuPy's current stream."""
        null = np.uint64(0)
        values = tuple(null if value is None else value for value in arguments)
        cupy_device.function(kernel.source, kernel.name, shared_bytes)(
            grid, block, values, shared_mem=shared_bytes
        )


@cache
def _row(name: str) -> Kernel:
    # Imported here, because the registry imports every operation, and operations import `launch`.
    from cupy_kernels.registry import KERNELS

    try:
        return KERNELS[name]
    except KeyError:
        raise BadLaunch(f"no kernel named {name}: expected one of {sorted(KERNELS)}") from None


def _check_argument(row: Kernel, parameter: Parameter, value: Any) -> Any:
    if parameter.role is Role.SCALAR:
        return _scalar(row, parameter, value)
    if value is None and parameter.optional:
        return None
    if not hasattr(value, "dtype") or not hasattr(value, "flags"):
        raise _bad(row, parameter, "an array", type(value).__name__)
    if value.dtype != parameter.dtype and not _is_bytes_of(value, parameter):
        raise _bad(row, parameter, str(parameter.dtype), str(value.dtype))
    if not value.flags.c_contiguous:
        raise _bad(row, parameter, "a C-contiguous array", f"strides {value.strides}")
    if parameter.role is not Role.READ and not getattr(value.flags, "writeable", True):
        raise _bad(row, parameter, "a writeable array", "a read-only one")
    if value.size and address(value) % parameter.alignment:
        raise _bad(
            row,
            parameter,
            f"an address aligned to {parameter.alignment} bytes",
            f"one at {address(value) % parameter.alignment} past that",
        )
    return value


def _is_bytes_of(value: Any, parameter: Parameter) -> bool:
    """True for the parameter's structs as bytes: CuPy 14 has no arrays of structs."""
    whole: bool = value.nbytes % parameter.dtype.itemsize == 0
    return parameter.dtype.names is not None and value.dtype == np.uint8 and whole


def _scalar(row: Kernel, parameter: Parameter, value: Any) -> np.generic:
    dtype = parameter.dtype
    if isinstance(value, np.generic):
        if value.dtype != dtype:
            raise _bad(row, parameter, str(dtype), f"{value.dtype} {value}")
        return value
    numbers = (int,) if dtype.kind in "iu" else (int, float)
    if isinstance(value, bool) or not isinstance(value, numbers):
        raise _bad(row, parameter, f"a number for {dtype}", f"{type(value).__name__} {value}")
    try:
        cast: np.generic = dtype.type(value)
    except OverflowError:
        raise _bad(row, parameter, f"a number within {dtype}", str(value)) from None
    return cast


def _check_size(row: Kernel, parameter: Parameter, value: Any, sizes: Sizes) -> None:
    needed = parameter.elements(sizes)
    if needed < 0:
        raise _bad(row, parameter, "sizes of 0 or more", f"{dict(sizes)}")
    got = needed if value is None else value.nbytes // parameter.dtype.itemsize
    if got < needed:
        raise _bad(row, parameter, f"{needed} elements ({parameter.size})", str(got))


def _check_overlaps(row: Kernel, values: dict[str, Any]) -> None:
    for first, second in combinations(row.arrays, 2):
        a, b = values[first.name], values[second.name]
        if a is None or b is None or {first.role, second.role} == {Role.READ}:
            continue
        low, high = sorted((a, b), key=address)
        if address(low) + low.nbytes <= address(high) or not min(a.nbytes, b.nbytes):
            continue
        allowed = {(first.name, second.name), (second.name, first.name)} & set(row.in_place)
        if not (allowed and address(a) == address(b) and a.nbytes == b.nbytes):
            raise _bad(row, first, f"memory apart from {second.name}'s", "overlapping arrays")


def _shape(row: Kernel, grid: Dim3, block: Dim3, shared_bytes: int) -> tuple[Dim3, Dim3]:
    """The checked grid and block, with grid dimensions of 0 raised to 1.

    CUDA refuses a launch with a grid of 0, and CuPy accepts it.
    """
    x, y, z = (max(count, 1) for count in grid)
    threads = block[0] * block[1] * block[2]
    if not 1 <= threads <= MOST_THREADS:
        raise BadLaunch(f"{row.name}: block {block}: expected 1 to {MOST_THREADS} threads")
    if x >= 2**31 or max(y, z) >= 2**16:
        raise BadLaunch(f"{row.name}: grid {grid}: expected below 2^31, 2^16 and 2^16 blocks")
    if not 0 <= shared_bytes <= MOST_SHARED_BYTES:
        raise BadLaunch(
            f"{row.name}: expected up to {MOST_SHARED_BYTES} bytes of dynamic shared memory,"
            f" got {shared_bytes}"
        )
    return (x, y, z), block


def _engine_of(row: Kernel, values: dict[str, Any]) -> Engine:
    """The engine of the device that holds all of a launch's arrays."""
    home: Backend | None = None
    for parameter in row.arrays:
        if (value := values[parameter.name]) is None:
            continue
        backend = backend_of(value)
        if not backend.runs_kernels:
            raise _bad(row, parameter, "a CuPy array, or an engine", type(value).__name__)
        if home not in {None, backend}:
            raise _bad(row, parameter, "an array on the same device as the others", str(backend))
        home = backend
    return home.engine if isinstance(home, EmulatorBackend) else LaunchDevice()


def address(array: Any) -> int:
    """The address of an array's first byte, on its device."""
    data = array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr
    return int(data)


def _bad(row: Kernel, parameter: Parameter, expected: str, got: str) -> BadLaunch:
    return BadLaunch(f"{row.name}: {parameter.name}: expected {expected}, got {got}")
