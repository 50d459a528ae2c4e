"""The layout of a dense table in its arena, and the cutting of an arena into shards."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shards.errors import BadInput
from shards.tables import (
    DenseTable,
    KeyRange,
    Layout,
    RateRun,
    Section,
    ShardMap,
    TensorSpec,
    cut_evenly,
    segments,
)

TABLE = DenseTable(
    "net",
    (
        TensorSpec("conv", (2, 3, 11)),
        TensorSpec("bias", (), lr_mult=2.0, decay_mult=0.0),
        TensorSpec("ip", (8, 32), lr_mult=0.5),
    ),
)

shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
tables = st.lists(shapes, min_size=1, max_size=8).map(
    lambda all_shapes: DenseTable(
        "drawn",
        tuple(TensorSpec(f"t{i}", shape, lr_mult=1.0 + i) for i, shape in enumerate(all_shapes)),
    )
)


def test_layout() -> None:
    """Tensors start on multiples of 64 floats and the arena ends on one of 256."""
    assert TABLE.offsets == (0, 128, 192)
    assert (TABLE.parameters, TABLE.size) == (66 + 1 + 256, 512)
    assert TABLE.empty().dtype == np.float32
    assert TABLE.empty().shape == (512,)


def test_views_are_the_arena_itself() -> None:
    """Writing a view writes the arena, at the tensor's place and nowhere else."""
    arena = TABLE.empty()
    views = TABLE.views(arena)
    assert {name: view.shape for name, view in views.items()} == {
        "conv": (2, 3, 11),
        "bias": (),
        "ip": (8, 32),
    }
    views["conv"][1, 2, 10] = 3
    views["bias"][...] = 4
    views["ip"][0, 1] = 5
    assert {int(key): arena[key] for key in np.flatnonzero(arena)} == {65: 3, 128: 4, 193: 5}


@pytest.mark.parametrize("shape", [(511,), (513,), (2, 256)])
def test_views_of_another_arena(shape: tuple[int, ...]) -> None:
    """An arena of another size is refused, naming both shapes."""
    with pytest.raises(BadInput, match=r"table net: expected an arena of shape \(512,\), got \("):
        TABLE.views(np.zeros(shape, np.float32))


def test_a_table_of_nothing() -> None:
    """A network without weights has an empty table, which is no table of a job."""
    table = DenseTable("t", ())
    assert table.size == 0
    with pytest.raises(BadInput, match=r"^table t: expected at least one tensor, got none$"):
        Layout((table,))


def test_names_are_unique() -> None:
    """A table that names a tensor twice cannot be made."""
    with pytest.raises(BadInput, match="table t: tensor a is named more than once"):
        DenseTable("t", (TensorSpec("a", (1,)), TensorSpec("b", (1,)), TensorSpec("a", (2,))))


@pytest.mark.parametrize("shape", [(0,), (3, 0), (-3,), (4, -1, -1)])
def test_sizes_are_positive(shape: tuple[int, ...]) -> None:
    """A tensor without elements, or with fewer, cannot be laid out."""
    with pytest.raises(BadInput, match="table t: tensor a: expected sizes of at least 1, got"):
        DenseTable("t", (TensorSpec("a", shape),))


