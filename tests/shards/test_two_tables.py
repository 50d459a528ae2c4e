"""A shard with two tables of different rules: their pushes, subsets, rounds, state and resharding.

Table `a` has plain SGD at rate 1; table `b` has momentum at rate 0.5.
"""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cupy_kernels.backends import HOST
from shards import shard_state, wire_format
from shards.aggregation import ROUND, Buffer
from shards.gradient_guard import Guard
from shards.messages import (
    Ack,
    AskedPart,
    Export,
    Install,
    Installed,
    Kind,
    Part,
    Pull,
    PulledPart,
    Push,
    Remedy,
    Weights,
)
from shards.repartition import repartition
from shards.rules import Adam, Momentum
from shards.schedules import Fixed
from shards.shard import Shard
from shards.shard_state import ShardState
from shards.spec import ShardSpec, TableSpec
from shards.tables import DenseTable, Layout, TensorSpec, cut_evenly
from shards.transition_io import Arrival
from tests.support import shard_dsl
from tests.support.shard_dsl import Talk, as_bytes, blank, hello, join, refusal, spec

pytestmark = pytest.mark.usefixtures("on_host_and_device")

A = DenseTable("a", (TensorSpec("w", (256,)),))
B = DenseTable("b", (TensorSpec("w", (3,)),))
LAYOUT = Layout((A, B))
PARTS = {"a": Part("a", Kind.F4, 0, 256), "b": Part("b", Kind.F4, 0, 256)}
TABLES = (
    TableSpec(A, schedule=Fixed(base_rate=1.0)),
    TableSpec(B, rule=Momentum(0.5), schedule=Fixed(base_rate=0.5)),
)


def talk_of(*workers: str, **options: Any) -> Talk:
    talk = Talk(**{"tables": TABLES, "bound": None} | options)
    talk.enter(*workers or ("w",))
    return talk


def push(worker: str, seq: int, *tables: str, **changes: Any) -> Push:
    """A push of these tables, of both if none is named."""
    parts = [PARTS[name] for name in tables or "ab"]
    return replace(shard_dsl.push(worker, seq), parts=parts, **changes)


def gradient(table: str, value: float) -> bytes:
    """A frame: `value` in each float of a tensor, zero in the padding."""
    flat = np.zeros(256, np.float32)
    flat[: 3 if table == "b" else 256] = value
    return flat.tobytes()


def held(talk: Talk) -> tuple[float, float, float]:
    """The first weight of each table, and the first momentum of table b."""
    arrays = talk.shard.copy().arrays
    return tuple(float(arrays[name][0]) for name in ("a/weights", "b/weights", "b/history"))  # type: ignore[return-value]


def ack(seq: int, version: int, *, duplicate: bool = False) -> list[tuple[str, Ack]]:
    staleness = 0 if duplicate else version - 1
    return [("w", Ack(100 + seq, 0, 1, seq, version, staleness, duplicate))]


def test_a_push_of_both_tables_is_one_version() -> None:
    """Each table is updated by its own rule and rate; the clock, version and ack are one."""
    talk = talk_of()
    both = [gradient("a", 1), gradient("b", 2)]
    assert talk.say(push("w", 1), both) == ack(1, 1)
    assert held(talk) == (-1, -1, 1)
    assert talk.say(push("w", 2), both) == ack(2, 2)
    assert held(talk) == (-2, -2.5, 1.5)
    assert talk.shard.copy().saved.updates == {"a": 2, "b": 2}
    _, rows = talk.shard.metrics.since(0)
    assert rows["rate"].tolist() == [1.0, 1.0], "that of the first table"
    whole = (256 * 1.0 + 3 * 4.0) ** 0.5
    np.testing.assert_allclose(rows["gradient_norm"], whole, rtol=1e-6)
    assert rows["bytes"].tolist() == [2048, 2048]


def test_a_table_that_is_left_out_stays_as_it_is() -> None:
    """Neither weights nor slots change, and its updates do not count; an empty push only counts
    for the clock."""
    talk = talk_of()
    assert talk.say(push("w", 1, "b"), [gradient("b", 2)]) == ack(1, 1)
    assert held(talk) == (0, -1, 1)
    assert talk.say(push("w", 2, "a"), [gradient("a", 3)]) == ack(2, 2)
    assert held(talk) == (-3, -1, 1), "momentum does not go on by itself"
    assert talk.say(replace(push("w", 3), parts=[])) == ack(3, 3)
    assert held(talk) == (-3, -1, 1)
    assert talk.shard.copy().saved.updates == {"a": 1, "b": 1}
    assert talk.shard.ledger.entries["w"].clock == 3


