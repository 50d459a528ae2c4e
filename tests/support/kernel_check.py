"""Runs a kernel on a case and holds what it wrote against the float64 reference.

The arrays a kernel writes start as NaN (0xFF in every byte), so that whatever it leaves out shows;
the arrays it changes start as the case says. Structs travel as bytes, since CuPy has no arrays of
them. Nothing here asks where the kernel runs.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cupy_kernels.kernel_spec import Dim3, Kernel, Role
from cupy_kernels.launch import Engine, launch
from cupy_kernels.registry import KERNELS


@dataclass(frozen=True)
class Case:
    """A launch: arguments by name (for a written array anything of its size), maybe a grid."""

    kernel: str
    arguments: dict[str, Any]
    grid: Dim3 | None = None
    block: Dim3 | None = None
    label: str = ""
    row: Kernel | None = field(default=None, compare=False)

    def __str__(self) -> str:
        numbers = {k: v for k, v in self.arguments.items() if np.ndim(v) == 0}
        return f"{self.kernel} {self.label} {numbers} grid {self.grid}"


def check(
    case: Case,
    engine: Engine | None = None,
    place: Callable[[Any], Any] = np.array,
    fetch: Callable[[Any], Any] = np.asarray,
) -> dict[str, Any]:
    """Run the case; raise AssertionError where it leaves its tolerance. Returns what it wrote.

    `place` copies an array to where the kernel runs, `fetch` brings it back.
    """
    row = case.row or KERNELS[case.kernel]
    given = row.complete(case.arguments)
    arguments = {k: _start(row, k, v, place) for k, v in given.items()}
    launch(row, engine=engine, grid=case.grid, block=case.block, **arguments)
    written = [p for p in row.outputs if arguments[p.name] is not None]
    got = {p.name: fetch(arguments[p.name]).view(p.dtype) for p in written}
    with np.errstate(all="ignore"):
        expected = row.reference(**{k: _wide(v) for k, v in given.items()})
    assert set(got) <= set(expected), f"{row.name}: the reference leaves out {set(got)}"
    for name, values in got.items():
        if expected[name] is not None:
            compare(f"{case}: {name}", values, expected[name], row)
    return got


def compare(what: str, got: Any, expected: Any, row: Kernel) -> None:
    """Elementwise within the row's tolerance; NaN equals NaN, and shapes are up to the caller."""
    flat = got.reshape(-1)[: np.size(expected)]
    if got.dtype.names:
        for name in got.dtype.names:
            compare(f"{what}.{name}", flat[name], np.asarray(expected[name]), row)
        return
    wanted = np.asarray(expected).reshape(-1).astype(np.float64)
    np.testing.assert_allclose(
        flat.astype(np.float64),
        wanted,
        rtol=row.tolerance.relative,
        atol=row.tolerance.absolute,
        err_msg=what,
    )


def _start(row: Kernel, name: str, value: Any, place: Callable[[Any], Any]) -> Any:
    role = next(p.role for p in row.parameters if p.name == name)
    if role is Role.SCALAR or value is None:
        return value
    if role is Role.WRITTEN:
        value = np.full(value.nbytes, 0xFF, np.uint8).view(value.dtype).reshape(value.shape)
    return place(value.view(np.uint8) if value.dtype.names else value)


def _wide(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        return value.astype(np.float64)
    return value
