"""A shard with a dense and a sparse table: pushes of both, runs, rounds, parked pulls, moves."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from shards import gate, shard_state
from shards.aggregation import ROUND
from shards.errors import BadInput
from shards.first_values import Uniform
from shards.messages import Ack, AskedPart, Export, Kind, Part, Push, Read, Refusal, Remedy, Weights
from shards.repartition import repartition
from shards.rules import SGD, Adagrad, RMSProp
from shards.schedules import Fixed
from shards.shard import Shard
from shards.shard_state import of_table
from shards.spec import TableSpec
from shards.tables import BUCKETS, DenseTable, Layout, SparseTable, TensorSpec, cut_evenly
from shards.transition_io import Arrival
from tests.support import shard_dsl
from tests.support.row_oracle import RowOracle
from tests.support.shard_dsl import Talk, as_bytes, pull, refusal

DENSE = DenseTable("net", (TensorSpec("w", (256,)),))
SPARSE = SparseTable("user", 2, Uniform(0.5), seed=3, rows=8)
RULE, RATE = Adagrad(), 0.5
TABLES = (
    TableSpec(DENSE, schedule=Fixed(base_rate=1.0)),
    TableSpec(SPARSE, RULE, Fixed(base_rate=RATE)),
)
NET, USER = Part("net", Kind.F4, 0, 256), Part("user", Kind.F4, 0, BUCKETS)
BOTH = [AskedPart("net"), AskedPart("user")]


def talk_of(*workers: str, **options: Any) -> Talk:
    talk = Talk(**{"tables": TABLES, "bound": None} | options)
    talk.enter(*workers or ("w",))
    return talk


def ids_frame(ids: Sequence[int]) -> bytes:
    return np.array(ids, np.uint64).tobytes()


def rows_of(ids: Sequence[int], seed: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((len(ids), 2)).astype(np.float32)


def rows_frame(value: float) -> bytes:
    """A frame of two rows of this value."""
    return np.full((2, 2), value, np.float32).tobytes()


ONES, TWO = np.ones(256, np.float32).tobytes(), rows_frame(1.0)


def push(
    worker: str, seq: int, ids: Sequence[int] | None, *, net: bool = True, **changes: Any
) -> tuple[Push, list[bytes]]:
    """A push of ones to the dense table and of `rows_of(ids, seq)`, or of one of the two."""
    parts = [NET] * net + ([] if ids is None else [USER])
    frames = [np.ones(256, np.float32).tobytes()] * net
    if ids is not None:
        frames += [ids_frame(ids), rows_of(ids, seq).tobytes()]
    return replace(shard_dsl.push(worker, seq), parts=parts, **changes), frames


def oracle(*pushes: tuple[int, Sequence[int]]) -> RowOracle:
    rows = RowOracle(SPARSE, RULE)
    for seq, ids in pushes:
        rows.push(np.array(ids, np.uint64), rows_of(ids, seq), RATE)
    return rows


def check(talk: Talk, rows: RowOracle, weight: float) -> None:
    """The shard holds these rows, and this weight everywhere in the dense table."""
    arrays = talk.shard.copy().arrays
    rows.check_state(of_table(arrays, "user"))
    assert (arrays["net/weights"] == weight).all()


def test_a_push_of_both_tables_is_one_version() -> None:
    """Weights and rows change in one transition; a pull has both, of that version."""
    talk = talk_of()
    ((_, ack),) = talk.say(*push("w", 1, [4, 9]))
    assert isinstance(ack, Ack)
    assert (ack.seq, ack.version) == (1, 1)
    check(talk, oracle((1, [4, 9])), -1)
    ((_, weights),) = talk.say(pull("w", 1, parts=BOTH), [ids_frame([4, 5])])
    assert isinstance(weights, Weights)
    assert weights.version == 1
    _, rows, stored = talk.frames
    assert isinstance(rows, np.ndarray)
    assert isinstance(stored, np.ndarray)
    assert np.array_equal(rows, oracle((1, [4, 9])).gather(np.array([4, 5], np.uint64)))
    assert stored.tolist() == [0b10000000]


def test_a_push_of_rows_alone_copies_no_dense_array() -> None:
    """Its version has the array of the version before, which a reader may still hold."""
    talk = talk_of()
    before = talk.shard.parameters.weights()
    talk.say(*push("w", 1, [4], net=False))
    assert talk.shard.parameters.weights() is before
    assert talk.shard.version == 1
    talk.say(*push("w", 2, None, net=False))
    assert talk.shard.parameters.weights() is before
    assert talk.shard.version == 2, "a push without parts counts"
    check(talk, oracle((1, [4])), 0)


def test_a_table_of_rows_leaves_the_dense_one_its_fused_pass() -> None:
    """Pushes of several workers that arrive together are applied in one pass, rows in order."""
    workers = ("a", "b", "c")
    talk = talk_of(*workers)
    pushes = [([4, 9], 1), ([9], 1), (None, 1)]
    arrivals = []
    for worker, (ids, seq) in zip(workers, pushes, strict=True):
        message, frames = push(worker, seq, ids)
        arrivals.append(Arrival(worker.encode(), message, frames))
    talk.heard(talk.shard.handle_together(arrivals, 0.0))
    _, records = talk.shard.metrics.since(0)
    assert records["pass_pushes"].tolist() == [3, 3, 3]
    assert talk.shard.version == 3
    check(talk, oracle((1, [4, 9]), (1, [9])), -3)


@pytest.mark.parametrize("bad", ["net", "user"])
def test_a_push_with_one_bad_table_changes_nothing(bad: str) -> None:
    """NaN in the weights' gradient or in the rows' refuses both, alone or in a run."""
    talk = talk_of("w", "v")
    message, frames = push("w", 1, [4])
    at = 0 if bad == "net" else 2
    frames[at] = np.full_like(np.frombuffer(frames[at], np.float32), np.nan).tobytes()
    said = refusal(talk.say(message, frames))
    assert said.remedy is Remedy.BAD_INPUT
    assert f"table {bad}" in said.text
    check(talk, oracle(), 0)
    good = Arrival(b"v", *push("v", 1, [5]))
    answers = talk.shard.handle_together([good, Arrival(b"w", message, frames)], 0.0)
    assert [type(answer.message) for answer in answers] == [Ack, Refusal]
    check(talk, oracle((1, [5])), -1)


BAD_PUSHES: list[tuple[list[Part], list[bytes], str]] = [
    ([NET, USER], [ONES, ids_frame([9, 4]), TWO], "expected them in strictly ascending order"),
    ([NET, USER], [ONES, ids_frame([4, 4]), TWO], "ascending order, got 4 after 4"),
    ([NET, USER], [ONES, ids_frame([4, 9])[:-1], TWO], "ids of 8 bytes, got 15 bytes"),
    (
        [NET, USER],
        [ONES, ids_frame([4, 9, 11]), TWO],
        "expected 3 rows of 2 floats as f4, 24 bytes",
    ),
    (
        [NET, USER],
        [ONES, ids_frame([4]), TWO],
        "expected 1 rows of 2 floats as f4, 8 bytes, got 16",
    ),
    ([NET, USER], [ONES, ids_frame([4, 9]), TWO[:-1]], "expected 2 rows of 2 floats as f4"),
    ([NET, USER], [ONES, ids_frame([4, 9])], "expected 3 frames, got 2"),
    ([NET, USER], [ONES, ids_frame([4, 9]), TWO, TWO], "expected 3 frames, got 4"),
    ([USER, USER], [ids_frame([4, 9]), TWO] * 2, "expected one part of table user, got a second"),
    ([USER, NET], [ONES, ids_frame([4, 9]), TWO], "user"),
    (
        [NET, replace(USER, kind=Kind.INT8)],
        [ONES, ids_frame([4, 9]), TWO],
        "as int8, 12 bytes, got 16",
    ),
    ([NET, replace(USER, zstd=True)], [ONES, ids_frame([4, 9]), TWO], "got f4 packed by zstd"),
    ([NET, replace(USER, stop=9)], [ONES, ids_frame([4, 9]), TWO], "expected buckets"),
    ([NET, replace(USER, table="item")], [ONES, ids_frame([4, 9]), TWO], "got one of item"),
    (
        [NET, USER],
        [ONES, ids_frame([4, 9]), rows_frame(np.inf)],
        "table user holds NaN or infinity",
    ),
    ([NET, USER], [ONES, ids_frame([4, 9]), rows_frame(1e30)], "table user has a norm beyond"),
]


@pytest.mark.parametrize(("parts", "frames", "text"), BAD_PUSHES)
def test_a_bad_push_takes_no_number(parts: list[Part], frames: list[bytes], text: str) -> None:
    """A push with frames that do not fit changes nothing, and the next one has its number."""
    talk = talk_of()
    talk.say(*push("w", 1, [4, 7]))
    message, _ = push("w", 2, None)
    said = refusal(talk.say(replace(message, parts=parts), frames))
    assert text in said.text
    assert "\n" not in said.text
    check(talk, oracle((1, [4, 7])), -1)
    ((_, ack),) = talk.say(*push("w", 2, [4, 9]))
    assert isinstance(ack, Ack)
    assert (ack.seq, ack.duplicate) == (2, False)
    check(talk, oracle((1, [4, 7]), (2, [4, 9])), -2)


def test_a_round_divides_by_all_its_pushes() -> None:
    """In a round's mean, rows that a push leaves out count as zero, also where it has no part."""
    talk = talk_of("a", "b", merge=ROUND, bound=0)
    talk.say(*push("a", 1, [4, 9]))
    talk.say(*push("b", 1, None))
    rows = RowOracle(SPARSE, RULE)
    rows.push(np.array([4, 9], np.uint64), rows_of([4, 9], 1) / np.float32(2), RATE)
    check(talk, rows, -1)


