"""The description of a kernel, apart from its CUDA source: one row of the registry.

All other code relies on the row: `launch` checks arguments against it, the emulator compares it
with the C++ compiler's view of the source, tests run its reference, benchmarks count its bytes.
A kernel sees flat arrays; shapes are scalars among its parameters, and the minimum number of
elements of each array is a product of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike

Sizes = Mapping[str, int]
"""The integer scalars of a launch, by name."""

Size = str | Callable[[Sizes], int]
"""Elements of an array: "n*h*w*c", a product of scalars and numbers, or a function of them."""

Dim3 = tuple[int, int, int]

# Enough blocks to fill any GPU in use. The cap is fixed, so that no result depends on the device.
MOST_BLOCKS = 1056


class Role(Enum):
    """The use of a parameter by a kernel."""

    SCALAR = "scalar"
    READ = "read"  # a pointer to const
    WRITTEN = "written"  # every element is written, none is read before that
    CHANGED = "changed"  # read and written, or written in part


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel; an optional array may be None, a null pointer in the kernel.

    A launch may omit an optional array, and a scalar that has a `usual` value.
    """

    name: str
    dtype: np.dtype[Any]
    role: Role
    size: Size = "1"
    align: int = 0
    optional: bool = False
    usual: int | None = None

    def __post_init__(self) -> None:
        struct = self.dtype.names is not None
        assert self.dtype.isalignedstruct or not struct, f"{self.name}: laid out unlike C"

    def elements(self, sizes: Sizes) -> int:
        """The number of elements that a launch with these scalars needs."""
        if callable(self.size):
            return self.size(sizes)
        product = 1
        for factor in self.size.split("*"):
            product *= int(factor) if factor.isdigit() else sizes[factor]
        return product

    @property
    def alignment(self) -> int:
        """The required alignment of the address in bytes."""
        return self.align or self.dtype.alignment

    @property
    def code(self) -> str:
        """The parameter's C type as the emulator spells it: `?f4` is `const float*`."""
        kind = "s" if self.dtype.names else self.dtype.kind
        pointer = {Role.SCALAR: "", Role.READ: "?"}.get(self.role, "*")
        return f"{pointer}{kind}{self.dtype.itemsize}"


def scalar(name: str, dtype: DTypeLike = "i8", *, usual: int | None = None) -> Parameter:
    """A number, by default a long long; `usual` is its value if a launch omits it."""
    return Parameter(name, np.dtype(dtype), Role.SCALAR, usual=usual)


def reads(
    name: str, size: Size, dtype: DTypeLike = "f4", *, align: int = 0, optional: bool = False
) -> Parameter:
    """A const pointer."""
    return Parameter(name, np.dtype(dtype), Role.READ, size, align, optional)


def writes(
    name: str, size: Size, dtype: DTypeLike = "f4", *, align: int = 0, optional: bool = False
) -> Parameter:
    """A pointer to memory that the kernel fills completely, without reading it first."""
    return Parameter(name, np.dtype(dtype), Role.WRITTEN, size, align, optional)


def changes(
    name: str, size: Size, dtype: DTypeLike = "f4", *, align: int = 0, optional: bool = False
) -> Parameter:
    """A pointer to memory that the kernel reads and writes, or writes in part."""
    return Parameter(name, np.dtype(dtype), Role.CHANGED, size, align, optional)


class Tolerance(NamedTuple):
    """The allowed error: abs(got - reference) <= absolute + relative * abs(reference)."""

    relative: float
    absolute: float


EXACT = Tolerance(0.0, 0.0)
ROUNDED = Tolerance(1e-5, 1e-6)


@dataclass(frozen=True)
class Geometry:
    """Launch shape of a kernel: its block, and its grid and dynamic shared bytes by the sizes."""

    block: Dim3
    grid: Callable[[Sizes], Dim3]
    shared_bytes: Callable[[Sizes], int] = lambda _: 0


def over(size: Size, *, per_thread: int = 1, threads: int = 256) -> Geometry:
    """A grid-stride loop over `size` items, `per_thread` of them at a time."""
    counted = Parameter("", np.dtype("i8"), Role.SCALAR, size)
    per_block = per_thread * threads

    def grid(sizes: Sizes) -> Dim3:
        return min(-(-counted.elements(sizes) // per_block), MOST_BLOCKS), 1, 1

    return Geometry((threads, 1, 1), grid)


def warps_over(size: Size) -> Geometry:
    """Blocks of (32, 8) threads, which give each of `size` items to a warp."""
    counted = Parameter("", np.dtype("i8"), Role.SCALAR, size)

    def grid(sizes: Sizes) -> Dim3:
        return min(-(-counted.elements(sizes) // 8), MOST_BLOCKS), 1, 1

    return Geometry((32, 8, 1), grid)


def one_block(threads: int = 256) -> Geometry:
    """A single block, for the last stage of a reduction."""
    return Geometry((threads, 1, 1), lambda _: (1, 1, 1))


@dataclass(frozen=True)
class Kernel:
    """One `extern "C" __global__` function.

    `reference` takes the launch's arguments by name, floating arrays as float64, and returns the
    expected contents of each written or changed array by name. `bytes_each` is the minimum memory
    traffic for each element, in bytes: a lower bound for the measured time. `in_place` names
    pairs of parameters that may be the same array. `resident` is the number of threads that a
    multiprocessor must hold at once, enough that some work while others wait for memory; the tests
    fail if registers or shared memory leave no room for them.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]
    geometry: Geometry
    reference: Callable[..., dict[str, Any]]
    bytes_each: float
    tolerance: Tolerance = ROUNDED
    in_place: tuple[tuple[str, str], ...] = ()
    resident: int = 1024

    def complete(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """A launch's arguments, completed by None for arrays and usual values for scalars."""
        may = {p.name: p.usual for p in self.parameters if p.optional or p.usual is not None}
        return {**may, **arguments}

    @property
    def arrays(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.role is not Role.SCALAR)

    @property
    def outputs(self) -> tuple[Parameter, ...]:
        return tuple(p for p in self.parameters if p.role in {Role.WRITTEN, Role.CHANGED})

    @property
    def signature(self) -> str:
        """The C types in order, as the emulator reports them: `*f4 ?f4 i8`."""
        return " ".join(p.code for p in self.parameters)
