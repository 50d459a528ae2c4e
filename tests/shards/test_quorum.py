"""The reports on fragments at one shard: quorum, grace, weights, averages, late reports."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shards import shard_state
from shards.aggregation import Average, Quorum, ServerHalf, StaleLimit
from shards.errors import BadInput
from shards.messages import Ack, AskedPart, Kind, Parked, Part, Pull, Push, Refusal, Weights
from shards.reports import Reports
from shards.resumed_state import resume_states
from shards.rules import Nesterov
from shards.schedules import Fixed
from shards.shard_state import WEIGHTS, array_name
from shards.spec import TableSpec
from shards.tables import DenseTable, Layout, TensorSpec, cut_evenly
from tests.support.shard_dsl import Said, Talk, as_bytes, leave, push, spec

FIRST = DenseTable(
    "first",
    (TensorSpec("a", (200,)), TensorSpec("b", (50,)), TensorSpec("mean", (3,), buffer=True)),
)
SECOND = DenseTable("second", (TensorSpec("c", (256,)),))
TABLES = {table.name: table for table in (FIRST, SECOND)}
RATE = 0.5

Floats = NDArray[np.float32]


def fragments(merge: Quorum, *workers: str, **options: Any) -> Talk:
    """A shard of two fragments at rate 0.5, which merges as `merge` says."""
    rate = Fixed(base_rate=RATE)
    tables = tuple(TableSpec(table, schedule=rate, **options) for table in TABLES.values())
    talk = Talk(tables=tables, merge=merge, bound=None, deltas=True)
    talk.enter(*workers)
    return talk


def report(
    talk: Talk,
    worker: str,
    seq: int,
    values: Floats,
    *,
    table: str = "first",
    **changes: Any,
) -> Said:
    """Send a report of a worker, of 8 tokens in 2 steps unless `changes` say otherwise."""
    part = Part(table, Kind.F4, 0, TABLES[table].size)
    plain = {"parts": [part], "tokens": 8, "window": 2, "read_version": talk.shard.version}
    message = push(worker, seq)
    fields = {name: getattr(message, name) for name in Push.__struct_fields__}
    return talk.say(Push(**fields | plain | changes), [values.tobytes()])


def pull(worker: str, table: str = "first") -> Pull:
    return Pull(50, "job", worker, 0, 1, 1, 0, [AskedPart(table)])


def flat(table: DenseTable, seed: int, scale: float = 1.0) -> Floats:
    """Random values in each tensor, zero in the padding."""
    dice, arena = np.random.default_rng(seed), table.empty()
    for view in table.views(arena).values():
        view[...] = scale * dice.standard_normal(view.shape)
    return arena


def weights(talk: Talk, table: str = "first") -> Floats:
    array: Floats = talk.shard.copy().arrays[array_name(table, WEIGHTS)]
    return array


def ack_of(said: Said) -> Ack:
    """The first answer, which must be an Ack."""
    _, ack = said[0]
    assert isinstance(ack, Ack), ack
    return ack


def average(reports: list[Floats], weights: list[float], kind: Average) -> NDArray[np.float64]:
    """The average of reports on the first table in float64, written from the formula."""
    total = np.zeros(FIRST.size)
    mean = np.average(np.array(reports, np.float64), axis=0, weights=weights)
    for tensor, start in zip(FIRST.tensors, FIRST.offsets, strict=True):
        where = slice(start, start + tensor.size)
        total[where] = mean[where]
        if kind is Average.MEAN or tensor.buffer:
            continue
        parts = [d[where].astype(np.float64) for d in reports]
        norms = [float(np.linalg.norm(part)) for part in parts]
        length = sum(w * n for w, n in zip(weights, norms, strict=True)) / sum(weights)
        directions = sum(
            w * part / n for w, part, n in zip(weights, parts, norms, strict=True) if n
        )
        norm = float(np.linalg.norm(directions))
        if norm > 1e-5 * sum(weights):
            total[where] = length * directions / norm
    return total


@pytest.mark.parametrize("kind", Average)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_a_merge_equals_the_formula(kind: Average, count: int) -> None:
    """With weights tokens^2 / window, for several tensors; one of the reports has not moved a
    tensor, and buffers take the mean."""
    workers = [f"w{number}" for number in range(count)]
    talk = fragments(Quorum(count, average=kind), *workers)
    reports, of_reports = [], []
    for number, worker in enumerate(workers):
        values = flat(FIRST, number, 10.0**-number)
        if number == count - 1:
            FIRST.views(values)["b"][...] = 0
        tokens, window = 64 + number, 1 + number
        ack = ack_of(report(talk, worker, 1, values, tokens=tokens, window=window))
        assert not ack.dropped
        reports.append(values)
        of_reports.append(tokens**2 / window)
    assert talk.shard.version == 1
    merged = average(reports, of_reports, kind)
    rate = np.full(FIRST.size, RATE)
    rate[FIRST.offsets[2] : FIRST.offsets[2] + 3] = 1  # a buffer takes all of it
    np.testing.assert_allclose(weights(talk), -rate * merged, rtol=2e-5, atol=1e-7)


def test_opposite_directions_fall_back_on_the_mean() -> None:
    """Directions that cancel leave rounding, not a step of noise: the weighted mean counts."""
    talk = fragments(Quorum(2, average=Average.RADIAL), "a", "b")
    values = flat(FIRST, 1)
    report(talk, "a", 1, values)
    report(talk, "b", 1, np.float32(-3) * values)
    where = slice(0, 200)
    np.testing.assert_allclose(weights(talk)[where], RATE * values[where], rtol=1e-5)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_radial_averages_keep_their_norm(count: int) -> None:
    """Of M random orthogonal reports of length 1 the mean has 1/sqrt(M); the radial average 1."""
    drawn = np.random.default_rng(count).standard_normal((200, count))
    reports = np.linalg.qr(drawn)[0].T.astype(np.float32)
    norms = {}
    for kind in Average:
        workers = [f"w{number}" for number in range(count)]
        talk = fragments(Quorum(count, average=kind), *workers)
        for worker, values in zip(workers, reports, strict=True):
            arena = FIRST.empty()
            FIRST.views(arena)["a"][:] = values
            report(talk, worker, 1, arena)
        norms[kind] = float(np.linalg.norm(weights(talk)[:200])) / RATE
    assert norms[Average.RADIAL] == pytest.approx(1, rel=1e-5)
    assert norms[Average.MEAN] == pytest.approx(count**-0.5, rel=1e-5)


def test_tables_of_the_mean() -> None:
    """A table that is named takes the mean, and keeps no directions."""
    merge = Quorum(1, average=Average.RADIAL, mean_tables=("second",))
    described = fragments(merge).shard.spec
    slots = {table.table.name: described.slots_of(table) for table in described.tables}
    assert slots == {"first": ("buffer", "directions"), "second": ("buffer",)}


# --- quorum and grace -----------------------------------------------------------------------------


def test_a_quorum_waits_for_the_grace_and_no_longer() -> None:
    """The grace is a share of the time of the overlapping steps. A pull of the reporter waits until
    then; one of another fragment does not."""
    talk = fragments(Quorum(1, overlap=4, grace=0.5), "a", "b", "c")
    talk.now = 1.0
    # Half the time of 4 steps of 0.4 s.
    said = report(talk, "a", 1, flat(FIRST, 1), steps=2, compute_s=0.8)
    assert not ack_of(said).dropped
    assert talk.shard.next_merge(talk.now) == pytest.approx(1.8)
    assert talk.say(pull("a")) == []
    ((_, other),) = talk.say(pull("a", "second"))
    assert isinstance(other, Weights)
    ((_, again),) = talk.say(pull("a"))
    assert isinstance(again, Parked)
    ((_, others),) = talk.say(pull("b"))
    assert isinstance(others, Weights), "who has not reported goes on from the last version"
    assert talk.tick(1.7) == []
    assert talk.shard.version == 0
    report(talk, "b", 1, flat(FIRST, 2), steps=1, compute_s=9.0)
    assert talk.shard.next_merge(talk.now) == pytest.approx(1.8), "b can wait longer than a"
    ((worker, answer),) = talk.tick(1.81)
    assert worker == "a"
    assert isinstance(answer, Weights)
    assert talk.shard.version == answer.version == 1
    assert talk.shard.next_merge(talk.now) is None


def test_a_tick_merges_only_what_has_ended() -> None:
    """A grace that still runs on one table outlasts that of another, and the end of a lease."""
    talk = fragments(Quorum(1, grace=0.5, overlap=4, average=Average.MEAN), "w", "v", "u")
    report(talk, "w", 1, flat(FIRST, 1), steps=2, compute_s=2.0)  # until 2
    report(talk, "w", 2, flat(SECOND, 2), table="second", steps=2, compute_s=6.0)  # until 6
    talk.shard.ledger.entries["u"].lease_until = 1.0
    talk.now = 1.0
    talk.shard.tick(talk.now)
    assert (talk.shard.version, len(talk.shard.ledger.active)) == (0, 2)
    for now, merged, end in ((1.9, 0, 2.0), (2.0, 1, 6.0), (5.9, 1, 6.0), (6.0, 2, None)):
        talk.shard.tick(now)
        assert (talk.shard.version, talk.shard.next_merge(now)) == (merged, end)


def test_when_all_have_reported_nobody_is_waited_for() -> None:
    """However long the grace; so with a size of all, and one above the number of workers."""
    for merge in (Quorum(1, overlap=100, grace=1), Quorum(None), Quorum(7)):
        talk = fragments(merge, "a", "b")
        report(talk, "a", 1, flat(FIRST, 1), compute_s=1.0)
        assert talk.shard.version == 0
        report(talk, "b", 1, flat(FIRST, 2), compute_s=1.0)
        assert talk.shard.version == 1


def test_who_leaves_or_dies_is_not_waited_for() -> None:
    """Its own report stays: it was acknowledged."""
    for ends in ("leave", "lease"):
        talk = fragments(Quorum(None), "a", "b")
        report(talk, "a", 1, flat(FIRST, 1))
        if ends == "leave":
            talk.say(leave("b"))
        else:
            talk.now = 8.0
            talk.shard.ledger.entries["a"].lease_until = 100.0
            talk.tick(11.0)
        assert talk.shard.version == 1
        np.testing.assert_allclose(weights(talk)[:200], -RATE * flat(FIRST, 1)[:200], rtol=1e-6)
    talk = fragments(Quorum(2), "a")
    report(talk, "a", 1, flat(FIRST, 1), compute_s=1.0)
    assert talk.shard.version == 1, "alone it is all that there are"
    talk = fragments(Quorum(2), "a", "b", "c")
    report(talk, "a", 1, flat(FIRST, 1))
    for worker in "abc":
        talk.say(leave(worker))
    assert talk.shard.version == 1


def test_times_that_are_none_leave_no_grace() -> None:
    """They are for the records: NaN or an endless time must not keep a round open for ever."""
    for wrong in (float("nan"), float("inf"), -5.0):
        talk = fragments(Quorum(1, overlap=4), "a", "b")
        report(talk, "a", 1, flat(FIRST, 1), compute_s=wrong)
        talk.tick(0.0)
        assert talk.shard.version == 1


# --- late reports ---------------------------------------------------------------------------------


def test_a_late_report_is_dropped_by_name() -> None:
    """It was made from weights that a merge has replaced. It counts as its worker's, its pull is
    answered at once with the new fragment, and reports on another fragment are not late. The worker
    learns by how much it was late."""
    talk = fragments(Quorum(1, grace=0), "a", "b")
    report(talk, "a", 1, flat(FIRST, 1))
    talk.tick(0.5)
    before = weights(talk).copy()
    talk.now = 0.75
    late = ack_of(report(talk, "b", 1, flat(FIRST, 2), read_version=0))
    assert late.dropped
    assert late.late_s == 0.75, "after the first report that was merged"
    np.testing.assert_array_equal(weights(talk), before)
    ((_, answer),) = talk.say(pull("b"))
    assert isinstance(answer, Weights)
    other = ack_of(report(talk, "b", 2, flat(SECOND, 3), table="second", read_version=0))
    assert not other.dropped
    status = talk.shard.status()
    assert (status.dropped, talk.shard.ledger.entries["b"].seq) == (1, 2)


def test_a_round_without_a_quorum_holds_no_late_worker() -> None:
    """It may need the late worker's next report: the third may be dead. With a quorum the merge
    comes within the grace, and the late worker gets it with the others."""
    talk = fragments(Quorum(2, overlap=4), *"abcde")
    report(talk, "a", 1, flat(FIRST, 1))
    report(talk, "b", 1, flat(FIRST, 2), compute_s=1.0)
    talk.tick(3.0)
    report(talk, "a", 2, flat(FIRST, 3), compute_s=1.0)
    assert ack_of(report(talk, "c", 1, flat(FIRST, 4), read_version=0)).dropped
    ((_, answer),) = talk.say(pull("c"))
    assert isinstance(answer, Weights)
    report(talk, "b", 2, flat(FIRST, 5), compute_s=1.0)
    assert ack_of(report(talk, "d", 1, flat(FIRST, 6), read_version=0)).dropped
    assert talk.say(pull("d")) == []
    answers = talk.tick(6.0)
    assert [(to, type(answer)) for to, answer in answers] == [("d", Weights)]


def test_a_repeated_late_report_is_named_as_dropped_again() -> None:
    """The first answer may have been lost with the shard that gave it; so a state has it, too. Once
    all shards have acknowledged the report, nobody repeats it and nothing is kept."""
    talk = fragments(Quorum(1, grace=0), "a", "b")
    report(talk, "a", 1, flat(FIRST, 1))
    talk.tick(0.5)
    report(talk, "b", 1, flat(FIRST, 2), read_version=0)
    report(talk, "b", 2, flat(SECOND, 3), table="second")
    later = fragments(Quorum(1, grace=0))
    frames = shard_state.encode(talk.shard.copy())
    later.shard.restore(shard_state.decode(as_bytes(frames))[0])
    for shard in (talk, later):
        for seq, dropped in ((1, True), (2, False)):
            ack = ack_of(report(shard, "b", seq, flat(FIRST, 2), read_version=0))
            assert (ack.duplicate, ack.dropped) == (True, dropped)
    report(talk, "b", 3, flat(FIRST, 2), acknowledged=2)
    assert talk.shard.ledger.entries["b"].dropped == ()


def test_a_second_report_from_the_same_weights_is_late() -> None:
    """It holds what the first one told: counted twice, the worker would move the fragment twice."""
    talk = fragments(Quorum(None), "a", "b")
    report(talk, "a", 1, flat(FIRST, 1))
    assert ack_of(report(talk, "a", 2, flat(FIRST, 1))).dropped
    report(talk, "b", 1, flat(FIRST, 1))
    np.testing.assert_allclose(weights(talk)[:200], -RATE * flat(FIRST, 1)[:200], rtol=1e-6)


def test_a_repetition_counts_once() -> None:
    talk = fragments(Quorum(2), "a", "b", "c")
    report(talk, "a", 1, flat(FIRST, 1))
    assert ack_of(report(talk, "a", 1, flat(FIRST, 1))).duplicate
    assert talk.shard.parameters.buffered == 1
    assert talk.shard.version == 0


# --- state ----------------------------------------------------------------------------------------


def test_open_reports_are_part_of_the_state() -> None:
    """A shard that takes over a state with open reports merges to the same bits, with the rule's
    slots, and knows which reports are late."""
    merge = Quorum(2, average=Average.RADIAL)
    talk = fragments(merge, "a", "b", "c", rule=Nesterov(0.9))
    for seq in (1, 2):
        for worker in "ab":
            report(talk, worker, seq, flat(FIRST, seq))
        talk.tick(0.0)
    report(talk, "c", 1, flat(SECOND, 5), table="second")
    frames = shard_state.encode(talk.shard.copy())
    other = fragments(merge, rule=Nesterov(0.9))
    other.shard.restore(shard_state.decode(as_bytes(frames))[0])
    for shard in (talk, other):
        assert ack_of(report(shard, "c", 2, flat(FIRST, 3), read_version=0)).dropped
        report(shard, "a", 3, flat(SECOND, 4), table="second")
        shard.tick(0.0)
    assert other.shard.version == 3
    assert other.shard.parameters.is_at(talk.shard.copy().arrays)


def test_a_resume_with_other_shards_merges_what_is_open() -> None:
    """Weights and norms belong to one shard's part, so no open report moves to another cut."""
    talk = fragments(Quorum(3), "a", "b", "c")
    report(talk, "a", 1, flat(SECOND, 1), table="second")
    state = talk.shard.copy()
    assert state.saved.reports["second"] == Reports(0, ["a"], [], 32.0, {})
    before = talk.shard.spec
    layout = Layout.of(table.table for table in before.tables)
    after = spec(
        tables=before.tables,
        merge=before.merge,
        bound=None,
        deltas=True,
        map=cut_evenly(layout, 2, before.map.epoch + 1),
    )
    resumed = resume_states([state], before.map, after)
    assert [part.saved.reports["second"] for part in resumed] == [Reports(1)] * 2
    joined = np.concatenate(
        [part.arrays["second/weights"] for part in resumed if "second/weights" in part.arrays]
    )
    np.testing.assert_allclose(joined[:256], -RATE * flat(SECOND, 1)[:256], rtol=1e-6)


