"""Weighing, rounds with backup workers, buffers, and rules that need the weights a worker read."""

from typing import Any

import numpy as np
import pytest

from shards import shard_state, wire_format
from shards.aggregation import (
    EACH,
    WEIGHINGS,
    Buffer,
    Merge,
    Round,
    ServerHalf,
    StaleLimit,
    merge_of,
    stale_limit_of,
    weighing_of,
)
from shards.errors import BadInput
from shards.messages import Ack, Cut, Left, Quiesce, Refusal
from shards.repartition import repartition
from shards.resumed_state import resume_states
from shards.rules import DelayCompensation, Momentum
from shards.schedules import Fixed
from shards.tables import Layout, cut_evenly
from tests.support.shard_dsl import (
    REAL,
    TABLE,
    Talk,
    as_bytes,
    gradient,
    hello,
    join,
    leave,
    pull,
    push,
    served,
    spec,
)


def value(talk: Talk) -> float:
    """The weight that all tensors have."""
    (found,) = set(np.asarray(talk.shard.parameters.host_weights())[REAL].tolist())
    return float(found)


@pytest.mark.parametrize(
    ("name", "factors"),
    [
        ("constant", [1, 1, 1]),
        ("inverse", [1, 1, 1 / 3]),
        ("inverse_plus_one", [1, 1 / 2, 1 / 4]),
        ("inverse_root", [1, 1 / 2**0.5, 1 / 2]),
    ],
)
def test_a_push_counts_by_its_staleness(name: str, factors: list[float]) -> None:
    """Pushes of staleness 0, 1 and 3 move the weights by their factors, and acks say these."""
    assert [WEIGHINGS[name](t) for t in (0, 1, 3)] == factors
    talk = Talk(bound=None, weigh=name, scale=0.5)
    talk.enter("a", "b")
    ((_, first),) = talk.say(push("a", 1), gradient(8))
    ((_, second),) = talk.say(push("b", 1), gradient(8))
    talk.say(push("a", 2, read_version=2), gradient(0))
    ((_, third),) = talk.say(push("b", 2), gradient(8))
    assert isinstance(first, Ack)
    assert isinstance(second, Ack)
    assert isinstance(third, Ack)
    assert [ack.scale for ack in (first, second, third)] == [factor / 2 for factor in factors]
    assert [ack.staleness for ack in (first, second, third)] == [0, 1, 3]
    assert value(talk) == pytest.approx(-4 * sum(factors))
    assert talk.shard.metrics.since(0)[1]["scale"].tolist() == [
        *(factors[0] / 2, factors[1] / 2, 0.5, factors[2] / 2)
    ]


# --- limits on staleness --------------------------------------------------------------------------


@pytest.mark.parametrize("merge", [EACH, Buffer(1)])
@pytest.mark.parametrize("drop", [False, True])
def test_a_push_beyond_the_limit(merge: Merge, drop: bool) -> None:
    """Of pushes of staleness 0 to 3 those above 2 are scaled, or dropped: counted, and applied
    nowhere. A repetition is a duplicate, and another life of the shard decides the same."""
    talk = Talk(bound=None, merge=merge, stale=StaleLimit(2, drop=drop))
    talk.enter("a", "b")
    acks = list[Ack]()
    for read_version in (0, 0, 0, 0):
        ((_, ack),) = talk.say(push("a", len(acks) + 1, read_version=read_version), gradient(6))
        assert isinstance(ack, Ack)
        acks.append(ack)
    last = 0.0 if drop else 2 / 3
    assert [ack.staleness for ack in acks] == [0, 1, 2, 3]
    assert [ack.scale for ack in acks] == [1, 1, 1, last]
    assert [ack.dropped for ack in acks] == [False, False, False, drop]
    assert [ack.version for ack in acks] == [1, 2, 3, 3 + (not drop)]
    assert value(talk) == pytest.approx(-18 - 6 * last)
    status = talk.shard.status()
    assert (status.dropped, status.steps, status.samples) == (drop, 4, 64 * 4)
    ((_, again),) = talk.say(push("a", 4), gradient(6))
    assert isinstance(again, Ack)
    assert again.duplicate
    assert value(talk) == pytest.approx(-18 - 6 * last)