def test_adam_corrects_by_the_updates_of_its_own_table() -> None:
    """A table that joins late has the bias correction of its first update."""
    tables = tuple(replace(one, rule=Adam(), schedule=Fixed(base_rate=0.1)) for one in TABLES)
    late, alone = talk_of(tables=tables), talk_of(tables=tables)
    for seq in range(1, 5):
        late.say(push("w", seq, "a"), [gradient("a", 1)])
    late.say(push("w", 5, "b"), [gradient("b", 1)])
    alone.say(push("w", 1, "b"), [gradient("b", 1)])
    for name in ("b/weights", "b/mean", "b/square_mean"):
        np.testing.assert_array_equal(
            late.shard.copy().arrays[name], alone.shard.copy().arrays[name]
        )


@pytest.mark.parametrize("bad", ["a", "b"])
def test_a_push_with_one_refused_part_changes_nothing(bad: str) -> None:
    """Not the other table, whichever is applied first, nor a slot; the refusal is counted."""
    talk = talk_of()
    talk.say(push("w", 1), [gradient("a", 1), gradient("b", 2)])
    before = held(talk)
    frames = [gradient(name, np.nan if name == bad else 1) for name in "ab"]
    said = refusal(talk.say(push("w", 2), frames))
    assert said.remedy is Remedy.BAD_INPUT
    assert said.text.startswith(f"push 2 of worker w: table {bad} holds NaN or infinity")
    assert (held(talk), talk.shard.version) == (before, 1)
    assert talk.shard.ledger.entries["w"].refused == 1
    assert talk.shard.copy().saved.updates == {"a": 1, "b": 1}
    assert talk.say(replace(push("w", 2), parts=[])) == ack(2, 2), "and the next push may follow"


def test_each_table_has_its_own_guard() -> None:
    """A norm is refused by the guard of its table; the smallest quarantine counts."""
    guards = (Guard(max_norm=16.0, quarantine_after=5), Guard(max_norm=1.0, quarantine_after=2))
    tables = tuple(replace(one, guard=guard) for one, guard in zip(TABLES, guards, strict=True))
    talk = talk_of(tables=tables)
    assert talk.say(push("w", 1, "a"), [gradient("a", 1)]) == ack(1, 1)
    for _ in range(2):
        said = refusal(talk.say(push("w", 2), [gradient("a", 1), gradient("b", 1)]))
        assert "table b has norm 1.732: expected at most 1 " in said.text
    said = refusal(talk.say(push("w", 2, "a"), [gradient("a", 1)]))
    assert said.text == "worker w is in quarantine: 2 of its gradients were refused"


@pytest.mark.parametrize(
    ("parts", "frames", "text"),
    [
        (
            [PARTS["a"], PARTS["a"]],
            2,
            "push 1: expected one part of table a, got a second",
        ),
        (
            [PARTS["a"], replace(PARTS["b"], table="c")],
            2,
            "push 1: expected parts of the tables a, b of shard 0, got one of c",
        ),
        ([PARTS["a"], PARTS["b"]], 1, "push 1: expected 2 frames, got 1"),
        (
            [PARTS["a"], replace(PARTS["b"], stop=128)],
            2,
            "push 1: expected keys [0, 256) of table b, got [0, 128)",
        ),
    ],
)
def test_parts_that_do_not_fit(parts: list[Part], frames: int, text: str) -> None:
    """The push is refused as a whole, before any part is applied."""
    talk = talk_of()
    sent = [gradient("a", 1), gradient("b", 1)][:frames]
    said = refusal(talk.say(replace(push("w", 1), parts=parts), sent))
    assert (said.remedy, said.text) == (Remedy.BAD_MESSAGE, text)
    assert (held(talk), talk.shard.version) == ((0, 0, 0), 0)


def test_a_duplicate_is_applied_to_neither_table() -> None:
    """Even one that names other tables: the number decides."""
    talk = talk_of()
    both = [gradient("a", 1), gradient("b", 2)]
    talk.say(push("w", 1), both)
    assert talk.say(push("w", 1), both) == ack(1, 1, duplicate=True)
    assert talk.say(push("w", 1, "b"), both[1:]) == ack(1, 1, duplicate=True)
    assert held(talk) == (-1, -1, 1)


