"""What rows prove: one lost, doubled, torn or made up is seen, in states and in reads."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ps import ShardState
from ps.session.row_requests import GatheredRows
from shards.ledger import Ledger
from shards.messages import Kind
from shards.row_codecs import round_rows
from shards.shard_state import IDS, META, ROWS, SavedProgress, array_name
from shards.sparse_part import SparsePart
from shards.tables import KeyRange, ShardMap, buckets_of
from tests.chaos.record import mark
from tests.chaos.rows import (
    CODEC,
    CODED,
    contradicts,
    gather_for,
    ids_of,
    row_faults,
    row_gradients,
    row_specs,
)
from tests.support.shard_dsl import spec

NO_FLOATS = np.zeros(0, np.float32)
MAP = ShardMap(1, (KeyRange(0, 0),) * 3)
SHARDS = range(3)
PUSHES = 5
MARKS = sum(mark(seq, 1) for seq in range(1, PUSHES + 1))

Change = Callable[[dict[str, np.ndarray[Any, Any]]], object]


def parts_after(pushes: dict[int, int], shard: int) -> dict[str, SparsePart]:
    """The tables of a shard after these workers' first pushes, as many as each made."""
    tables = row_specs()
    shard_spec = spec(tables=tables, map=MAP, shard=shard)
    parts = {table.table.name: SparsePart(shard_spec, table) for table in tables}
    for worker, count in pushes.items():
        for seq in range(1, count + 1):
            for name, gradient in row_gradients(worker, mark(seq, 1)).items():
                here = [at for at, number in enumerate(gradient.ids) if owner(number) == shard]
                kind = Kind(CODEC) if name == CODED.name else Kind.F4
                part = type(gradient)(gradient.ids[here], round_rows(kind, gradient.rows[here]))
                parts[name].apply(NO_FLOATS, [part], NO_FLOATS, 1.0, None)
    return parts


def owner(number: np.uint64) -> int:
    """The shard of an id."""
    (shard,) = (shard for shard in SHARDS if here(np.array([number]), shard)[0])
    return shard


def here(ids: np.ndarray[Any, Any], shard: int) -> np.ndarray[Any, Any]:
    """Which of these ids a shard owns."""
    low, high = MAP.buckets[shard].start, MAP.buckets[shard].stop
    return (buckets_of(ids) >= low) & (buckets_of(ids) < high)


def state_of(parts: dict[str, SparsePart]) -> ShardState:
    arrays = {
        array_name(name, array): value
        for name, part in parts.items()
        for array, value in part.export(NO_FLOATS, ()).items()
    }
    return ShardState(SavedProgress(0, 0, 0, Ledger({})), arrays)


@pytest.mark.parametrize("shard", SHARDS)
def test_each_worker_has_rows_on_each_shard_and_shares_none(shard: int) -> None:
    """A shard that lost all rows of a worker could not be seen where it owns none."""
    ids = [ids_of(worker) for worker in range(16)]
    assert all(here(numbers, shard).any() for numbers in ids)
    assert len(np.unique(np.concatenate(ids))) == sum(map(len, ids))
    assert all((numbers[1:] > numbers[:-1]).all() for numbers in ids)


@pytest.mark.parametrize("shard", SHARDS)
def test_pushes_that_count_once_are_no_fault(shard: int) -> None:
    """Rows and slots after some pushes of two workers; a third and one without rows have none."""
    state = state_of(parts_after({1: PUSHES, 2: 1}, shard))
    for worker, count, marks in ((1, PUSHES, MARKS), (2, 1, mark(1, 1)), (3, 0, 0), (0, 7, 9)):
        assert not [*row_faults(state, shard, MAP, worker, count, marks)]


def add(array: str, at: Any, by: float) -> Change:
    def change(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
        arrays[array][at] += arrays[array].dtype.type(by)

    return change


def drop_row(arrays: dict[str, np.ndarray[Any, Any]]) -> None:
    for name in ("ids", "rows", "meta"):
        arrays[f"slots/{name}"] = arrays[f"slots/{name}"][1:]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(add(f"rows/{ROWS}", 0, 1.0), id="a row counts one more"),
        pytest.param(add(f"rows/{ROWS}", np.s_[:, 1], 1.0), id="another push in place of one"),
        pytest.param(add(f"rows/{META}", np.s_[:, 1], 1), id="updates counted twice"),
        pytest.param(add(f"slots/{ROWS}", np.s_[:, 2], 1.0), id="a slot and a row of two versions"),
        pytest.param(add(f"slots/{ROWS}", np.s_[:, 0], 1e-3), id="a weight that no pushes make"),
        pytest.param(add(f"slots/{IDS}", 0, 2**40), id="a row of another id"),
        pytest.param(add(f"coded/{ROWS}", np.s_[:, 1], -0.25), id="a row that was not rounded"),
        pytest.param(drop_row, id="a row lost"),
    ],
)
def test_what_is_wrong_with_rows_is_seen(change: Change) -> None:
    """Each way for rows and slots to be wrong is a fault of their worker's."""
    state = state_of(parts_after({1: PUSHES}, 0))
    change(state.arrays)
    assert [*row_faults(state, 0, MAP, 1, PUSHES, MARKS)]


@pytest.mark.parametrize(("count", "marks"), [(PUSHES - 1, MARKS), (PUSHES, MARKS + 1), (0, 0)])
def test_a_dense_table_without_its_rows_is_seen(count: int, marks: int) -> None:
    """Keys and rows of one shard have to say the same."""
    state = state_of(parts_after({1: PUSHES}, 0))
    assert [*row_faults(state, 0, MAP, 1, count, marks)]


def test_a_read_of_keys_and_rows_of_two_versions_is_seen() -> None:
    """A read is refuted if its rows lack a push that its keys have, or have another one more."""
    gather = gather_for(3)
    ids = gather.ids["rows"]
    rows, stored = np.zeros((len(ids), 2), np.float32), np.zeros(len(ids), np.bool_)
    mine = np.isin(ids, ids_of(1))
    rows[mine], stored[mine] = (PUSHES, MARKS), True
    gathered = GatheredRows(rows, stored)

    def of_shard(shard: int, count: int, marks: int) -> bool:
        return contradicts(gather, gathered, MAP, shard, [(4, 4), (count, marks), (0, 0)])

    assert not any(of_shard(shard, PUSHES, MARKS) for shard in SHARDS)
    assert all(of_shard(shard, PUSHES - 1, MARKS) for shard in SHARDS)
    assert all(of_shard(shard, PUSHES, MARKS - 1) for shard in SHARDS)
    one = int(np.flatnonzero(mine & here(ids, 2))[0])
    stored[one] = False
    assert [of_shard(shard, PUSHES, MARKS) for shard in SHARDS] == [False, False, True]