def test_what_is_not_finite_is_refused_before_it_is_dropped() -> None:
    """A broken worker is counted, however stale its pushes are."""
    talk = Talk(bound=None, stale=StaleLimit(1, drop=True))
    talk.enter("a", "b")
    for seq in (1, 2):
        talk.say(push("a", seq, read_version=seq - 1), gradient(1))
    ((_, refusal),) = talk.say(push("b", 1), gradient(float("nan")))
    assert isinstance(refusal, Refusal)
    assert "holds NaN" in refusal.text
    assert talk.shard.status().dropped == 0


def test_limits_as_text() -> None:
    assert stale_limit_of("on_stale", "wait") is None
    assert stale_limit_of("on_stale", "scale:4") == StaleLimit(4)
    assert stale_limit_of("on_stale", "drop:1") == StaleLimit(1, drop=True)
    for wrong in ("drop", "drop:0", "drop:x", "scale:-1", "wait:3", "", 3, "drop:" + "9" * 30):
        with pytest.raises(BadInput, match=r"^on_stale: expected wait, scale:AFTER or drop:AFTER"):
            stale_limit_of("on_stale", wrong)
    with pytest.raises(BadInput, match="expected wait for a strategy in rounds"):
        ServerHalf(merge=Round(), stale=StaleLimit(4))


# --- backup workers -------------------------------------------------------------------------------


def with_backups(*workers: str, backups: int = 1) -> Talk:
    talk = Talk(merge=Round(backups), bound=0)
    talk.enter(*workers)
    return talk


def test_a_round_does_not_wait_for_the_slowest() -> None:
    """The mean of the first two of three; the third's push is acknowledged as dropped."""
    talk = with_backups("a", "b", "c")
    assert talk.say(push("b", 1), gradient(2)) == []
    assert talk.say(push("a", 1), gradient(4)) == [
        ("a", Ack(101, 0, 1, 1, 1, 0, False)),
        ("b", Ack(101, 0, 1, 1, 1, 0, False)),
    ]
    assert value(talk) == -3
    assert talk.say(pull("a", 1)) == [served("a", 1)]
    assert talk.say(push("c", 1), gradient(99)) == [
        ("c", Ack(101, 0, 1, 1, 1, 1, False, scale=0.0, dropped=True))
    ]
    repeated = Ack(101, 0, 1, 1, 1, 0, True, dropped=True)
    assert talk.say(push("c", 1), gradient(99)) == [("c", repeated)]
    assert (talk.shard.version, value(talk)) == (1, -3)
    status = talk.shard.status()
    assert (status.dropped, status.duplicates, status.samples, status.steps) == (1, 1, 192, 3)
    rows = talk.shard.metrics.since(0)[1]
    assert rows["dropped"].tolist() == [0, 0, 1]
    assert rows["apply_version"].tolist() == [1, 1, 1]


def test_the_slowest_continues_from_the_new_weights() -> None:
    """A worker that was late by three rounds takes part in the next, by its own clock."""
    talk = with_backups("a", "b", "c")
    for seq in (1, 2, 3):
        for worker in "ab":
            talk.say(push(worker, seq, read_version=seq - 1), gradient(1))
    talk.say(push("c", 1), gradient(50))
    assert talk.say(pull("c", 1)) == [served("c", 3)]
    talk.say(push("c", 2, read_version=3), gradient(5))
    answers = talk.say(push("a", 4, read_version=3), gradient(1))
    assert [to for to, _ in answers] == ["a", "c"]
    assert value(talk) == -3 - 3
    assert talk.say(pull("a", 4)) == [served("a", 4)]


def test_a_departure_makes_the_round_smaller() -> None:
    """As many are left out as before, of those that are still there; one always counts."""
    talk = with_backups("a", "b", "c")
    assert talk.say(push("b", 1), gradient(2)) == []
    assert talk.say(leave("c")) == [
        ("c", Left(13, 0, 1)),
        ("b", Ack(101, 0, 1, 1, 1, 0, False)),
    ]
    talk = with_backups("a", backups=3)
    assert talk.say(push("a", 1), gradient(2)) == [("a", Ack(101, 0, 1, 1, 1, 0, False))]


# --- buffers --------------------------------------------------------------------------------------


