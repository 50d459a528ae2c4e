"""A cut at the borders of tensors, and the jobs that need one."""

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.job_spec import reshard_specs, shard_specs
from shards.aggregation import EACH, Average, Quorum
from shards.errors import BadInput
from shards.ledger import Ledger
from shards.repartition import repartition
from shards.resumed_state import resume_states
from shards.shard_state import SavedProgress, ShardState
from shards.spec import ShardSpec, TableSpec
from shards.tables import (
    FINEST_ALIGNMENT,
    DenseTable,
    KeyRange,
    Layout,
    SparseTable,
    TensorSpec,
    cut_at_tensors,
    cut_evenly,
)

RADIAL = Quorum(average=Average.RADIAL)
NET = DenseTable("net", (TensorSpec("a", (900,)), TensorSpec("b", (70,)), TensorSpec("c", (300,))))
HEAD = DenseTable("head", (TensorSpec("d", (10,)),))
ROWS = SparseTable("rows", 4)

sizes = st.lists(st.lists(st.integers(1, 700), min_size=1, max_size=5), min_size=1, max_size=3)
layouts = sizes.map(
    lambda drawn: Layout(
        tuple(
            DenseTable(f"t{n}", tuple(TensorSpec(f"w{i}", (size,)) for i, size in enumerate(table)))
            for n, table in enumerate(drawn)
        )
    )
)


def intervals(layout: Layout) -> list[KeyRange]:
    """Where each tensor is in the arena."""
    return [
        KeyRange(base + start, base + start + tensor.size)
        for table in layout.tables
        for base in [layout.section(table.name).start]
        for tensor, start in zip(table.tensors, table.offsets, strict=True)
    ]


def largest(bounds: Sequence[int]) -> int:
    return max(b - a for a, b in pairwise(bounds))


@given(layouts, st.data())
def test_no_tensor_is_cut(layout: Layout, data: st.DataObject) -> None:
    """Ranges follow each other over the whole arena, and each has at least one whole tensor."""
    tensors = intervals(layout)
    shards = data.draw(st.integers(1, len(tensors)))
    ranges = cut_at_tensors(layout, shards).ranges
    assert [keys.start for keys in ranges] == [0, *(keys.stop for keys in ranges[:-1])]
    assert (len(ranges), ranges[-1].stop) == (shards, layout.size)
    assert all(keys.start % FINEST_ALIGNMENT == 0 for keys in ranges)
    holders = [
        [keys for keys in ranges if keys.start <= tensor.start and tensor.stop <= keys.stop]
        for tensor in tensors
    ]
    assert [len(keys) for keys in holders] == [1] * len(tensors)
    assert {keys for (keys,) in holders} == set(ranges)


@settings(max_examples=60)
@given(layouts, st.data())
def test_no_other_cut_is_more_even(layout: Layout, data: st.DataObject) -> None:
    """Of all cuts at borders of tensors, none has a smaller largest range."""
    inner = layout.borders[1:-1]
    shards = data.draw(st.integers(1, len(inner) + 1))
    every = ((0, *cuts, layout.size) for cuts in combinations(inner, shards - 1))
    ranges = cut_at_tensors(layout, shards).ranges
    assert max(map(len, ranges)) == min(map(largest, every))