def test_a_pull_of_some_tables() -> None:
    """The parts are in the order asked for, all of one version, each in its own encoding."""
    talk = talk_of()
    talk.say(push("w", 1), [gradient("a", 1), gradient("b", 2)])
    whole = Pull(12, "job", "w", 0, 1, 1, 1, [AskedPart("b", Kind.FP16), AskedPart("a")])
    assert talk.say(whole) == [
        (
            "w",
            Weights(
                *(12, 0, 1, 1, 1),
                [PulledPart("b", Kind.FP16, 0, 256), PulledPart("a", Kind.F4, 0, 256)],
                0.0,
            ),
        )
    ]
    halves, floats = talk.frames
    assert isinstance(halves, np.ndarray)
    assert isinstance(floats, np.ndarray)
    assert halves.view(np.float16)[:4].tolist() == [-1, -1, -1, 0]
    assert floats[:2].tolist() == [-1, -1]
    assert talk.say(replace(whole, parts=[])) == [("w", Weights(12, 0, 1, 1, 1, [], 0.0))]
    said = refusal(talk.say(replace(whole, parts=[AskedPart("c")])))
    assert said.text == "pull: expected tables among a, b of shard 0, got c"


def test_views_of_changes_are_by_table() -> None:
    """A worker may hold a view of one table, and need the other in full."""
    talk = talk_of()
    ask = Pull(12, "job", "w", 0, 1, 1, 0, [AskedPart(name, Kind.INT8) for name in "ab"])
    ((_, first),) = talk.say(ask)
    assert isinstance(first, Weights)
    assert [(part.kind, part.base, part.number) for part in first.parts] == [(Kind.F4, 0, 1)] * 2
    talk.say(push("w", 1), [gradient("a", 1), gradient("b", 2)])
    ((_, second),) = talk.say(
        replace(ask, parts=[AskedPart("a", Kind.INT8, False, 1), AskedPart("b", Kind.INT8)])
    )
    assert isinstance(second, Weights)
    assert [(part.kind, part.base, part.number) for part in second.parts] == [
        (Kind.INT8, 1, 2),
        (Kind.F4, 0, 2),
    ]


def test_a_round_is_the_mean_of_each_table_over_those_that_push_it() -> None:
    """A worker that leaves a table out is not counted in that table's mean."""
    talk = talk_of("w", "x", merge=ROUND, bound=0)
    assert talk.say(push("w", 1), [gradient("a", 2), gradient("b", 2)]) == []
    assert talk.say(push("x", 1, "a"), [gradient("a", 4)]) == [
        (name, Ack(101, 0, 1, 1, 1, 0, False)) for name in "wx"
    ]
    assert held(talk) == (-3, -1, 1)
    assert talk.shard.copy().saved.updates == {"a": 1, "b": 1}


def test_a_buffer_updates_the_tables_that_its_pushes_include() -> None:
    """Each table gets its sum divided by the size; one that no push includes stays as it is. The
    state has how many pushes each table's buffer holds."""
    if Talk.place != HOST:
        pytest.skip("the emulator has no sums of arrays")
    talk = talk_of(merge=Buffer(2))
    talk.say(push("w", 1), [gradient("a", 2), gradient("b", 2)])
    saved = talk.shard.copy().saved
    assert (saved.buffered, saved.collected, saved.version) == (1, {"a": 1, "b": 1}, 0)
    talk.say(push("w", 2, "a"), [gradient("a", 4)])
    assert held(talk) == (-3, -0.5, 0.5)
    for seq in (3, 4):
        talk.say(push("w", seq, "a"), [gradient("a", 2)])
    assert held(talk) == (-5, -0.5, 0.5)
    assert talk.shard.copy().saved.updates == {"a": 2, "b": 1}


def test_pushes_that_arrive_together_share_a_pass_only_where_all_rules_are_sums() -> None:
    """With momentum in one table they are applied one by one; each result is the same."""
    plain = tuple(replace(one, rule=TABLES[0].rule) for one in TABLES)
    for tables in (TABLES, plain):
        talk, apart = (talk_of("w", "x", tables=tables) for _ in range(2))
        arrivals = [
            (push("w", 1), [gradient("a", 1), gradient("b", 2)]),
            (push("x", 1, "b"), [gradient("b", 4)]),
        ]
        together = [Arrival(one.worker.encode(), one, frames) for one, frames in arrivals]
        acks = talk.heard(talk.shard.handle_together(together, 0.0))
        assert acks == [
            ("w", Ack(101, 0, 1, 1, 1, 0, False)),
            ("x", Ack(101, 0, 1, 1, 2, 1, False)),
        ]
        for one, frames in arrivals:
            apart.say(one, frames)
        for name, array in talk.shard.copy().arrays.items():
            np.testing.assert_array_equal(array, apart.shard.copy().arrays[name])
        assert talk.shard.copy().saved.updates == {"a": 1, "b": 2}


