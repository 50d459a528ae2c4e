"""Rows by id: compiled loops equal NumPy to the bit, and both equal plain Python."""

import subprocess
import sys
from inspect import isfunction, signature
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from cupy_kernels import compilation
from cupy_kernels.ops import rows
from cupy_kernels.ops.rows import cpu
from cupy_kernels.ops.updates import row_updates
from cupy_kernels.types import RowUpdate
from shards.rules import ROW_RULES

pytest.importorskip("numba")
from cupy_kernels.ops.rows import loops  # it needs numba

IDS = st.lists(st.integers(0, 20) | st.integers(0, 2**64 - 1), max_size=60)
DIMS = st.sampled_from([1, 3, 8, 13, 16, 33])
ENGINES = pytest.mark.parametrize("engine", [cpu, loops], ids=["numpy", "numba"])


def as_ids(values: list[int]) -> NDArray[np.uint64]:
    return np.array(values, np.uint64)


def draw_rows(count: int, dim: int, seed: int = 0) -> NDArray[np.float32]:
    """Rows of very different sizes, with negative zeros."""
    dice = np.random.default_rng(seed)
    drawn = dice.standard_normal((count, dim)) * 10.0 ** dice.integers(-6, 7, (count, dim))
    drawn[dice.random((count, dim)) < 0.1] = -0.0
    return drawn.astype(np.float32)


def same_bits(a: NDArray[Any], b: NDArray[Any]) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def test_both_versions_of_a_function_have_one_signature() -> None:
    """The same parameters, types and result: a process may change from one to the other."""
    compiled = [name for name in rows.__all__ if hasattr(loops, name) and hasattr(cpu, name)]
    functions = [name for name in compiled if isfunction(getattr(loops, name))]
    assert {"find_distinct", "find_slots", "gather_rows", "sum_rows"} <= set(functions)
    for name in functions:
        assert signature(getattr(loops, name)) == signature(getattr(cpu, name)), name


@given(values=IDS, dim=DIMS, seed=st.integers(0, 2**64 - 1))
def test_first_values_are_the_same_bits(values: list[int], dim: int, seed: int) -> None:
    """Compiled and NumPy's first values are equal, of both distributions."""
    ids = as_ids(values)
    for name in ("draw_uniform", "draw_normal"):
        by_numpy, by_numba = (getattr(engine, name)(ids, dim, seed) for engine in (cpu, loops))
        assert same_bits(by_numpy, by_numba)


@given(values=IDS, dim=DIMS)
def test_sums_over_equal_ids_are_the_same_bits(values: list[int], dim: int) -> None:
    """Distinct ids, their inverse and their sums are those of NumPy, and of a dict of sums."""
    ids, gradient = as_ids(values), draw_rows(len(values), dim)
    by_numpy, by_numba = cpu.find_distinct(ids), loops.find_distinct(ids)
    assert same_bits(by_numpy.ids, by_numba.ids)
    assert same_bits(by_numpy.inverse, by_numba.inverse)
    sums, others = cpu.sum_rows(by_numpy, gradient), loops.sum_rows(by_numba, gradient)
    assert same_bits(sums, others)
    totals: dict[int, NDArray[np.float64]] = {}
    for number, row in zip(values, gradient, strict=True):
        totals[number] = totals.get(number, np.zeros(dim)) + row
    assert by_numpy.ids.tolist() == sorted(totals)
    for number, total in zip(by_numpy.ids.tolist(), sums, strict=True):
        assert np.array_equal(total, totals[number].astype(np.float32))


@ENGINES
@given(runs=st.lists(IDS, max_size=5), asked=IDS, few=st.booleans())
def test_an_index_equals_a_dict(
    engine: Any, runs: list[list[int]], asked: list[int], few: bool
) -> None:
    """Whatever was inserted is found, and nothing else, also where all ids crowd into few cells."""
    size = 1 << 9
    shift = np.uint64(64 if few else 64 - 9) - np.uint64(few)
    cells = cpu.Cells(np.zeros(size, np.uint64), np.zeros(size, np.uint32), np.uint64(0), shift)
    slots: dict[int, int] = {}
    for run in runs:
        new = [number for number in dict.fromkeys(run) if number not in slots]
        slots |= {number: len(slots) + at for at, number in enumerate(new)}
        engine.insert_slots(cells, as_ids(new), np.array([slots[n] for n in new], np.int64))
    ids = as_ids([*asked, *slots])
    assert engine.find_slots(cells, ids).tolist() == [slots.get(n, -1) for n in ids.tolist()]
    # Either engine reads what the other has written.
    other = cpu if engine is loops else loops
    assert same_bits(other.find_slots(cells, ids), engine.find_slots(cells, ids))


@ENGINES
def test_cells_after_the_last_one_begin_again(engine: Any) -> None:
    """Ids whose home is the last cell go to the first ones."""
    size = 8
    ids = np.arange(1000, dtype=np.uint64)
    last = ids[cpu.mix(ids) >> np.uint64(61) == 7][:5]
    cells = cpu.Cells(
        np.zeros(size, np.uint64), np.zeros(size, np.uint32), np.uint64(0), np.uint64(61)
    )
    engine.insert_slots(cells, last, np.arange(5))
    assert engine.find_slots(cells, last).tolist() == [0, 1, 2, 3, 4]
    assert np.nonzero(cells.entries)[0].tolist() == [0, 1, 2, 3, 7]


