"""What an operator changes of a job's settings while it trains, at one shard."""

from typing import Any

import pytest
from msgspec import structs

from shards.aggregation import ROUND, Buffer
from shards.errors import BadInput
from shards.live_settings import check_change, newest_settings, unify_settings
from shards.messages import (
    ChangeSettings,
    Install,
    LiveSettings,
    Quiesce,
    Remedy,
    SettingsInForce,
    Weights,
)
from shards.schedules import Step
from shards.spec import ShardSpec
from tests.support.shard_dsl import Talk, blank, fresh, gradient, pull, push, refusal, served, spec


def change(revision: int = 1, owner: int = 7, **settings: Any) -> ChangeSettings:
    """A change of a job with bound 1."""
    plain: dict[str, Any] = {"bound": 1, "revision": revision, "owner": owner}
    return ChangeSettings(20 + revision, "job", LiveSettings(**plain | settings))


def in_force(talk: Talk, message: ChangeSettings) -> SettingsInForce:
    """The answer to a change that lets no parked request pass."""
    ((_, reply),) = talk.say(message)
    assert isinstance(reply, SettingsInForce)
    return reply


def test_a_raised_bound_answers_the_pulls_that_wait() -> None:
    """Those that may pass now are answered with the change, and the others still wait."""
    talk = Talk(bound=0)
    talk.enter("a", "b")
    for seq in (1, 2, 3):
        talk.say(push("a", seq), gradient(1))
    assert talk.say(pull("a", 2, request=30)) == []
    assert talk.say(pull("a", 3, request=31)) == []
    talk.now = 4.0
    (answer, weights) = talk.say(change(bound=2))
    assert answer == ("operator", SettingsInForce(21, 0, 1, LiveSettings(2, 1.0, 1, 7), True))
    assert weights == served("a", 3, waited_s=4.0, request=30)
    assert list(talk.shard.gate.parked) == [("a", 31)]
    ((_, reply),) = talk.say(change(2, bound=None))[1:]
    assert isinstance(reply, Weights)


def test_a_lowered_bound_holds_from_the_next_pull() -> None:
    """A worker that is further ahead than the new bound waits, until the slowest has come nearer;
    the slowest itself never waits."""
    talk = Talk(bound=3)
    talk.enter("a", "b")
    for seq in (1, 2, 3):
        talk.say(push("a", seq), gradient(1))
    assert talk.say(pull("a", 3)) == [served("a", 3)]
    assert in_force(talk, change(bound=1)).changed
    assert talk.say(pull("a", 3)) == []
    for seq in (1, 2):
        assert talk.say(pull("b", seq - 1)) == [served("b", 2 + seq)]
        answers = talk.say(push("b", seq, read_version=3), gradient(1))
    assert [to for to, _ in answers] == ["b", "a"]


def test_a_factor_keeps_the_shape_of_a_schedule() -> None:
    """A policy that lowers the rate with the iteration continues from the changed rate, and the
    status and the records show it."""
    halving = Step(base_rate=1.0, gamma=0.5, step_size=1)
    talk = Talk(schedule=halving, workers=1, bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(1))
    assert in_force(talk, change(bound=None, rate_factor=4.0)).changed
    assert talk.shard.status().rate == 2.0
    talk.say(push("a", 2, read_version=1), gradient(1))
    talk.say(push("a", 3, read_version=2), gradient(1))
    assert talk.shard.metrics.since(0)[1]["rate"].tolist() == [1.0, 2.0, 1.0]
    assert talk.shard.parameters.weights()[0] == -(1.0 + 2.0 + 1.0)


def test_a_buffer_is_applied_at_the_rate_of_that_moment() -> None:
    """A push that was collected before the change is applied after it, at the new rate."""
    talk = Talk(merge=Buffer(2), bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(1))
    talk.say(change(bound=None, rate_factor=0.5))
    talk.say(push("a", 2), gradient(1))
    assert talk.shard.parameters.weights()[0] == -0.5


def test_a_late_or_repeated_change_changes_nothing() -> None:
    """The highest revision holds, and the answer says which settings that are."""
    talk = Talk()
    second = in_force(talk, change(2, bound=4)).settings
    for late in (change(2, bound=4), change(1, bound=9), change(2, owner=8, bound=5)):
        found = in_force(talk, late)
        assert (found.settings, found.changed) == (second, False)
    assert talk.shard.gate.bound == 4


