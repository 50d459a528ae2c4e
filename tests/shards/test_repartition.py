"""A job's state, cut for another number of shards."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cupy_kernels.ops.rows import mix
from shards.errors import BadInput
from shards.ledger import Ledger, LedgerEntry
from shards.repartition import repartition
from shards.shard_state import SavedProgress, ShardState
from shards.shard_status import Standing
from shards.tables import (
    DenseTable,
    KeyRange,
    Layout,
    ShardMap,
    SparseTable,
    TensorSpec,
    buckets_of,
    cut_evenly,
)

NET = DenseTable("net", (TensorSpec("w", (2000,)),))
HEAD = DenseTable("head", (TensorSpec("b", (3,)),))
TABLES = Layout((NET,))
BOTH = Layout((HEAD, NET))


def states(shard_map: ShardMap, saved: SavedProgress, layout: Layout = TABLES) -> list[ShardState]:
    """A state for each shard: each weight is its own key, each slot's value its negative.

    Table `head` has no slots.
    """
    arena = np.arange(layout.size, dtype=np.float32)
    found = []
    for keys in shard_map.ranges:
        arrays = {}
        for one in layout.sections(keys):
            part = arena[one.start : one.start + len(one.keys)]
            arrays[f"{one.table}/weights"] = part
            if one.table == "net":
                arrays["net/history"] = -part
        found.append(ShardState(saved, arrays))
    return found


def same(got: ShardState, expected: ShardState) -> bool:
    lists = [
        {name: one.tolist() for name, one in state.arrays.items()} for state in (got, expected)
    ]
    return lists[0] == lists[1]


def saved(version: int = 7, **seqs: int) -> SavedProgress:
    entries = {
        name: LedgerEntry(1, seq, clock=seq, step=seq, standing=Standing.ACTIVE)
        for name, seq in seqs.items()
    }
    return SavedProgress(version, 5, 320, Ledger(entries, floor=2))


@given(st.integers(1, 8), st.integers(1, 8), st.sampled_from([TABLES, BOTH]))
def test_every_float_goes_where_its_key_goes(before: int, after: int, layout: Layout) -> None:
    """The parts are those of the new map, and all shards have the same ledger and counts."""
    known = saved(a=3, b=4)
    old, new = cut_evenly(layout, before), cut_evenly(layout, after, epoch=2)
    moved = repartition(states(old, known, layout), layout, old, new)
    for got, expected in zip(moved, states(new, known, layout), strict=True):
        assert got.saved == expected.saved
        assert same(got, expected)
    assert len({id(state.saved.ledger) for state in moved}) == after, "each changes its own"


def test_the_highest_count_of_updates_is_kept() -> None:
    """A shard that holds nothing of a table does not count the table's updates."""
    old, new = cut_evenly(BOTH, 2), cut_evenly(BOTH, 3, epoch=2)
    parts = [
        replace(state, saved=replace(state.saved, updates=updates))
        for state, updates in zip(
            states(old, saved(), BOTH), ({"head": 2, "net": 5}, {"net": 5}), strict=True
        )
    ]
    moved = repartition(parts, BOTH, old, new)
    assert [state.saved.updates for state in moved] == [{"head": 2, "net": 5}] * 3


def test_a_newer_life_may_be_known_where_less_is_applied() -> None:
    """One shard knows the newer life, another a further push of the older: both are kept."""
    old, new = cut_evenly(TABLES, 2), cut_evenly(TABLES, 1, epoch=2)
    first, second = states(old, saved())
    before = LedgerEntry(1, 2, clock=4, step=20, standing=Standing.EXPIRED)
    newer = LedgerEntry(2, 1, clock=3, step=10, standing=Standing.KNOWN)
    known = [
        replace(state, saved=replace(state.saved, ledger=Ledger({"a": entry}, floor=2)))
        for state, entry in ((first, before), (second, newer))
    ]
    (moved,) = repartition(known, TABLES, old, new)
    assert moved.saved.ledger.entries["a"] == replace(newer, seq=2, clock=4, step=20)


def test_the_furthest_push_of_a_worker_that_died_counts() -> None:
    """A last push that only some shards have counts as applied: no part is applied twice."""
    old, new = cut_evenly(TABLES, 2), cut_evenly(TABLES, 1, epoch=2)
    first, second = states(old, saved(8, a=4, b=4))[0], states(old, saved(7, a=4, b=3))[1]
    (moved,) = repartition([first, second], TABLES, old, new)
    assert moved.saved.version == 8
    assert moved.saved.ledger.cut == {"a": 4, "b": 4}


def test_the_highest_count_of_refusals_is_kept() -> None:
    """A worker may have sent NaN to one shard only, and that need not be the furthest one."""
    old, new = cut_evenly(TABLES, 2), cut_evenly(TABLES, 3, epoch=2)
    parts = [states(old, saved(a=seq))[shard] for shard, seq in enumerate((4, 3))]
    parts[1].saved.ledger.entries["a"].refused = 9
    moved = repartition(parts, TABLES, old, new)
    entries = [
        (state.saved.ledger.entries["a"].seq, state.saved.ledger.entries["a"].refused)
        for state in moved
    ]
    assert entries == [(4, 9)] * 3


