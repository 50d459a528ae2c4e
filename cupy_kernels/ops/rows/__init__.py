"""Rows by 64-bit id: hashes, first values, sums over equal ids, int8, and the index of a table.

On the host alone. The functions of cpu.py have compiled versions of equal results in loops.py. A
shard loads these when it starts. A worker may never handle enough rows to make up for the second
that loading takes, so a process begins with NumPy, and loads them once it has handled as many ids
as would have paid for it.
"""

from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import ParamSpec, TypeVar

import numpy as np

from cupy_kernels.ops.rows import cpu
from cupy_kernels.ops.rows.cpu import Cells, DistinctIds, Floats, Ids, Slots, draw_words, mix

__all__ = [
    "Cells",
    "DistinctIds",
    "Floats",
    "Ids",
    "Slots",
    "are_ordered",
    "dequantise_rows",
    "draw_normal",
    "draw_uniform",
    "draw_words",
    "find_distinct",
    "find_slots",
    "gather_rows",
    "insert_slots",
    "mix",
    "prepare",
    "quantise_rows",
    "sum_rows",
    "use",
]

P = ParamSpec("P")
R = TypeVar("R")

WORTH_LOADING = 2_000_000  # ids: NumPy takes some 600 ns more for each, numba a second to load


class RowFunctions:
    """The module of the functions that this process calls: `cpu`, later `loops`."""

    def __init__(self) -> None:
        self.module: ModuleType = cpu
        self.ids_left = WORTH_LOADING

    def count_ids(self, count: int) -> None:
        """Note that this number of ids is handled; load the compiled functions when it pays."""
        if self.ids_left > 0:
            self.ids_left -= count
            if self.ids_left <= 0:
                self.load()

    def load(self) -> None:
        """Use the compiled functions from now on, where numba is installed."""
        self.ids_left = 0
        from cupy_kernels import compilation  # it imports numba

        if compilation.COMPILED:
            from cupy_kernels.ops.rows import loops

            self.module = loops


_FUNCTIONS = RowFunctions()


def _with_loops(function: Callable[P, R]) -> Callable[P, R]:
    """The function to call: `function` of cpu.py, or the one of its name in loops.py."""
    name = function.__name__

    @wraps(function)
    def compute(*args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(_FUNCTIONS.module, name)(*args, **kwargs)
        return result

    return compute


draw_uniform = _with_loops(cpu.draw_uniform)
draw_normal = _with_loops(cpu.draw_normal)
find_slots = _with_loops(cpu.find_slots)
gather_rows = _with_loops(cpu.gather_rows)
insert_slots = _with_loops(cpu.insert_slots)
are_ordered = _with_loops(cpu.are_ordered)
quantise_rows = _with_loops(cpu.quantise_rows)
dequantise_rows = _with_loops(cpu.dequantise_rows)
sum_rows = _with_loops(cpu.sum_rows)


def find_distinct(ids: Ids) -> DistinctIds:
    """The distinct ones of some ids."""
    _FUNCTIONS.count_ids(len(ids))
    distinct: DistinctIds = _FUNCTIONS.module.find_distinct(ids)
    return distinct


def use(*, compiled: bool) -> None:
    """Use the compiled functions from now on, or NumPy's."""
    _FUNCTIONS.load()
    if not compiled:
        _FUNCTIONS.module = cpu


def prepare() -> None:
    """Load and compile all that a shard calls, before the first rows arrive."""
    _FUNCTIONS.load()
    ids, slab = np.zeros(1, np.uint64), np.zeros((1, 1), np.float32)
    cells = Cells(np.zeros(2, np.uint64), np.zeros(2, np.uint32), np.uint64(0), np.uint64(63))
    are_ordered(ids, 0, 0)
    slots = find_slots(cells, ids)
    insert_slots(cells, ids, slots + 1)
    gather_rows(slab, slots, 1)
    draw_uniform(ids, 1, 0)
    draw_normal(ids, 1, 0)
    sum_rows(find_distinct(ids), slab)  # for the mean of a round
    codes, scales = np.zeros((1, 1), np.int8), np.zeros(1, np.float32)
    quantise_rows(slab, codes, scales)
    dequantise_rows(codes, scales, slab)