# --- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": 0}, "tokens: expected at least 1, got 0"),
        ({"window": 0}, "window: expected at least 1, got 0"),
        (
            {"parts": [Part(t.name, Kind.F4, 0, t.size) for t in (FIRST, SECOND)]},
            "expected a report on one table, got 2",
        ),
    ],
)
def test_what_is_no_report_is_refused(changes: dict[str, Any], text: str) -> None:
    """Nothing of it is applied, and the worker's next report counts."""
    talk = fragments(Quorum(1), "a", "b")
    ((_, refusal),) = report(talk, "a", 1, flat(FIRST, 1), **changes)
    assert isinstance(refusal, Refusal)
    assert text in refusal.text
    assert talk.shard.parameters.buffered == 0
    assert not ack_of(report(talk, "a", 1, flat(FIRST, 1))).dropped


def test_a_push_for_other_shards_only_counts() -> None:
    """Its fragment is elsewhere: no version, nothing open."""
    talk = fragments(Quorum(1), "a", "b")
    message = push("a", 1)
    fields = {name: getattr(message, name) for name in Push.__struct_fields__}
    ack = ack_of(talk.say(Push(**fields | {"parts": []})))
    assert (ack.dropped, talk.shard.version, talk.shard.ledger.entries["a"].seq) == (False, 0, 1)
    assert talk.shard.next_merge(0.0) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"size": 0},
        {"size": 1.5},
        {"overlap": -1},
        {"grace": -0.1},
        {"grace": 2},
        {"average": "sum"},
    ],
)
def test_wrong_quorums(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"^quorum: {next(iter(wrong))}: expected"):
        Quorum(**wrong)


def test_a_quorum_takes_no_limit_on_staleness_and_no_rows() -> None:
    with pytest.raises(BadInput, match="on_stale"):
        ServerHalf(merge=Quorum(), stale=StaleLimit(1))
    with pytest.raises(BadInput, match="table users: expected a strategy that works with rows"):
        ServerHalf(merge=Quorum()).check_rows("users")


def test_extreme_reports_make_no_nan() -> None:
    """A weight that would overflow is refused; a tensor that hardly moved has no direction."""
    talk = fragments(Quorum(1, average=Average.RADIAL), "a")
    ((_, refusal),) = report(talk, "a", 1, flat(FIRST, 1), tokens=2**32, window=1)
    assert isinstance(refusal, Refusal)
    assert "expected tokens^2 / window of at most 1e+15" in refusal.text
    values = flat(FIRST, 1, 1e-25)
    values[0] = 1e-22
    assert not ack_of(report(talk, "a", 1, values, tokens=2**20)).dropped
    assert talk.shard.version == 1
    assert np.isfinite(weights(talk)).all()
