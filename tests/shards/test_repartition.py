"""A job's state, cut for another number of shards."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shards.errors import BadInput
from shards.ledger import Ledger, LedgerEntry
from shards.messages import Standing
from shards.parameters import SavedProgress, ShardState
from shards.repartition import repartition
from shards.tables import DenseTable, KeyRange, ShardMap, TensorSpec, cut_evenly

TABLE = DenseTable("net", (TensorSpec("w", (2000,)),))


def states(shard_map: ShardMap, saved: SavedProgress) -> list[ShardState]:
    """A state for each shard: each weight is its own key, each slot's value its negative."""
    keys = np.arange(TABLE.size, dtype=np.float32)
    parts = [np.concatenate(shard_map.cut(keys, shard)) for shard in range(shard_map.shards)]
    return [ShardState(saved, part, {"history": -part}) for part in parts]


def saved(version: int = 7, **seqs: int) -> SavedProgress:
    entries = {
        name: LedgerEntry(1, seq, clock=seq, step=seq, standing=Standing.ACTIVE)
        for name, seq in seqs.items()
    }
    return SavedProgress(version, 5, 320, Ledger(entries, floor=2))


@given(st.integers(1, 8), st.integers(1, 8))
def test_every_float_goes_where_its_key_goes(before: int, after: int) -> None:
    """The parts are those of the new map, and all shards have the same ledger and counts."""
    known = saved(a=3, b=4)
    old, new = cut_evenly(TABLE, before), cut_evenly(TABLE, after, epoch=2)
    moved = repartition(states(old, known), old, new)
    for got, expected in zip(moved, states(new, known), strict=True):
        assert got.saved == expected.saved
        assert got.weights.tolist() == expected.weights.tolist()
        assert got.slots["history"].tolist() == expected.slots["history"].tolist()
    assert len({id(state.saved.ledger) for state in moved}) == after, "each changes its own"


def test_a_shard_may_have_several_ranges() -> None:
    """Separate ranges are concatenated, in the order of the map."""
    odd = ShardMap(
        1, "net", ((KeyRange(0, 256), KeyRange(1024, TABLE.size)), (KeyRange(256, 1024),))
    )
    even = cut_evenly(TABLE, 3)
    back = repartition(repartition(states(odd, saved()), odd, even), even, odd)
    for got, expected in zip(back, states(odd, saved()), strict=True):
        assert got.weights.tolist() == expected.weights.tolist()


def test_a_newer_life_may_be_known_where_less_is_applied() -> None:
    """One shard knows the newer life, another a further push of the older: both are kept."""
    old, new = cut_evenly(TABLE, 2), cut_evenly(TABLE, 1, epoch=2)
    first, second = states(old, saved())
    before = LedgerEntry(1, 2, clock=4, step=20, standing=Standing.EXPIRED)
    newer = LedgerEntry(2, 1, clock=3, step=10, standing=Standing.GREETED)
    known = [
        replace(state, saved=replace(state.saved, ledger=Ledger({"a": entry}, floor=2)))
        for state, entry in ((first, before), (second, newer))
    ]
    (moved,) = repartition(known, old, new)
    assert moved.saved.ledger.entries["a"] == replace(newer, seq=2, clock=4, step=20)


def test_the_furthest_push_of_a_worker_that_died_counts() -> None:
    """A last push that only some shards have counts as applied: no part is applied twice."""
    old, new = cut_evenly(TABLE, 2), cut_evenly(TABLE, 1, epoch=2)
    first, second = states(old, saved(8, a=4, b=4))[0], states(old, saved(7, a=4, b=3))[1]
    (moved,) = repartition([first, second], old, new)
    assert moved.saved.version == 8
    assert moved.saved.ledger.cut == {"a": 4, "b": 4}


def test_the_highest_count_of_refusals_is_kept() -> None:
    """A worker may have sent NaN to one shard only, and that need not be the furthest one."""
    old, new = cut_evenly(TABLE, 2), cut_evenly(TABLE, 3, epoch=2)
    parts = [states(old, saved(a=seq))[shard] for shard, seq in enumerate((4, 3))]
    parts[1].saved.ledger.entries["a"].refused = 9
    moved = repartition(parts, old, new)
    entries = [
        (state.saved.ledger.entries["a"].seq, state.saved.ledger.entries["a"].refused)
        for state in moved
    ]
    assert entries == [(4, 9)] * 3


def test_maps_must_hold_the_same_keys() -> None:
    """A gap and another size are both refused."""
    even = cut_evenly(TABLE, 2)
    gap = ShardMap(1, "net", ((KeyRange(0, 256),), (KeyRange(512, TABLE.size),)))
    with pytest.raises(BadInput, match=r"expected a range from key 256, got \[512, 2048\)"):
        repartition(states(even, saved()), even, gap)
    less = ShardMap(1, "net", ((KeyRange(0, 512),),))
    with pytest.raises(BadInput, match=r"expected keys \[0, 2048\), got \[0, 512\)"):
        repartition(states(even, saved()), even, less)


def test_a_state_that_is_not_whole_is_refused() -> None:
    """Neither weights nor a slot may lack floats, as they do in a truncated answer."""
    old, new = cut_evenly(TABLE, 2), cut_evenly(TABLE, 1, epoch=2)
    first, second = states(old, saved())
    for short, what in (
        (replace(second, weights=second.weights[:-1]), "weights"),
        (replace(second, slots={"history": second.weights[:-1]}), "history"),
    ):
        with pytest.raises(BadInput, match=f"shard 1: expected 1024 floats of {what}, got 1023"):
            repartition([first, short], old, new)