def test_a_late_copy_of_the_install_keeps_the_change() -> None:
    """Before any worker has come, the first state may arrive again; the change stays in force."""
    talk = Talk()
    in_force(talk, change(bound=4))
    talk.say(Install(1, "job"), fresh(version=3))
    assert talk.shard.version == 3
    assert (talk.shard.part.settings.bound, talk.shard.gate.bound) == (4, 4)


def test_a_quiesced_shard_changes_later() -> None:
    """What an operator exports meanwhile would lack the change, so its author has to ask again."""
    talk = Talk()
    talk.say(Quiesce(2, "job", 60.0, 3))
    talk.now = 20.0
    found = in_force(talk, change(bound=4))
    assert (found.changed, found.busy_s, found.settings.bound) == (False, 40.0, 1)
    talk.say(Quiesce(3, "job", 0.0, 3))
    assert in_force(talk, change(bound=4)).changed


def test_an_empty_shard_changes_later() -> None:
    """A copy of it would be empty, too, and lack the change."""
    found = refusal(Talk(installed=False).say(change(bound=4)))
    assert found.remedy is Remedy.RETRY


@pytest.mark.parametrize(
    ("options", "settings", "error"),
    [
        ({"merge": ROUND, "bound": 0}, {"bound": 1}, "expected 0, as pushes are merged in rounds"),
        ({"least_bound": 3, "bound": 4}, {"bound": 2}, "expected at least 3, below which workers"),
        ({"least_bound": None, "bound": None}, {"bound": 9}, "expected none, as the strategy has"),
        ({"local_rate": True}, {"rate_factor": 0.5}, "rate factor: expected 1, as workers of"),
        ({"local_rate": True, "rate_factor": 2.0}, {}, "rate factor: expected 2, as workers of"),
    ],
)
def test_what_the_job_cannot_follow_is_refused(
    options: dict[str, Any], settings: dict[str, Any], error: str
) -> None:
    """The error names the setting and what is possible; nothing changes."""
    talk = Talk(**options)
    before = talk.shard.part.settings
    found = refusal(talk.say(change(**settings)))
    assert (found.remedy, error in found.text) == (Remedy.BAD_INPUT, True), found.text
    assert talk.shard.part.settings == before


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ({"merge": ROUND, "bound": 0}, {"bound": 0, "rate_factor": 0.5}),
        ({"least_bound": 3, "bound": 4}, {"bound": None}),
        ({"local_rate": True, "rate_factor": 2.0}, {"bound": 9, "rate_factor": 2.0}),
    ],
)
def test_what_the_job_can_follow_is_followed(
    options: dict[str, Any], settings: dict[str, Any]
) -> None:
    """A round may change its rate, a window its bound."""
    assert in_force(Talk(**options), change(**settings)).changed


def test_workers_that_push_differences_have_applied_the_factor() -> None:
    """The shard applies a difference of weights as it is, whatever the job's factor."""
    talk = Talk(deltas=True, local_rate=True, rate_factor=0.5, bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(1))
    assert talk.shard.parameters.weights()[0] == -1.0


def test_a_copy_has_the_changed_settings() -> None:
    """They are part of the state; a shard of the same spec that restores it trains with them."""
    talk = Talk()
    in_force(talk, change(bound=4, rate_factor=0.5))
    other = Talk(installed=False, boot=2)
    other.shard.restore(talk.shard.copy())
    assert other.shard.part.settings == LiveSettings(4, 0.5, 1, 7)
    assert (other.shard.gate.bound, other.shard.status().rate) == (4, 0.5)
    assert Talk().shard.copy().saved.settings is None


def saved_with(own: ShardSpec, *settings: LiveSettings | None) -> list[Any]:
    """States of shards that were saved with these settings, one each."""
    plain = blank(spec=own)
    return [
        structs.replace(plain, saved=structs.replace(plain.saved, settings=one)) for one in settings
    ]


def test_saved_states_agree_on_the_newest_settings() -> None:
    """A change that had reached one shard only is in force at all shards of a resumed job."""
    newest = LiveSettings(4, 0.5, 2, 7)
    states = unify_settings(saved_with(spec(), None, newest, LiveSettings(2, 1.0, 1, 7)), spec())
    assert [state.saved.settings for state in states] == [newest] * 3
    assert newest_settings(states) == newest


def test_settings_that_another_strategy_cannot_follow_are_dropped() -> None:
    """A job that is resumed with rounds has bound 0, whatever was in force before."""
    rounds = spec(merge=ROUND, bound=0)
    with pytest.raises(BadInput):
        check_change(rounds, LiveSettings(4, revision=1))
    (state,) = unify_settings(saved_with(rounds, LiveSettings(4, revision=1)), rounds)
    assert state.saved.settings is None