def test_equal_tensors_are_shared_out_evenly() -> None:
    """No shard has two tensors more than another."""
    layout = Layout((DenseTable("t", tuple(TensorSpec(f"w{n}", (256,)) for n in range(10))),))
    assert [len(keys) // 256 for keys in cut_at_tensors(layout, 4).ranges] == [2, 3, 2, 3]


def test_a_sparse_table_needs_no_tensor_at_a_shard() -> None:
    """Shards without a tensor own buckets of the sparse tables alone."""
    for tables, owners in (((HEAD,), 1), ((NET, HEAD), 4), ((), 0)):
        shard_map = cut_at_tensors(Layout(tables, (ROWS,)), 6)
        assert [len(keys) > 0 for keys in shard_map.ranges] == [True] * owners + [False] * (
            6 - owners
        )
        assert all(len(buckets) > 0 for buckets in shard_map.buckets)


@given(layouts, st.data())
def test_a_reshard_and_back_keeps_every_bit(layout: Layout, data: st.DataObject) -> None:
    """From 1 shard to up to 3, to up to 2 and to 1 again, no weight and no slot changes."""
    most, rng = len(intervals(layout)), np.random.default_rng(34)
    arrays = {
        f"{table.name}/{array}": rng.standard_normal(table.size, np.float32)
        for table in layout.tables
        for array in ("weights", "momentum")
    }
    before = cut_at_tensors(layout, 1)
    states = [ShardState(SavedProgress(7, 5, 320, Ledger({}, 2)), arrays)]
    for epoch, shards in enumerate((3, 2, 1), 2):
        after = cut_at_tensors(layout, min(shards, most), epoch)
        states = repartition(states, layout, before, after)
        before = after
    (state,) = states
    assert {name: array.tobytes() for name, array in state.arrays.items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def job(shards: int, **options: Any) -> list[ShardSpec]:
    """The specs of a job that needs its tensors whole."""
    options = {"merge": RADIAL, **options}
    return shard_specs([TableSpec(NET), TableSpec(HEAD)], shards=shards, **options)


def test_a_job_is_cut_and_resharded_as_it_needs() -> None:
    """Only a job that needs whole tensors is cut at their borders, also when it is resharded."""
    layout = Layout((NET, HEAD))
    assert job(3)[0].map == cut_at_tensors(layout, 3)
    assert reshard_specs(job(3), 2)[1].map == cut_at_tensors(layout, 2, epoch=2)
    for merge in (EACH, Quorum()):
        assert job(3, merge=merge)[0].map == cut_evenly(layout, 3)
        assert reshard_specs(job(3, merge=merge), 2)[0].map == cut_evenly(layout, 2, epoch=2)


def test_more_shards_than_tensors_are_refused() -> None:
    """The line says how many shards there may be, and why."""
    line = (
        "^tables net, head: expected 1 to 4 shards of whole tensors, got 5;"
        " the radial average needs them whole$"
    )
    with pytest.raises(BadInput, match=line):
        job(5)
    with pytest.raises(BadInput, match=line):
        reshard_specs(job(1), 5)


def test_a_map_that_cuts_a_tensor_is_refused() -> None:
    """A spec names the reason and the key of the cut; it says what to do."""
    even = cut_evenly(Layout((NET, HEAD)), 2)
    line = r"^job j.*: shards: expected each tensor whole.*radial average.*cut at key 768.*; resume"
    with pytest.raises(BadInput, match=line):
        msgspec.structs.replace(job(2)[0], map=even)


def test_a_state_that_was_cut_inside_a_tensor_is_cut_anew() -> None:
    """A job that needs whole tensors resumes from one that did not, if no buffer is in the way."""
    layout, spec = Layout((NET, HEAD)), job(2)[0]
    even = cut_evenly(layout, 2)
    arrays = {"net/weights": np.arange(NET.size, dtype=np.float32), "head/weights": HEAD.empty()}
    saved = SavedProgress(7, 5, 320, Ledger({}, 2))
    whole = [ShardState(saved, arrays)]
    states = repartition(whole, layout, cut_evenly(layout, 1), even)
    moved = resume_states(states, even, spec)
    assert moved[0].arrays["net/weights"].size == spec.map.ranges[0].stop != even.ranges[0].stop
    uneven = [
        msgspec.structs.replace(state, saved=msgspec.structs.replace(saved, buffered=count))
        for count, state in enumerate(states)
    ]
    with pytest.raises(BadInput, match="expected each tensor whole at one shard"):
        resume_states(uneven, even, spec)