def test_maps_must_hold_the_same_keys() -> None:
    """A gap and another size are both refused."""
    even = cut_evenly(TABLES, 2)
    gap = ShardMap(1, (KeyRange(0, 256), KeyRange(512, NET.size)))
    with pytest.raises(BadInput, match=r"expected a range from key 256, got \[512, 2048\)"):
        repartition(states(even, saved()), TABLES, even, gap)
    less = ShardMap(1, (KeyRange(0, 512),))
    with pytest.raises(BadInput, match=r"expected keys \[0, 2048\), got up to 512"):
        repartition(states(even, saved()), TABLES, even, less)


def test_a_state_that_is_not_whole_is_refused() -> None:
    """Neither weights nor a slot may lack floats, as they do in a truncated answer."""
    old, new = cut_evenly(TABLES, 2), cut_evenly(TABLES, 1, epoch=2)
    first, second = states(old, saved())
    for short, what in (
        (replace(second, arrays=second.arrays | {"net/weights": np.zeros(1023)}), "net/weights"),
        (replace(second, arrays=second.arrays | {"net/history": np.zeros(1023)}), "net/history"),
    ):
        with pytest.raises(BadInput, match=f"shard 1: expected 1024 floats of {what}, got .1023,"):
            repartition([first, short], TABLES, old, new)


USER = SparseTable("user", 2)
ROWS_OF = Layout((NET,), (USER,))
FEW = np.sort(np.arange(40, dtype=np.uint64) * np.uint64(7))


def states_of_rows(shard_map: ShardMap) -> list[ShardState]:
    """A state for each shard, with rows of some ids that hold their ids."""
    ids = FEW[np.argsort(mix(FEW))]
    found = states(shard_map, saved(), ROWS_OF)
    for state, buckets in zip(found, shard_map.buckets, strict=True):
        here = (buckets_of(ids) >= buckets.start) & (buckets_of(ids) < buckets.stop)
        state.arrays["user/ids"] = ids[here]
        state.arrays["user/rows"] = np.repeat(ids[here].astype(np.float32), 2).reshape(-1, 2)
        state.arrays["user/meta"] = np.zeros((here.sum(), 4), np.uint32)
    return found


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_row_goes_where_its_bucket_goes(before: int, after: int) -> None:
    """Rows, with their meta, are those of the new map, each with its own id."""
    old, new = cut_evenly(ROWS_OF, before), cut_evenly(ROWS_OF, after, epoch=2)
    moved = repartition(states_of_rows(old), ROWS_OF, old, new)
    expected = states_of_rows(new)
    for got, state in zip(moved, expected, strict=True):
        if not len(state.arrays["user/ids"]):
            del state.arrays["user/rows"], state.arrays["user/meta"]
        assert same(got, state)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"user/ids": lambda a: a[::-1]}, "shard 0: table user: expected ids in the order"),
        ({"user/ids": lambda a: a[1:]}, "shard 0: table user: expected [0-9]+ rows of"),
        ({"user/ids": lambda a: a.view(np.int64)}, "shard 0: table user: expected ids, uint64"),
        ({"user/ids": lambda a: a.reshape(1, -1)}, "shard 0: table user: expected ids, uint64"),
        ({"user/ids": lambda a: np.full_like(a, a[0])}, "expected ids in the order of their"),
        ({"user/rows": lambda a: a[1:]}, "shard 0: table user: expected [0-9]+ rows of rows"),
        (
            {"user/rows": lambda a: np.hstack([a, a])},
            "user: expected the same arrays at each shard",
        ),
        ({"user/rows": lambda a: a.astype(np.float64)}, "user: expected the same arrays at each"),
        (
            {"user/rows": lambda a: a.reshape(-1)},
            "shard 0: table user: expected [0-9]+ rows of rows",
        ),
        ({"user/meta": lambda a: a[:, :3]}, "user: expected the same arrays at each shard"),
        ({"user/more": lambda _: np.zeros(0)}, "shard 0: table user: expected [0-9]+ rows of more"),
        ({"item/ids": lambda _: np.zeros(0)}, "shard 0: expected arrays of the tables net, user"),
    ],
)
def test_rows_that_are_damaged_are_refused(changes: dict[str, Any], text: str) -> None:
    """Ids out of order, cut, of another dtype or another shard, and rows that are none: one line.

    Ids out of order were once sorted, and so had the rows of others.
    """
    old, new = cut_evenly(ROWS_OF, 2), cut_evenly(ROWS_OF, 3, epoch=2)
    damaged = states_of_rows(old)
    for name, change in changes.items():
        damaged[0].arrays[name] = change(damaged[0].arrays.get(name))
    with pytest.raises(BadInput, match=text):
        repartition(damaged, ROWS_OF, old, new)


def test_rows_of_another_shard_or_none_are_refused() -> None:
    """A shard's rows that another shard has as well, or without ids, are no state of the job."""
    old, new = cut_evenly(ROWS_OF, 2), cut_evenly(ROWS_OF, 3, epoch=2)
    twice, missing = states_of_rows(old), states_of_rows(old)
    twice[1].arrays.update({n: a for n, a in twice[0].arrays.items() if n.startswith("user")})
    del missing[1].arrays["user/ids"]
    for damaged, text in (
        (twice, "expected ids of buckets"),
        (missing, "expected ids, .* got none"),
    ):
        with pytest.raises(BadInput, match=f"shard 1: table user: {text}"):
            repartition(damaged, ROWS_OF, old, new)
    gap = replace(old, buckets=(old.buckets[0], KeyRange(40000, 65536)))
    with pytest.raises(BadInput, match="shard map before: expected buckets from 32768"):
        repartition(states_of_rows(old), ROWS_OF, gap, new)
