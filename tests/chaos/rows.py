"""Rows of sparse tables in a chaos run: the pushes of them, and the verdicts on what is read.

A worker has ids of its own, enough that each shard owns some. Every push of it has a gradient for
all of their rows, in the same step as its dense gradient, and its columns are those of the dense
pattern (record.py): -1, which counts, and minus the push's mark. Two tables get it:

- `rows`, under plain SGD at rate 1, so that a row holds what the shard's dense keys hold. Every
  read gathers these rows, and a shard whose rows say other than its keys is torn.
- `slots`, under Adagrad, whose rows have slots: the sums of the squares of all gradients. Its first
  column is what pushes of -1 make one after another, whichever these were.

A third table, `coded`, gets a gradient that travels as int8: rounding makes it whole, and a push
that arrives as it was before rounding, or is rounded to another scale, leaves a fraction.

One worker in six pushes and reads no rows.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from ps.session.row_requests import Gather, GatheredRows
from shards.first_values import Zeros
from shards.row_frames import RowGradient
from shards.rules import SGD, Adagrad
from shards.schedules import Fixed
from shards.shard_state import IDS, META, ROWS, ShardState, of_table
from shards.spec import TableSpec
from shards.tables import KeyRange, ShardMap, SparseTable, buckets_of
from tests.support.row_oracle import RowOracle

Ids = NDArray[np.uint64]

PLAIN = SparseTable("rows", 2, Zeros())
SLOTTED = SparseTable("slots", 2, Zeros())
CODED = SparseTable("coded", 3, Zeros())
CODEC = "int8"
_CODED_ROW = -127.0, -0.75, -0.25
_ROUNDED_ROW = -127.0, -1.0, 0.0
IDS_EACH = 24  # that a shard of three owns none of a worker's ids is as likely as 1 in 17,000
_RATE = 1.0
_DENSE_ONLY = 6
_COUNT = 1  # the word of a row's meta that counts its updates


def row_specs() -> tuple[TableSpec, ...]:
    """The specs of the tables."""
    rate = Fixed(base_rate=_RATE)
    rules = ((PLAIN, SGD()), (SLOTTED, Adagrad()), (CODED, SGD()))
    return tuple(TableSpec(table, rule, rate) for table, rule in rules)


def has_rows(worker: int) -> bool:
    """Return whether a worker of this number pushes rows."""
    return worker % _DENSE_ONLY != 0


def ids_of(worker: int) -> Ids:
    """The ids of a worker's rows, in ascending order; half of them are negative as int64."""
    numbers = np.arange(IDS_EACH // 2, dtype=np.uint64) + np.uint64(worker * IDS_EACH)
    return np.concatenate([numbers, ~numbers[::-1]])


def gather_for(workers: int) -> Gather:
    """The ids of all workers' rows."""
    return Gather({PLAIN.name: np.sort(np.concatenate([ids_of(n) for n in range(workers)]))})


def row_gradients(worker: int, mark: int) -> dict[str, RowGradient]:
    """What a worker pushes to the tables with its push of this mark."""
    row_by_table = {PLAIN: (-1.0, -mark), SLOTTED: (-1.0, -mark), CODED: _CODED_ROW}
    return {
        table.name: RowGradient(ids_of(worker), np.tile(np.array(row, np.float32), (IDS_EACH, 1)))
        for table, row in row_by_table.items()
    }


def contradicts(
    gather: Gather,
    gathered: GatheredRows,
    shard_map: ShardMap,
    shard: int,
    pattern: Sequence[tuple[int, int]],
) -> bool:
    """Return whether rows that were read of a shard differ from its keys.

    `pattern` has, for each worker, the count and the marks in the shard's dense keys.
    """
    ids, rows = gather.ids[PLAIN.name], gathered.rows
    here = _in_buckets(ids, shard_map.buckets[shard])
    stored = gathered.stored
    for worker, numbers in enumerate(pattern):
        mine = here & np.isin(ids, ids_of(worker))
        expected = numbers if has_rows(worker) else (0, 0)
        pushed = expected[0] > 0
        if (rows[mine] != expected).any() or (stored[mine] != pushed).any():
            return True
    return False


def row_faults(
    state: ShardState, shard: int, shard_map: ShardMap, worker: int, count: int, marks: int
) -> Iterator[str]:
    """What is wrong with a worker's rows in a shard's state.

    `count` and `marks` are those of the shard's dense keys.
    """
    ids = ids_of(worker)
    expected_ids = set(ids[_in_buckets(ids, shard_map.buckets[shard])].tolist())
    if not has_rows(worker) or not count:
        expected_ids = set()
    for table in (PLAIN, SLOTTED, CODED):
        arrays = of_table(state.arrays, table.name)
        mine = np.isin(arrays[IDS], ids)
        if set(arrays[IDS][mine].tolist()) != expected_ids:
            yield f"{table.name}: {mine.sum()} rows, expected {len(expected_ids)}"
        elif expected_ids:
            yield from _value_faults(table, arrays[ROWS][mine], arrays[META][mine], count, marks)


def _value_faults(
    table: SparseTable,
    rows: NDArray[np.float32],
    meta: NDArray[np.uint32],
    count: int,
    marks: int,
) -> Iterator[str]:
    if (meta[:, _COUNT] != count).any():
        yield f"{table.name}: updates {np.unique(meta[:, _COUNT])}, expected {count}"
    if (rows != rows[0]).any():
        yield f"{table.name}: rows of one worker differ"
    row = rows[0].tolist()
    if table is PLAIN and row != [count, marks]:
        yield f"{table.name}: {row}, expected {[count, marks]}"
    if table is CODED and row != (coded := [-count * value for value in _ROUNDED_ROW]):
        yield f"{table.name}: {row}, expected {coded}"
    # Weights first, then the slot of each column.
    expected = [_adagrad_weight(count), float(count)]
    if table is SLOTTED and [row[0], row[2]] != expected:
        yield f"{table.name}: weight and slot {[row[0], row[2]]}, expected {expected}"


def _in_buckets(ids: Ids, buckets: KeyRange) -> NDArray[np.bool_]:
    of_ids = buckets_of(ids)
    return (buckets.start <= of_ids) & (of_ids < buckets.stop)


@cache
def _adagrad_oracle() -> tuple[RowOracle, list[float]]:
    return RowOracle(SparseTable("slots", 1, Zeros()), Adagrad()), [0.0]


def _adagrad_weight(count: int) -> float:
    """The weight that `count` gradients of -1 make of zero, by the oracle."""
    oracle, weights = _adagrad_oracle()
    while len(weights) <= count:
        oracle.push(np.zeros(1, np.uint64), np.full((1, 1), -1.0, np.float32), _RATE)
        weights.append(float(oracle.rows[0].weights[0]))
    return weights[count]