@given(tables, st.data())
def test_shards_share_out_the_whole_arena(table: DenseTable, data: st.DataObject) -> None:
    """Ranges follow each other without gap or overlap, on multiples of 256, even to one block."""
    blocks = table.size // 256
    shards = data.draw(st.integers(1, min(blocks, 1024)))
    ranges = cut_evenly(Layout((table,)), shards).ranges
    assert [keys.start for keys in ranges] == [0, *(keys.stop for keys in ranges[:-1])]
    assert ranges[-1].stop == table.size
    assert all(keys.start % 256 == 0 for keys in ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 256
    assert min(map(len, ranges)) > 0


@pytest.mark.parametrize("size", [1, 3, 109, 700])
@pytest.mark.parametrize("shards", [2, 3, 4, 64])
def test_a_small_table_has_several_shards(size: int, shards: int) -> None:
    """With fewer than 256 floats per shard the ranges are non-empty, on multiples of 4."""
    table = DenseTable("small", (TensorSpec("w", (size,)),))
    ranges = cut_evenly(Layout((table,)), shards).ranges
    assert [keys.start for keys in ranges] == [0, *(keys.stop for keys in ranges[:-1])]
    assert ranges[-1].stop == table.size
    assert all(keys.start % 4 == 0 for keys in ranges)
    assert min(map(len, ranges)) > 0
    assert max(map(len, ranges)) <= 2 * min(map(len, ranges))


@pytest.mark.parametrize("shards", [0, -1, 129])
def test_no_more_shards_than_a_table_has_room_for(shards: int) -> None:
    """More shards than there are non-empty ranges are refused; the error names the limit."""
    with pytest.raises(BadInput, match=f"table net: expected 1 to 128 shards, got {shards}"):
        cut_evenly(Layout((TABLE,)), shards)


@pytest.mark.parametrize(("arrays", "tables", "most"), [(1, 1, 64), (5, 1, 128), (1, 3, 192)])
def test_padding_has_room_for_shards(arrays: int, tables: int, most: int) -> None:
    """One shard for every four floats, where an array takes 64 of them and a table 256."""
    tensors = tuple(TensorSpec(f"t{number}", (1,)) for number in range(arrays))
    layout = Layout(tuple(DenseTable(f"table{number}", tensors) for number in range(tables)))
    assert cut_evenly(layout, most).shards == most
    with pytest.raises(BadInput, match=f"expected 1 to {most} shards, got {most + 1}"):
        cut_evenly(layout, most + 1)


def test_cuts_are_views() -> None:
    """The parts of an arena for a shard are views, not copies."""
    shard_map = ShardMap(1, (KeyRange(0, 256), KeyRange(256, 512)))
    arena = TABLE.empty()
    part = shard_map.cut(arena, 1)
    assert len(part) == 256
    assert part.base is arena


@given(tables, st.data())
def test_segments_cover_the_tensors_exactly(table: DenseTable, data: st.DataObject) -> None:
    """Over all shards, segments hold each tensor's floats once, with its multipliers, in order."""
    shards = data.draw(st.integers(1, table.size // 256))
    wanted, got = table.empty(), table.empty()
    for tensor in table.tensors:
        table.views(wanted)[tensor.name][...] = tensor.lr_mult
    for keys in cut_evenly(Layout((table,)), shards).ranges:
        part = got[keys.start : keys.stop]
        for segment in segments(table, keys):
            assert np.all(part[segment.start : segment.stop] == 0)
            part[segment.start : segment.stop] = segment.lr_mult
    np.testing.assert_array_equal(got, wanted)


def test_segments_are_relative_to_their_keys() -> None:
    """A shard's section is an array of its own, and segments refer to that array."""
    assert segments(TABLE, KeyRange(64, 256)) == (
        RateRun(0, 2, 1.0, 1.0),
        RateRun(64, 65, 2.0, 0.0),
        RateRun(128, 192, 0.5, 1.0),
    )


HEAD = DenseTable("head", (TensorSpec("b", (3,)),))
BOTH = Layout((HEAD, TABLE))


def test_tables_follow_each_other_in_the_arena() -> None:
    """Each starts on a multiple of 256 floats; views of the arena are by table and tensor."""
    assert (BOTH.size, BOTH.section("head"), BOTH.section("net")) == (
        256 + 512,
        KeyRange(0, 256),
        KeyRange(256, 768),
    )
    arena = BOTH.empty()
    views = BOTH.views(arena)
    assert list(views) == ["head", "net"]
    views["head"]["b"][2] = 1
    views["net"]["bias"][...] = 2
    assert {int(key): arena[key] for key in np.flatnonzero(arena)} == {2: 1, 256 + 128: 2}
    assert BOTH.split(arena)["net"].base is not None


def test_a_cut_ignores_the_borders_of_tables() -> None:
    """A table of 3 floats has 2 shards like any other; one of them holds nothing of it."""
    first, second = cut_evenly(BOTH, 2).ranges
    assert BOTH.sections(first) == (
        Section("head", KeyRange(0, 256), 0),
        Section("net", KeyRange(0, 0 + 128), 256),
    ) or BOTH.sections(first) == (Section("head", KeyRange(0, 256), 0),)
    whole = [
        (one.table, key)
        for keys in (first, second)
        for one in BOTH.sections(keys)
        for key in range(one.keys.start, one.keys.stop)
    ]
    assert whole == [("head", key) for key in range(256)] + [("net", key) for key in range(512)]


def test_tables_have_different_names() -> None:
    """A job names each table once, and has at least one; an unknown name is refused."""
    with pytest.raises(BadInput, match="tables: head is named more than once"):
        Layout((HEAD, HEAD))
    with pytest.raises(BadInput, match="tables: expected 1 to 64, got 0"):
        Layout(())
    with pytest.raises(BadInput, match="table: expected one of head, net, got 'tail'"):
        BOTH.section("tail")
    assert BOTH.select(["net"]) == Layout((TABLE,))


def test_tables_and_maps_travel() -> None:
    """A table and a map come back from JSON and MessagePack unchanged."""
    shard_map = cut_evenly(Layout((TABLE,)), 2, epoch=7)
    for coder in (msgspec.json, msgspec.msgpack):
        assert coder.decode(coder.encode(TABLE), type=DenseTable) == TABLE
        assert coder.decode(coder.encode(shard_map), type=ShardMap) == shard_map
    assert shard_map.shards == 2
    assert str(shard_map.ranges[1]) == "[256, 512)"


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
def test_large_tables_are_cut_at_pages(shards: int) -> None:
    """Each part but the last ends where a 4 KB page of the arena does, and none is much larger."""
    table = DenseTable("large", (TensorSpec("w", (65_536 * shards + 300,)),))
    ranges = cut_evenly(Layout((table,)), shards).ranges
    assert [keys.start for keys in ranges] == [0, *(keys.stop for keys in ranges[:-1])]
    assert ranges[-1].stop == table.size
    assert all(4 * keys.start % 4096 == 0 for keys in ranges)
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 2048
