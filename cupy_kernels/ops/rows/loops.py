"""Rows by id in compiled loops, each with the bits of its NumPy version in cpu.py.

A row is a miss of every cache, so loops ask for memory a number of rows before they use it.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.compilation import compile_loop, is_cached, prefetch
from cupy_kernels.ops.rows.cpu import Cells, DistinctIds, Floats, Ids, Slots
from cupy_kernels.types import freeze

Array = Any  # an array inside a compiled loop; numba infers the types
Value = Any

_CELLS_AHEAD = 24
_ROWS_AHEAD = 16
_LINE = 16  # floats of a cache line
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_ONE = np.uint64(1)
_LEAST_NORMAL = np.float32(2.0**-126)


@compile_loop
def _mix(value: Value) -> Value:
    value ^= value >> np.uint64(30)
    value *= np.uint64(0xBF58476D1CE4E5B9)
    value ^= value >> np.uint64(27)
    value *= np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


def are_cached() -> bool:
    """True if no call here need compile the loops of this file first."""
    return is_cached(_mix)


# --- first values ---------------------------------------------------------------------------------


def draw_uniform(ids: Ids, dim: int, seed: int) -> Floats:
    out = np.empty((len(ids), dim), np.float32)
    _draw_uniform(freeze(ids), np.uint64(seed), out)
    return out


@compile_loop
def _draw_uniform(ids: Array, seed: Value, out: Array) -> None:
    key = _mix(seed + _GOLDEN)
    for i in range(len(ids)):
        word, row = _mix(ids[i] ^ key), out[i]
        for column in range(len(row)):
            word += _GOLDEN
            value = np.float32(_mix(word) >> np.uint64(40))  # 24 bits, so exact
            row[column] = value * np.float32(2.0**-23) - np.float32(1)


def draw_normal(ids: Ids, dim: int, seed: int) -> Floats:
    out = np.empty((len(ids), dim), np.float32)
    _draw_normal(freeze(ids), np.uint64(seed), out)
    return out


@compile_loop
def _draw_normal(ids: Array, seed: Value, out: Array) -> None:
    key, lane = _mix(seed + _GOLDEN), np.uint64(0xFFFF)
    for i in range(len(ids)):
        word, row = _mix(ids[i] ^ key), out[i]
        for column in range(len(row)):
            total = np.int64(-6 * 0xFFFF)
            for _ in range(3):
                word += _GOLDEN
                lanes = _mix(word)
                for _ in range(4):
                    total += np.int64(lanes & lane)
                    lanes >>= np.uint64(16)
            row[column] = np.float32(total) * np.float32(2.0**-16)


# --- equal ids ------------------------------------------------------------------------------------


def find_distinct(ids: Ids) -> DistinctIds:
    bits = max(2 * len(ids) - 1, 1).bit_length()
    # A small hash table of this batch: the number of each distinct id, in order of appearance.
    numbers = np.zeros(1 << bits, np.uint32)
    shift = np.uint64(64 - bits)
    appeared, inverse = _number_ids(freeze(ids), numbers, shift)
    distinct = np.sort(appeared)
    _rank_ids(distinct, appeared, numbers, shift, inverse)
    return DistinctIds(distinct, inverse)


@compile_loop
def _number_ids(ids: Array, numbers: Array, shift: Value) -> tuple[Array, Array]:
    """The distinct ids as they appear, and for each id its number among them."""
    mask = np.uint64(len(numbers) - 1)
    distinct, inverse = np.empty(len(ids), np.uint64), np.empty(len(ids), np.int64)
    count = np.uint32(0)
    for i in range(len(ids)):
        cell = _mix(ids[i]) >> shift
        while numbers[cell] != 0 and distinct[numbers[cell] - 1] != ids[i]:
            cell = (cell + _ONE) & mask
        if numbers[cell] == 0:
            distinct[count] = ids[i]
            count += np.uint32(1)
            numbers[cell] = count
        inverse[i] = numbers[cell] - 1
    return distinct[:count], inverse


@compile_loop
def _rank_ids(ranked: Array, distinct: Array, numbers: Array, shift: Value, inverse: Array) -> None:
    """Turn numbers of appearance in `inverse` into ranks among the sorted ids."""
    mask, ranks = np.uint64(len(numbers) - 1), np.empty(len(distinct), np.int64)
    for rank in range(len(ranked)):
        cell = _mix(ranked[rank]) >> shift
        while distinct[numbers[cell] - 1] != ranked[rank]:
            cell = (cell + _ONE) & mask
        ranks[numbers[cell] - 1] = rank
    for i in range(len(inverse)):
        inverse[i] = ranks[inverse[i]]


def are_ordered(ids: Ids, low: int, high: int) -> bool:
    return bool(_are_ordered(freeze(ids), np.uint64(low), np.uint64(high)))


@compile_loop
def _are_ordered(ids: Array, low: Value, high: Value) -> bool:
    # Counted instead of left early: a loop without branches takes half the time.
    faults = 0
    for i in range(len(ids)):
        value = _mix(ids[i])
        faults += (value < low) | (value > high)
    for i in range(1, len(ids)):
        faults += ids[i] <= ids[i - 1]
    return faults == 0


def sum_rows(of: DistinctIds, rows: Floats) -> Floats:
    summed = np.empty((len(of.ids), rows.shape[1]), np.float32)
    _sum_rows(freeze(of.inverse), freeze(np.ascontiguousarray(rows)), summed)
    return summed


@compile_loop
def _sum_rows(inverse: Array, rows: Array, summed: Array) -> None:
    count, dim = summed.shape
    if count == len(inverse):
        for i in range(len(inverse)):
            row, target = rows[i], summed[inverse[i]]
            for column in range(dim):
                target[column] = row[column]
        return
    totals = np.zeros((count, dim), np.float64)
    for i in range(len(inverse)):
        row, total = rows[i], totals[inverse[i]]
        for column in range(dim):
            total[column] += row[column]
    for i in range(count):
        total, target = totals[i], summed[i]
        for column in range(dim):
            target[column] = total[column]


# --- fewer bits -----------------------------------------------------------------------------------


def quantise_rows(rows: Floats, codes: NDArray[np.int8], scales: Floats) -> None:
    _quantise_rows(freeze(np.ascontiguousarray(rows)), codes, scales)


@compile_loop
def _quantise_rows(rows: Array, codes: Array, scales: Array) -> None:
    levels = np.float32(127)
    for i in range(len(rows)):
        row, out, most = rows[i], codes[i], np.float32(0)
        for column in range(len(row)):
            most = max(most, abs(row[column]))
        scale = most / levels
        if scale < _LEAST_NORMAL:
            scale = np.float32(0)
        step = scale if scale > np.float32(0) else np.float32(1)
        scales[i] = scale
        for column in range(len(row)):
            code = np.rint(row[column] / step)
            out[column] = np.int8(min(max(code, -levels), levels))


def dequantise_rows(codes: NDArray[np.int8], scales: Floats, rows: Floats) -> None:
    _dequantise_rows(freeze(codes), freeze(scales), rows)


@compile_loop
def _dequantise_rows(codes: Array, scales: Array, rows: Array) -> None:
    for i in range(len(rows)):
        row, code, scale = rows[i], codes[i], scales[i]
        for column in range(len(row)):
            row[column] = np.float32(code[column]) * scale


# --- the index ------------------------------------------------------------------------------------


@compile_loop
def _home(cells: Any, value: Value) -> Value:
    return (_mix(value) - cells.base) >> cells.shift


@compile_loop
def _next(cells: Any, cell: Value) -> Value:
    cell += _ONE
    return cell if cell != np.uint64(len(cells.ids)) else np.uint64(0)


@compile_loop
def _ask_ahead(cells: Any, ids: Array, number: int) -> None:
    """Ask for the home cell of id `number`, which is needed soon."""
    if number < len(ids):
        cell = _home(cells, ids[number])
        prefetch(cells.ids, cell)
        prefetch(cells.entries, cell)


def find_slots(cells: Cells, ids: Ids) -> Slots:
    slots = np.empty(len(ids), np.int64)
    _find_slots(cells, freeze(ids), slots)
    return slots


@compile_loop
def _find_slots(cells: Any, ids: Array, slots: Array) -> None:
    for i in range(-_CELLS_AHEAD, len(ids)):
        _ask_ahead(cells, ids, i + _CELLS_AHEAD)
        if i >= 0:
            cell = _home(cells, ids[i])
            while cells.entries[cell] != 0 and cells.ids[cell] != ids[i]:
                cell = _next(cells, cell)
            slots[i] = np.int64(cells.entries[cell]) - 1


def insert_slots(cells: Cells, ids: Ids, slots: Slots) -> None:
    _insert_slots(cells, freeze(ids), freeze(slots))


@compile_loop
def _insert_slots(cells: Any, ids: Array, slots: Array) -> None:
    for i in range(-_CELLS_AHEAD, len(ids)):
        _ask_ahead(cells, ids, i + _CELLS_AHEAD)
        if i >= 0:
            cell = _home(cells, ids[i])
            while cells.entries[cell] != 0:
                cell = _next(cells, cell)
            cells.ids[cell] = ids[i]
            cells.entries[cell] = np.uint32(slots[i] + 1)


# --- rows -----------------------------------------------------------------------------------------


def gather_rows(slab: Floats, slots: Slots, dim: int) -> Floats:
    out = np.empty((len(slots), dim), np.float32)
    _gather_rows(slab.reshape(-1), slab.shape[1], freeze(slots), out)
    return out


@compile_loop
def _gather_rows(slab: Array, stride: int, slots: Array, out: Array) -> None:
    count, dim = out.shape
    for i in range(count):
        if i + _ROWS_AHEAD < count:
            start = max(slots[i + _ROWS_AHEAD], 0) * stride
            for line in range(start, start + dim, _LINE):
                prefetch(slab, line)
        start = max(slots[i], 0) * stride
        row, target = slab[start : start + dim], out[i]
        for column in range(dim):
            target[column] = row[column]