def test_a_full_table_refuses_the_push_whole() -> None:
    """A push with more new rows than there is room changes nothing, in a round as well."""
    talk = talk_of("a", "b")
    talk.say(*push("a", 1, range(8)))
    said = refusal(talk.say(*push("b", 1, [0, 77])))
    assert said.remedy is Remedy.FULL
    assert "table user: expected at most 8 rows" in said.text
    check(talk, oracle((1, range(8))), -1)
    assert talk.shard.ledger.entries["b"].refused == 0, "no fault of the worker"
    rounds = talk_of("a", "b", merge=ROUND, bound=0)
    assert rounds.say(*push("a", 1, range(6))) == []
    assert refusal(rounds.say(*push("b", 1, range(4, 9)))).remedy is Remedy.FULL


def test_a_parked_pull_keeps_its_ids() -> None:
    """What waits at the gate is answered for the ids it came with, copied from its message."""
    talk = talk_of("a", "b", bound=0)
    talk.say(*push("a", 1, [4]))
    frame = bytearray(ids_frame([4]))
    assert talk.shard.handle(b"a", pull("a", 1, parts=BOTH), [frame], 0.0) == []
    frame[:] = ids_frame([5])
    said = talk.say(*push("b", 1, None))
    assert any(isinstance(message, Weights) for _, message in said)
    assert np.array_equal(talk.frames[1], oracle((1, [4])).gather(np.array([4], np.uint64)))