@given(slots=st.lists(st.integers(-1, 39), max_size=50), dim=DIMS)
def test_rows_are_gathered_by_slot(slots: list[int], dim: int) -> None:
    """Both gather the rows of slots; those of slot -1 may have any values."""
    slab, at = draw_rows(40, 48), np.array(slots, np.int64)
    gathered = [engine.gather_rows(slab, at, dim)[at >= 0] for engine in (cpu, loops)]
    assert all(same_bits(rows, slab[at[at >= 0], :dim]) for rows in gathered)


@pytest.mark.parametrize("name", ROW_RULES)
@given(
    slots=st.lists(st.integers(0, 39), unique=True, max_size=40),
    dim=DIMS,
    decay=st.sampled_from([0.0, 0.125]),
    l1=st.booleans(),
)
def test_updates_of_rows_are_the_same_bits(
    name: str, slots: list[int], dim: int, decay: float, l1: bool
) -> None:
    """Compiled and NumPy's updates leave equal rows, slots and meta; others stay as they are."""
    rule = ROW_RULES[name]()
    width, at = dim * (1 + len(rule.slot_names)), np.array(slots, np.int64)
    slab = abs(draw_rows(40, width + 5))
    meta = np.random.default_rng(1).integers(0, 2**30, (40, 4)).astype(np.uint32)
    meta[::7, 1], meta[::5, 1] = 2**32 - 1, 0  # the most updates that are counted, and none yet
    update = RowUpdate(name, 0.3, np.float32(decay), l1, rule.row_constants())
    gradient = draw_rows(len(slots), dim, 2)
    states = []
    for apply in (row_updates.apply_rows, row_updates.apply_copies):
        arrays = slab.copy(), meta.copy()
        with np.errstate(all="ignore"):
            apply(update, *arrays, at, gradient, width)
        states.append(arrays)
    for by_numba, by_numpy in zip(*states, strict=True):
        assert same_bits(by_numba, by_numpy)
    others = np.setdiff1d(np.arange(40), at)
    assert same_bits(states[0][0][others], slab[others])
    assert same_bits(states[0][1][others], meta[others])
    counts = meta[at, 1].astype(np.int64) + 1
    assert states[0][1][at, 1].tolist() == np.minimum(counts, 2**32 - 1).tolist()


@pytest.mark.usefixtures("compiled_start")
def test_a_process_loads_numba_once_it_pays() -> None:
    """A worker computes in NumPy until it has handled enough ids to make up for loading numba."""
    program = (
        "import sys, numpy as np\n"
        "from cupy_kernels.ops import rows\n"
        "ids = np.zeros(rows.WORTH_LOADING - 1, np.uint64)\n"
        "rows.find_distinct(ids)\n"
        "assert 'numba' not in sys.modules\n"
        "assert rows.find_distinct(ids[:1]).ids.tolist() == [0]\n"
        "assert 'numba' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)


def test_without_numba_numpy_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where numba is not installed, NumPy computes however many ids there are."""
    monkeypatch.setattr(compilation, "COMPILED", False)
    functions = rows.RowFunctions()
    functions.count_ids(rows.WORTH_LOADING)
    assert functions.module is cpu


@given(count=st.integers(1, 30), dim=DIMS, seed=st.integers(0, 2**20))
def test_int8_rows_are_the_same_bits(count: int, dim: int, seed: int) -> None:
    """Codes, scales and decoded rows of both engines are equal, and are the nearest multiples."""
    drawn = draw_rows(count, dim, seed) * np.float32(10.0 ** (seed % 60 - 40))
    results = []
    for engine in (cpu, loops):
        codes, scales = np.empty((count, dim), np.int8), np.empty(count, np.float32)
        engine.quantise_rows(drawn, codes, scales)
        decoded = np.empty((count, dim), np.float32)
        engine.dequantise_rows(codes, scales, decoded)
        results.append((codes, scales, decoded))
    assert all(map(same_bits, *results))
    codes, scales, decoded = results[0]
    for row, code, scale, back in zip(drawn.tolist(), codes.tolist(), scales, decoded, strict=True):
        expected = np.float32(max(map(abs, row))) / np.float32(127)
        assert scale == (expected if expected >= 2.0**-126 else 0)
        for value, number, result in zip(row, code, back, strict=True):
            quotient = np.float32(value) / scale if scale else np.float32(value)
            assert number == max(-127, min(127, round(float(quotient))))
            assert result == np.float32(number) * scale


@given(values=IDS, spread=st.integers(0, 2**64 - 1), low=st.integers(0, 2**64 - 1))
def test_the_order_of_ids_is_checked_alike(values: list[int], spread: int, low: int) -> None:
    """Both engines find what ascends and is in range, and what does not or is not."""
    high = min(2**64 - 1, low + spread)
    for drawn in (values, sorted(set(values))):
        ids = as_ids(drawn)
        expected = drawn == sorted(set(drawn)) and all(
            low <= v <= high for v in cpu.mix(ids).tolist()
        )
        for engine in (cpu, loops):
            assert engine.are_ordered(ids, low, high) == expected
            if drawn is not values:
                assert engine.are_ordered(ids, 0, 2**64 - 1)
