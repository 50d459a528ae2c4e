"""Every kernel on a GPU, on the cases that the emulator runs.

Runs with NumPy and CuPy alone, from the repository's root:

    python -m tests.gpu.kernel_check_run

Each case runs twice: on arrays as the allocator gives them, and on arrays that start one element
later wherever the kernel's row promises no more alignment than that. One line a kernel says how
many cases passed; the last line counts failures, and the exit status is 1 if there are any.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cupy_kernels import cupy_device
from cupy_kernels.registry import KERNELS
from tests.cupy_kernels.cases import every_case
from tests.support.kernel_check import Case, check


def plain(cupy: Any) -> Callable[[Any], Any]:
    """Copies an array to the GPU."""
    return lambda array: cupy.asarray(array)  # noqa: PLW0108  # read when called


def shifted(cupy: Any) -> Callable[[Any], Any]:
    """Copies an array to the GPU, one element past an allocation's start."""

    def place(array: Any) -> Any:
        memory = cupy.empty(array.size + 1, array.dtype)
        memory[1:] = cupy.asarray(array).reshape(-1)
        return memory[1:]

    return place


def may_shift(case: Case) -> bool:
    """Whether every array of the kernel may start at any element."""
    return all(p.align <= p.dtype.alignment for p in KERNELS[case.kernel].arrays)


def run(cupy: Any, cases: Iterable[Case]) -> dict[str, list[str]]:
    """Failures by kernel; an empty list where all its cases passed."""
    found: dict[str, list[str]] = {name: [] for name in KERNELS}
    for case in cases:
        for place in (plain(cupy), *([shifted(cupy)] if may_shift(case) else [])):
            try:
                check(case, None, place, cupy.asnumpy)
                cupy.cuda.get_current_stream().synchronize()
            except Exception as fault:  # noqa: BLE001  # a GPU's errors come in many types
                found[case.kernel].append(f"{case}: {str(fault).strip().splitlines()[0]}")
    return found


def main() -> int:
    cupy = cupy_device.gpu()
    if cupy is None:
        print("no GPU answers here: nothing was run")
        return 2
    with np.errstate(all="ignore"):
        found = run(cupy, every_case())
    for name, failures in found.items():
        print(f"{name:32}{'ok' if not failures else 'FAILED'}")
        for failure in failures[:3]:
            print(f"    {failure}")
    failed = sum(1 for failures in found.values() if failures)
    print(f"{len(found)} kernels, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