def test_the_ids_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's parked pulls hold a bounded number of bytes; one more is refused."""
    monkeypatch.setattr(gate, "MAX_PARKED_BYTES", 20)
    talk = talk_of("a", "b", bound=0)
    for request in (12, 13):
        asks = pull("a", 1, request, parts=[AskedPart("user")])
        assert talk.say(asks, [ids_frame([request])]) == []
        assert len(talk.say(asks, [ids_frame([request])])) == 1, "a repetition waits already"
    said = refusal(talk.say(pull("a", 1, 14, parts=BOTH), [ids_frame([14])]))
    assert "worker a: expected at most 20 bytes of ids" in said.text


@pytest.mark.parametrize(
    ("parts", "frames", "text"),
    [
        (BOTH, [], "pull: expected 1 frames, got 0"),
        ([AskedPart("net")], [ids_frame([1])], "pull: expected 0 frames, got 1"),
        ([AskedPart("user")] * 2, [ids_frame([1])] * 2, "pull: expected each table at most once"),
        ([AskedPart("user")], [ids_frame([2, 1])], "strictly ascending order, got 1 after 2"),
        ([AskedPart("user", Kind.INT8)], [ids_frame([1])], "as f4, bf16, got int8"),
    ],
)
def test_a_pull_of_no_rows_is_refused(
    parts: list[AskedPart], frames: list[bytes], text: str
) -> None:
    """Frames that do not fit the parts, ids out of order, another encoding: one line each."""
    said = refusal(talk_of().say(pull("w", 0, parts=parts), frames))
    assert said.remedy is Remedy.BAD_MESSAGE
    assert text in said.text
    assert text in refusal(talk_of().say(Read(1, "job", parts), frames)).text