def test_a_full_buffer_is_one_update() -> None:
    """Each push is acknowledged at once; the third makes the version, of the mean of all."""
    talk = Talk(merge=Buffer(3), bound=None, rule=Momentum(0.5))
    talk.enter("a", "b")
    assert talk.say(push("a", 1), gradient(3)) == [("a", Ack(101, 0, 1, 1, 1, 0, False))]
    assert talk.say(push("b", 1), gradient(6)) == [("b", Ack(101, 0, 1, 1, 1, 0, False))]
    assert (talk.shard.version, talk.shard.parameters.buffered, value(talk)) == (0, 2, 0)
    talk.say(push("a", 2), gradient(9))
    assert (talk.shard.version, talk.shard.parameters.buffered, value(talk)) == (1, 0, -6)
    for seq in (3, 4, 5):
        talk.say(push("a", seq, read_version=1), gradient(3))
    assert value(talk) == -6 - (3 + 3)
    assert talk.shard.metrics.since(0)[1]["apply_version"].tolist() == [1, 1, 1, 2, 2, 2]


def test_a_repetition_is_not_added_again() -> None:
    """A push in the buffer is in the ledger: repeated, it is a duplicate."""
    talk = Talk(merge=Buffer(2), bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(2))
    assert talk.say(push("a", 1), gradient(2)) == [("a", Ack(101, 0, 1, 1, 0, 0, True))]
    talk.say(push("a", 2), gradient(4))
    assert value(talk) == -3
    assert talk.shard.metrics.since(0)[1]["deduplicated"].tolist() == [0, 1]


@pytest.mark.parametrize("how", ["leave", "expire"])
def test_the_last_worker_empties_the_buffer(how: str) -> None:
    """While another trains it waits; then each push in it counts as it would in a full one."""
    talk = Talk(merge=Buffer(4), bound=None)
    talk.enter("a", "b")
    talk.say(push("a", 1), gradient(4))
    talk.say(push("a", 2), gradient(8))
    talk.say(leave("a"))
    assert (talk.shard.version, value(talk)) == (0, 0)
    if how == "leave":
        talk.say(leave("b"))
    else:
        talk.tick(100.0)
    assert (talk.shard.version, talk.shard.parameters.buffered, value(talk)) == (1, 0, -3)


def test_uneven_buffers_are_applied_before_another_number_of_shards_resumes() -> None:
    """A dead worker's last push is in one shard's buffer only: each key then gets what its own
    shard collected, and the next update comes after as many new pushes as a buffer holds."""
    layout = Layout((TABLE,))
    halves, whole = cut_evenly(layout, 2), cut_evenly(layout, 1)
    options: dict[str, Any] = {"merge": Buffer(4), "bound": None, "rule": Momentum(0.5)}
    states = []
    for shard, pushes in enumerate((2, 3)):
        talk = Talk(shard=shard, map=halves, **options)
        talk.enter("a")
        for seq in range(1, pushes + 1):
            keys, frame = talk.shard.spec.keys, np.full(talk.shard.size, 4, np.float32)
            talk.say(push("a", seq, start=keys.start, stop=keys.stop), [frame.tobytes()])
        states.append(talk.shard.copy())
    (state,) = resume_states(states, halves, spec(map=whole, **options))
    weights = state.arrays[f"{TABLE.name}/weights"]
    for keys, moved in zip(halves.ranges, (-2.0, -3.0), strict=True):
        assert set(weights[keys.start : keys.stop].tolist()) - {0.0} == {moved}  # 0: the padding
    assert (state.saved.buffered, set(state.saved.collected.values())) == (0, {0})
    assert state.saved.ledger.entries["a"].seq == 3
    same = resume_states(states, halves, spec(map=halves, **options))
    assert [one.saved.buffered for one in same] == [2, 3]


def test_a_refused_gradient_does_not_reach_the_buffer() -> None:
    """A value that is no number would stay in the sum for ever."""
    talk = Talk(merge=Buffer(2), bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(float("nan")))
    assert talk.shard.parameters.buffered == 0
    talk.say(push("a", 1), gradient(2))
    talk.say(push("a", 2), gradient(2))
    assert value(talk) == -2


def test_an_export_holds_the_buffer_and_does_not_change() -> None:
    """What is read from a shard stays as it was, while further pushes come in."""
    talk = Talk(merge=Buffer(3), bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(3))
    state = talk.shard.copy()
    talk.say(push("a", 2), gradient(3))
    assert (state.saved.buffered, state.saved.collected) == (1, {"net": 1})
    assert set(state.arrays["net/buffer"][REAL].tolist()) == {3}
    assert talk.shard.parameters.buffered == 2