def test_a_state_of_two_tables_goes_to_another_life_whole() -> None:
    """Arrays are named by table; both lives then apply the same push alike. A state of other
    tables is refused."""
    first = talk_of()
    first.say(push("w", 1), [gradient("a", 1), gradient("b", 2)])
    first.say(push("w", 2, "b"), [gradient("b", 4)])
    first.say(Export(3, "job"))
    frames = as_bytes(first.frames)
    state, rest = shard_state.decode(frames)
    assert (list(state.arrays), rest) == (["a/weights", "b/weights", "b/history"], [])
    second = Talk(tables=TABLES, bound=None, installed=False)
    assert second.say(Install(1, "job", keep_workers=True), frames) == [
        ("operator", Installed(1, 0, 1, 2))
    ]
    for talk in (first, second):
        talk.say(hello("w"))
        talk.say(join("w"))
        assert talk.say(push("w", 3), [gradient("a", 1), gradient("b", 1)]) == [
            ("w", Ack(103, 0, 1, 3, 3, 2, False))
        ]
    assert held(first) == held(second)
    other = Talk(installed=False)
    assert "expected weights and the slots [] of rule SGD" in (
        refusal(other.say(Install(1, "job"), frames)).text
    )


def test_a_rolled_back_shard_has_both_tables_of_the_save() -> None:
    """Acknowledged pushes that the save lacks are lost for both tables, and not sent again."""
    talk = talk_of()
    talk.say(push("w", 1), [gradient("a", 1), gradient("b", 2)])
    saved, _ = shard_state.decode(as_bytes(shard_state.encode(talk.shard.copy())))
    talk.say(push("w", 2), [gradient("a", 1), gradient("b", 2)])
    later = Talk(tables=TABLES, bound=None, installed=False)
    later.shard.restore(saved)
    later.shard.roll_back(0.0)
    later.say(hello("w"))
    later.say(replace(join("w", clock=2), again=True, seq=2, step=2))
    assert held(later) == (-1, -1, 1)
    assert later.say(push("w", 3, "a"), [gradient("a", 1)]) == [
        ("w", Ack(103, 0, 1, 3, 2, 1, False))
    ]
    assert held(later) == (-2, -1, 1)


def shards_of(count: int, states: list[ShardState] | None = None) -> list[Shard]:
    """The shards of a map, with zeros or these states, each with worker w."""
    shard_map = cut_evenly(LAYOUT, count, epoch=count)
    made = []
    for number in range(count):
        own: ShardSpec = spec(tables=TABLES, map=shard_map, shard=number, bound=None)
        shard = Shard(own, 1, backend=Talk.place)
        shard.restore(states[number] if states else blank(spec=own))
        shard.handle(b"", hello("w"), (), 0.0)
        shard.handle(b"", join("w"), (), 0.0)
        made.append(shard)
    return made


def push_to(shards: list[Shard], seq: int, tables: str) -> None:
    """Push 1 to each float of these tables, to each shard its sections."""
    for shard in shards:
        sections = [
            one for one in shard.spec.layout.sections(shard.spec.keys) if one.table in tables
        ]
        parts = [Part(one.table, Kind.F4, one.keys.start, one.keys.stop) for one in sections]
        frames = [
            gradient(one.table, 1)[4 * one.keys.start : 4 * one.keys.stop] for one in sections
        ]
        epoch = shard.spec.map.epoch
        (answer,) = shard.handle(
            b"w", replace(push("w", seq), parts=parts, epoch=epoch), frames, 0.0
        )
        assert isinstance(answer.message, Ack), answer


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_two_tables_are_resharded_together(count: int) -> None:
    """From two shards to any number, some with sections of both tables, and back: weights, slots
    and the number of updates are those of a job that never moved."""
    moved, still = shards_of(2), shards_of(2)
    for shards in (moved, still):
        for seq, tables in enumerate(("ab", "b", "a"), 1):
            push_to(shards, seq, tables)
    for to, seq in ((count, 4), (2, 5)):
        states = repartition(
            [shard.copy() for shard in moved], LAYOUT, moved[0].spec.map, cut_evenly(LAYOUT, to)
        )
        assert [state.saved.updates for state in states] == [{"a": seq - 2, "b": seq - 2}] * to
        encoded = [shard_state.decode(as_bytes(shard_state.encode(one)))[0] for one in states]
        moved = shards_of(to, encoded)
        for shards in (moved, still):
            push_to(shards, seq, "ab")
    for one, other in zip(moved, still, strict=True):
        arrays = one.copy().arrays
        assert arrays.keys() == other.copy().arrays.keys()
        for name, array in other.copy().arrays.items():
            np.testing.assert_array_equal(arrays[name], array)


def test_the_header_of_many_tables_is_read_as_written() -> None:
    """A push names every table of a job with as many as there may be."""
    parts = [Part(f"table-{n}" * 8, Kind.SPARSE, 0, 2**40, True) for n in range(64)]
    wide = replace(push("w", 1), parts=parts)
    assert wire_format.decode_request(wire_format.encode(wide)) == wide