def test_a_read_of_rows_needs_no_worker() -> None:
    """An operator's Read with parts returns rows; without parts, the dense tables alone."""
    talk = talk_of()
    talk.say(*push("w", 1, [4]))
    talk.say(Read(1, "job", [AskedPart("user")]), [ids_frame([4])])
    assert np.array_equal(talk.frames[0], oracle((1, [4])).gather(np.array([4], np.uint64)))
    talk.say(Read(2, "job"))
    assert len(talk.frames) == 1


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_rows_move_by_bucket(shards: int) -> None:
    """A state cut for other shards and back is the same; each shard accepts its part."""
    talk = talk_of()
    ids = [1, 2, 3, 77, 2**63, 2**64 - 1]
    talk.say(*push("w", 1, ids))
    state = talk.shard.copy()
    spec = talk.shard.spec
    after = cut_evenly(spec.layout, shards, epoch=2)
    states = repartition([state], spec.layout, spec.map, after)
    for shard, part in enumerate(states):
        other = Shard(replace(spec, shard=shard, map=after), 1)
        other.parameters.check_state(part.arrays)
        other.restore(part)
    (back,) = repartition(states, spec.layout, after, spec.map)
    for name, array in state.arrays.items():
        assert np.array_equal(back.arrays[name], array), name


def test_a_state_travels_as_bytes() -> None:
    """The exported frames make the same shard elsewhere, as a copy and a log need it."""
    talk = talk_of()
    talk.say(*push("w", 1, [4, 9]))
    talk.say(Export(5, "job"))
    state, _ = shard_state.decode(as_bytes(talk.frames))
    other = Talk(tables=TABLES, bound=None, installed=False)
    other.shard.restore(state)
    check(other, oracle((1, [4, 9])), -1)


def test_a_strategy_with_a_buffer_of_its_own_is_refused() -> None:
    """A rule without rows is refused for a sparse table, and one of rows for a dense table."""
    with pytest.raises(BadInput, match="rule: expected a rule of sparse tables"):
        TableSpec(SPARSE, RMSProp())
    assert TableSpec(SPARSE, SGD()).rule == SGD()
    with pytest.raises(BadInput, match="pushed: expected one of f4, bf16, int8, got 'fp16'"):
        TableSpec(SPARSE, pushed=Kind.FP16)
    with pytest.raises(BadInput, match="pulled: expected one of f4, bf16, got 'int8'"):
        TableSpec(SPARSE, pulled=Kind.INT8)


def test_maps_cover_all_buckets() -> None:
    """Buckets are cut evenly, also where the arena is too small for all shards, or is none."""
    small, none = Layout((DENSE,), (SPARSE,)), Layout((), (SPARSE,))
    for layout in (small, none):
        for shards in (1, 7, 300):
            cut = cut_evenly(layout, shards)
            ends = [keys.stop for keys in cut.buckets]
            assert [keys.start for keys in cut.buckets] == [0, *ends[:-1]]
            assert ends[-1] == BUCKETS
            assert sum(map(len, cut.ranges)) == layout.size


def test_a_state_with_nan_is_taken_over() -> None:
    """A state has what its shard has: NaN in rows is taken over, as NaN in weights is."""
    talk = talk_of()
    talk.say(*push("w", 1, [4, 9]))
    state = talk.shard.copy()
    arrays = {name: array.copy() for name, array in state.arrays.items()}
    arrays["net/weights"][0] = arrays["user/rows"][0, 0] = np.nan
    shard = Shard(talk.shard.spec, boot=2)
    shard.parameters.check_state(arrays)
    shard.restore(replace(state, arrays=arrays))
    assert shard.parameters.is_at(arrays)
