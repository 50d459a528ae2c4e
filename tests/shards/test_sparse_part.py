"""A part of a sparse table against a dict of rows: pushes, pulls, state and limits."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cupy_kernels.ops.rows import find_distinct, mix, sum_rows
from shards.errors import BadInput, BadMessage, Full
from shards.first_values import Constant, Init, Normal, Uniform, Zeros
from shards.messages import AskedPart, Kind, Part
from shards.row_frames import RowGradient
from shards.row_index import RowIndex
from shards.rules import FTRL, SGD, Adagrad, Adam, Decay, Momentum, Nesterov, RowAdagrad, Rule
from shards.shard_state import IDS, META, ROWS
from shards.sparse_part import SparsePart
from shards.spec import TableSpec
from shards.tables import BUCKETS, KeyRange, SparseTable, buckets_of
from tests.support.row_oracle import RowOracle
from tests.support.shard_dsl import spec

Floats = NDArray[np.float32]
EMPTY = np.zeros(0, np.float32)
RATE = 0.25
HALF = Uniform(0.5)
RULES: tuple[Rule, ...] = (
    SGD(),
    Momentum(),
    Nesterov(0.5),
    Adagrad(),
    RowAdagrad(delta=1e-3),
    Adam(beta2=0.9),
    FTRL(beta=0.5, l1=0.25, l2=0.125),
)

# A few small ids come often, so that rows are pushed again; the others are of any bits.
IDS_DRAWN = st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=30)


def part_of(
    rule: Rule, *, dim: int = 3, init: Init = HALF, decay: float = 0.0, **options: Any
) -> SparsePart:
    table = SparseTable("user", dim, init, seed=7, **options)
    table_spec = TableSpec(table, rule, decay=Decay(decay))
    return SparsePart(spec(tables=(table_spec,)), table_spec)


def gradient_of(ids: Sequence[int], dim: int, seed: int = 0) -> RowGradient:
    distinct = np.unique(np.array(ids, np.uint64))
    rows = np.random.default_rng(seed).standard_normal((len(distinct), dim)).astype(np.float32)
    return RowGradient(distinct, rows)


def apply(part: SparsePart, *gradients: RowGradient) -> None:
    part.apply(EMPTY, gradients, EMPTY, RATE, None)


def read(part: SparsePart, ids: NDArray[np.uint64]) -> tuple[Floats, NDArray[np.bool_]]:
    """The rows of these ids, and whether each is stored."""
    ask, frames = AskedPart("user"), [ids.tobytes()]
    part.check_ask(ask, frames)
    _, (rows, stored) = part.read(EMPTY, 0, ask, frames, "w")
    return rows, np.unpackbits(stored)[: len(ids)].astype(np.bool_)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@given(
    pushes=st.lists(IDS_DRAWN, max_size=8),
    dim=st.sampled_from([1, 3, 8, 13, 16]),
    decay=st.sampled_from([0.0, 0.125]),
)
def test_a_part_equals_a_dict_of_rows(
    rule: Rule, pushes: list[list[int]], dim: int, decay: float
) -> None:
    """Rows, slots and counts equal those of a dict that updates row by row, bit for bit."""
    part = part_of(rule, dim=dim, decay=decay)
    oracle = RowOracle(part.table, rule, decay)
    for seed, ids in enumerate(pushes):
        gradient = gradient_of(ids, dim, seed)
        apply(part, gradient)
        oracle.push(gradient.ids, gradient.rows, RATE)
    asked = np.unique(np.array([number for ids in pushes for number in ids] + [3, 99], np.uint64))
    rows, stored = read(part, asked)
    assert np.array_equal(rows, oracle.gather(asked))
    assert stored.tolist() == [int(number) in oracle.rows for number in asked]
    assert part.rows == len(oracle.rows)
    oracle.check_state(part.export(EMPTY, ()))


@given(runs=st.lists(IDS_DRAWN, min_size=1, max_size=5))
def test_several_gradients_at_once_equal_one_after_another(runs: list[list[int]]) -> None:
    """A run of pushes leaves the state that the same pushes leave one by one."""
    together, alone = part_of(Adagrad()), part_of(Adagrad())
    gradients = [gradient_of(ids, 3, seed) for seed, ids in enumerate(runs)]
    apply(together, *gradients)
    for gradient in gradients:
        apply(alone, gradient)
    assert_same_state(together, alone)


def assert_same_state(part: SparsePart, other: SparsePart) -> None:
    arrays, others = part.export(EMPTY, ()), other.export(EMPTY, ())
    assert arrays.keys() == others.keys()
    assert all(np.array_equal(arrays[name], others[name]) for name in arrays)


def test_a_pull_stores_nothing() -> None:
    """A pull of unknown ids returns their first values, and the state stays empty."""
    part = part_of(SGD())
    ids = np.arange(100, dtype=np.uint64)
    rows, stored = read(part, ids)
    assert np.array_equal(rows, part.table.init.make_rows(ids, 3, 7))
    assert not stored.any()
    assert part.rows == 0
    assert len(part.export(EMPTY, ())[IDS]) == 0


@given(pushes=st.lists(IDS_DRAWN, max_size=6), more=IDS_DRAWN)
def test_a_restored_part_continues_with_the_same_bits(
    pushes: list[list[int]], more: list[int]
) -> None:
    """A part that took over a state in place of its own is equal to the one that made it."""
    part, other = part_of(RowAdagrad()), part_of(RowAdagrad())
    for seed, ids in enumerate(pushes):
        apply(part, gradient_of(ids, 3, seed))
    apply(other, gradient_of([1, 2, 500], 3))
    state = part.export(EMPTY, ())
    other.check_state(state)
    other.restore(state, EMPTY, ())
    assert_same_state(part, other)
    for one in (part, other):
        apply(one, gradient_of(more, 3, 77))
    assert_same_state(part, other)


def test_a_state_does_not_change_later() -> None:
    """An exported state keeps its values while the part is updated."""
    part = part_of(SGD())
    apply(part, gradient_of(range(10), 3))
    state = part.export(EMPTY, ())
    before = state[ROWS].copy()
    apply(part, gradient_of(range(20), 3, 1))
    assert np.array_equal(state[ROWS], before)


@pytest.mark.parametrize("rows", [150_000])
def test_many_rows_are_all_there(rows: int) -> None:
    """An index that grows several times, also while a growth is under way, loses no row."""
    part = part_of(SGD(), dim=1, init=Zeros())
    ids = mix(np.arange(rows, dtype=np.uint64) + np.uint64(1))
    for low in range(0, rows, 3_000):
        chunk = np.sort(ids[low : low + 3_000])
        apply(part, RowGradient(chunk, np.ones((len(chunk), 1), np.float32)))
    stored = np.sort(ids)
    values, known = read(part, stored)
    assert known.all()
    assert (values == -RATE).all()
    assert part.rows == rows
    assert np.array_equal(np.sort(part.export(EMPTY, ())[IDS]), stored)


def test_an_index_of_few_buckets_wraps_around() -> None:
    """Ids that crowd into the last cells of the index are found after its first cell."""
    buckets = KeyRange(BUCKETS - 1, BUCKETS)
    ids = ids_of_last_bucket(400)
    index = RowIndex(buckets)
    for low in range(0, len(ids), 7):
        some = ids[low : low + 7]
        index.insert(some, np.arange(low, low + len(some)))
    assert index.find(ids).tolist() == list(range(len(ids)))
    others = np.setdiff1d(ids_of_last_bucket(800), ids)
    assert (index.find(others) == -1).all()


def ids_of_last_bucket(count: int) -> NDArray[np.uint64]:
    """Some numbers with the greatest hashes: the inverse of `mix` of the last numbers."""
    ids = np.arange(2**64 - count, 2**64, dtype=np.uint64)
    for shift, factor in ((31, 0x319642B2D24D8EC3), (27, 0x96DE1B173F119089), (30, 1)):
        ids = ids ^ (ids >> np.uint64(shift)) ^ (ids >> np.uint64(2 * shift))
        ids *= np.uint64(factor)
    assert (mix(ids) >= np.uint64(2**64 - count)).all()
    return ids


@pytest.mark.parametrize(
    ("init", "least", "most", "mean", "deviation"),
    [
        (Uniform(0.5), -0.5, 0.5, 0.0, 0.5 / 3**0.5),
        (Normal(0.1), -0.6, 0.6, 0.0, 0.1),
        (Constant(2.0), 2.0, 2.0, 2.0, 0.0),
        (Zeros(), 0.0, 0.0, 0.0, 0.0),
    ],
    ids=str,
)
def test_first_values_have_their_distribution(
    init: Init, least: float, most: float, mean: float, deviation: float
) -> None:
    """First values stay in their range, and have the mean and deviation that they are named by."""
    values = init.make_rows(np.arange(20_000, dtype=np.uint64), 4, 1)
    assert values.shape == (20_000, 4)
    assert values.min() >= least
    assert values.max() <= most
    np.testing.assert_allclose(values.mean(dtype=np.float64), mean, atol=0.005)
    np.testing.assert_allclose(values.std(dtype=np.float64), deviation, atol=0.005)


@given(ids=IDS_DRAWN, seed=st.integers(0, 2**62))
@pytest.mark.parametrize("init", [Uniform(0.5), Normal(0.1)], ids=str)
def test_first_values_depend_on_seed_id_and_column_alone(
    init: Init, ids: list[int], seed: int
) -> None:
    """A row alone has the values that it has among others, and a narrower row is its beginning."""
    all_ids = np.array(ids, np.uint64)
    rows = init.make_rows(all_ids, 5, seed)
    for number, row in zip(ids, rows, strict=True):
        alone = init.make_rows(np.array([number], np.uint64), 3, seed)
        assert np.array_equal(alone[0], row[:3])
    if ids:
        assert not np.array_equal(rows, init.make_rows(all_ids, 5, seed + 1))


def test_first_values_stay_what_they_are() -> None:
    """The values of some ids are literal: a saved job must find them again in every release."""
    ids = np.array([0, 1, 2**64 - 1], np.uint64)
    assert Uniform(1.0).make_rows(ids, 2, 7).tolist() == LITERAL_UNIFORM
    assert Normal(1.0).make_rows(ids, 2, 7).tolist() == LITERAL_NORMAL


LITERAL_UNIFORM = [
    [0.900322675704956, 0.7593739032745361],
    [-0.31435728073120117, -0.45594024658203125],
    [0.016884922981262207, -0.6106548309326172],
]
LITERAL_NORMAL = [
    [0.8517913818359375, 0.055877685546875],
    [-1.7404022216796875, -1.68157958984375],
    [-1.1213531494140625, 0.14959716796875],
]


@given(
    ids=st.lists(st.integers(0, 20), max_size=60),
    dim=st.sampled_from([1, 4]),
    seed=st.integers(0, 9),
)
def test_rows_of_one_id_are_added_in_order(ids: list[int], dim: int, seed: int) -> None:
    """Sums by id equal those of a loop in float64 over the batch, rounded once."""
    rows = np.random.default_rng(seed).standard_normal((len(ids), dim)).astype(np.float32)
    distinct = find_distinct(np.array(ids, np.uint64))
    assert distinct.ids.tolist() == sorted(set(ids))
    summed = sum_rows(distinct, rows)
    for number, total in zip(distinct.ids.tolist(), summed, strict=True):
        expected = np.zeros(dim)
        for at, row in zip(ids, rows, strict=True):
            if at == number:
                expected += row
        assert np.array_equal(total, expected.astype(np.float32))
    assert distinct.ids[distinct.inverse].tolist() == ids


# --- what is refused ------------------------------------------------------------------------------


def frames_of(ids: Sequence[int], dim: int = 3) -> list[bytes]:
    return [np.array(ids, np.uint64).tobytes(), np.zeros((len(ids), dim), np.float32).tobytes()]


WHOLE = Part("user", Kind.F4, 0, BUCKETS)


@pytest.mark.parametrize(
    ("part", "frames", "text"),
    [
        (WHOLE, frames_of([1, 1]), "strictly ascending order, got 1 after 1"),
        (WHOLE, frames_of([2, 1]), "strictly ascending order, got 1 after 2"),
        (WHOLE, [frames_of([1, 2])[0][:-1], b""], "ids of 8 bytes, got 15 bytes"),
        (
            WHOLE,
            [frames_of([1, 2])[0], b"\0" * 12],
            "expected 2 rows of 3 floats as f4, 24 bytes, got 12",
        ),
        (Part("user", Kind.F4, 0, 5), frames_of([1]), "expected buckets [0, 65536)"),
        (Part("user", Kind.FP16, 0, BUCKETS), frames_of([1]), "as f4, bf16, int8, got fp16"),
        (Part("user", Kind.BF16, 0, BUCKETS), frames_of([1]), "as bf16, 6 bytes, got 12"),
        (
            Part("user", Kind.INT8, 0, BUCKETS),
            [frames_of([1])[0], np.float32(np.nan).tobytes() + b"\1\2\3"],
            "expected scales that are finite and at least 0",
        ),
        (Part("user", Kind.F4, 0, BUCKETS, zstd=True), frames_of([1]), "got f4 packed by zstd"),
    ],
)
def test_a_push_that_is_no_rows_is_refused(part: Part, frames: list[bytes], text: str) -> None:
    """Ids out of order, repeated or cut, rows of another number, another kind: one line each."""
    with pytest.raises(BadMessage, match="user") as raised:
        part_of(SGD()).check("push 1", part, frames)
    assert text in str(raised.value)


def test_more_ids_than_a_message_holds_are_refused() -> None:
    """A frame of more ids than `message_rows` is refused by its size alone."""
    part = part_of(SGD(), dim=4096)
    too_many = np.arange(part.table.message_rows + 1, dtype=np.uint64)
    with pytest.raises(BadMessage, match=f"at most {part.table.message_rows} ids"):
        part.check_ask(AskedPart("user"), [too_many.tobytes()])


def test_ids_of_other_buckets_are_refused() -> None:
    """A shard refuses ids that another one owns."""
    table_spec = TableSpec(SparseTable("user", 3), SGD())
    shard_spec = spec(tables=(table_spec,))
    half = shard_spec.map.__class__(1, shard_spec.map.ranges * 2)
    part = SparsePart(spec(tables=(table_spec,), map=half), table_spec)
    ids = np.arange(20, dtype=np.uint64)
    inside = ids[buckets_of(ids) < BUCKETS // 2]
    ask = AskedPart("user")
    part.check_ask(ask, [inside.tobytes()])
    with pytest.raises(BadMessage, match=r"expected buckets \[0, 32768\), got id"):
        part.check_ask(ask, [ids.tobytes()])


def test_a_full_table_refuses_new_rows_only() -> None:
    """Rows that are stored can be pushed while the table is full; a new one raises Full."""
    part = part_of(SGD(), rows=10)
    part.check_room([gradient_of(range(10), 3)])
    apply(part, gradient_of(range(10), 3))
    part.check_room([gradient_of(range(10), 3), gradient_of(range(5), 3)])
    with pytest.raises(Full, match="share of rows=10, got 1 new ones beyond 10"):
        part.check_room([gradient_of(range(5), 3), gradient_of([10], 3)])


@settings(max_examples=20)
@given(ids=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=9, unique=True))
def test_a_damaged_state_is_refused(ids: list[int]) -> None:
    """A state out of order, with an id twice, of another shape or dtype, or not whole."""
    part, other = part_of(Adagrad()), part_of(Adagrad())
    apply(part, gradient_of(ids, 3))
    state = part.export(EMPTY, ())
    other.check_state(state)
    for damaged in (
        {**state, IDS: state[IDS][::-1]},
        {**state, IDS: np.full_like(state[IDS], state[IDS][0])},
        {**state, ROWS: state[ROWS][:, :-1]},
        {**state, META: state[META].view(np.int32)},
        {IDS: state[IDS], ROWS: state[ROWS]},
        {ROWS: state[ROWS][:0]},
        {**state, "past.1": state[ROWS]},
        {},
    ):
        with pytest.raises(BadInput, match="table user"):
            other.check_state(damaged)
    assert other.rows == 0


def test_a_state_beyond_the_limit_is_restored_and_full() -> None:
    """A state of more rows than the table may have is taken over: its rows change, none is added.

    Each shard may store more than its share, so one shard that takes over from several may get
    more than the table's limit. It once refused the state, and no push of a stored row passed.
    """
    part, other = part_of(SGD(), rows=10), part_of(SGD(), rows=4)
    apply(part, gradient_of(range(10), 3))
    state = part.export(EMPTY, ())
    other.check_state(state)
    other.restore(state, EMPTY, ())
    other.check_room([gradient_of(range(10), 3)])
    with pytest.raises(Full, match="share of rows=4, got 1 new ones beyond 10"):
        other.check_room([gradient_of([3, 10], 3)])
    apply(part, gradient_of([9], 3))
    apply(other, gradient_of([9], 3))
    assert np.array_equal(other.export(EMPTY, ())[ROWS], part.export(EMPTY, ())[ROWS])