def test_a_buffer_is_cut_with_the_weights() -> None:
    """Resharded in the middle, two buffered pushes and one more make the same update."""
    talk = Talk(merge=Buffer(3), bound=None)
    talk.enter("a")
    for seq in (1, 2):
        talk.say(push("a", seq), gradient(3))
    layout = Layout((TABLE,))
    one, two = cut_evenly(layout, 1), cut_evenly(layout, 2, epoch=2)
    halves = repartition([talk.shard.copy()], layout, one, two)
    assert [half.saved.buffered for half in halves] == [2, 2]
    (whole,) = repartition(halves, layout, two, one)
    again = Talk(merge=Buffer(3), bound=None)
    again.shard.restore(whole)
    again.say(hello("a", 1))
    again.say(join("a", incarnation=1))
    again.say(push("a", 3, incarnation=1), gradient(6))
    assert value(again) == -4


def test_a_quiesced_buffer_is_applied_on_request() -> None:
    """Only once every push up to the cut is in it; a repeated request changes nothing."""
    talk = Talk(merge=Buffer(3), bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(3))
    cut = wire_format.encode_state(Cut({"a": 2}))
    hold = Quiesce(7, "job", 60.0, 1, apply_buffer=True)
    talk.say(hold, [cut])
    assert (talk.shard.version, talk.shard.parameters.buffered, value(talk)) == (0, 1, 0)
    talk.say(push("a", 2), gradient(6))
    for _ in range(2):
        talk.say(hold, [cut])
        assert (talk.shard.version, talk.shard.parameters.buffered, value(talk)) == (1, 0, -3)


# --- versions by number ---------------------------------------------------------------------------


def compensated(versions: int = 3) -> Talk:
    talk = Talk(rule=DelayCompensation(0.5, versions), bound=None, schedule=Fixed(base_rate=0.5))
    talk.enter("a", "b")
    return talk


def test_a_late_gradient_meets_the_weights_it_was_computed_from() -> None:
    """w -= r * (g + L * g * g * (w - w_read)), where w_read is the version that the push names."""
    talk = compensated()
    talk.say(push("a", 1), gradient(2))  # 0 -> -1
    talk.say(push("a", 2, read_version=1), gradient(2))  # -1 -> -2
    talk.say(push("b", 1, read_version=1), gradient(2))  # read at -1, applied at -2
    assert value(talk) == -2 - 0.5 * (2 + 0.5 * 4 * (-2 + 1))
    talk.say(push("b", 2, read_version=3), gradient(0))
    talk.say(push("a", 3, read_version=0), gradient(2))  # version 0 is forgotten: version 1 counts
    assert value(talk) == -2 - 0.5 * (2 + 0.5 * 4 * (-2 + 1))


def test_past_versions_are_part_of_the_state() -> None:
    """A copy of the shard makes the same bits; it has as many versions as there were."""
    talk = compensated(versions=2)
    for seq in (1, 2, 3):
        talk.say(push("a", seq, read_version=seq - 1), gradient(seq))
    sent = as_bytes(shard_state.encode(talk.shard.copy()))
    state, _ = shard_state.decode(sent)
    assert list(state.arrays) == ["net/weights", "net/past.1", "net/past.2"]
    other = compensated(versions=2)
    other.shard.restore(state)
    for one in (talk, other):
        one.say(push("b", 1, read_version=1), gradient(3))
    assert (value(talk), talk.shard.version) == (value(other), 4)


def test_without_a_past_the_present_counts() -> None:
    """After an install the shard knows no earlier version."""
    talk = compensated()
    talk.say(push("a", 1), gradient(2))
    assert value(talk) == -1


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: weighing_of("weigh", "half"), "weigh: expected constant, inverse, .* got 'half'"),
        (lambda: merge_of("merge", "some"), r"merge: expected each, round, .* got 'some'"),
        (lambda: Buffer(0), "buffer: size: expected at least 1, got 0"),
        (lambda: Round(-1), "backups: expected at least 0, got -1"),
    ],
)
def test_wrong_choices_are_named(call: object, line: str) -> None:
    """One line: the argument, the known ones, what was found."""
    assert callable(call)
    with pytest.raises(BadInput, match=f"^{line}$"):
        call()
