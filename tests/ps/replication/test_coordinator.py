"""The coordinator's rules, each in a scenario. Times are seconds; 1 s of silence means death."""

import pytest

from ps.replication.coordinator import Coordinator, Decision, ShardGroup
from shards.replication_messages import Beat, Configuration

P, B, C = 11, 12, 13  # boot numbers


def whole(shards: int = 1) -> Coordinator:
    """Shard 0 with primary P and backup B, in sync at time 0."""
    coordinator = Coordinator(shards, silence_s=1.0)
    coordinator.receive_beat(Beat(0, P, 0), 0.0)
    coordinator.receive_beat(Beat(0, P, 1), 0.0)
    coordinator.receive_beat(Beat(0, B, 0), 0.0)
    coordinator.receive_beat(Beat(0, P, 2), 0.0)
    coordinator.receive_beat(Beat(0, P, 2, in_sync=True), 0.0)
    assert coordinator.groups[0] == ShardGroup(Configuration(0, 2, P, B), in_sync=True)
    return coordinator


def bereaved() -> Coordinator:
    """Shard 0 with P alone: its backup B has been silent since time 0."""
    coordinator = whole()
    for now in (0.5, 1.0, 1.5):
        coordinator.receive_beat(Beat(0, P, 2, in_sync=True), now)
        coordinator.tick(now)
    coordinator.receive_beat(Beat(0, P, 3), 1.6)
    return coordinator


def told(decision: Decision) -> dict[int, tuple[Configuration, bool]]:
    return {boot: (word.configuration, word.confirmed) for boot, word in decision.assignments}


def test_the_first_process_is_the_primary_and_the_next_its_backup() -> None:
    """Each step is pending until the primary has accepted it."""
    coordinator = Coordinator(1, silence_s=1.0)
    first = coordinator.receive_beat(Beat(0, P, 0), 0.0)
    assert told(first) == {P: (Configuration(0, 1, P), False)}
    assert told(coordinator.receive_beat(Beat(0, P, 1), 0.0)) == {P: (Configuration(0, 1, P), True)}
    second = coordinator.receive_beat(Beat(0, B, 0), 0.0)
    pair = Configuration(0, 2, P, B)
    assert told(second) == {P: (pair, False), B: (pair, False)}
    assert told(coordinator.receive_beat(Beat(0, P, 2), 0.0)) == {P: (pair, True), B: (pair, True)}


def test_whatever_is_said_is_to_be_saved_first() -> None:
    """A decision that changes the record carries it; any other carries none."""
    coordinator = Coordinator(1, silence_s=1.0)
    assert coordinator.receive_beat(Beat(0, P, 0), 0.0).record == {
        0: ShardGroup(pending=Configuration(0, 1, P))
    }
    assert coordinator.receive_beat(Beat(0, P, 0), 0.1).record is None


def test_a_silent_primary_is_followed_by_its_backup() -> None:
    """A backup in sync is proposed, and serves when it has accepted."""
    coordinator = whole()
    coordinator.tick(0.5)
    coordinator.receive_beat(Beat(0, B, 2), 0.9)
    heir = Configuration(0, 3, B)
    assert told(coordinator.tick(1.1)) == {P: (Configuration(0, 2, P, B), True), B: (heir, False)}
    assert told(coordinator.receive_beat(Beat(0, B, 3), 1.2)) == {B: (heir, True)}


def test_a_broken_connection_is_as_good_as_silence() -> None:
    """The backup is proposed at once, and a beat that was in transit does not undo that."""
    coordinator = whole()
    heir = Configuration(0, 3, B)
    assert told(coordinator.report_death(P, 0.01)) == {
        P: (Configuration(0, 2, P, B), True),
        B: (heir, False),
    }
    coordinator.receive_beat(Beat(0, P, 2, in_sync=True), 0.02)
    assert coordinator.groups[0].pending == heir


def test_who_lives_although_its_connection_broke_is_heard_again() -> None:
    """Without a successor nothing changes; the death of an unknown process is ignored."""
    coordinator = Coordinator(1, silence_s=1.0)
    coordinator.receive_beat(Beat(0, P, 0), 0.0)
    coordinator.receive_beat(Beat(0, P, 1), 0.0)
    assert coordinator.report_death(P, 0.1) == Decision(None, [])
    assert coordinator.report_death(99, 0.1) == Decision(None, [])
    coordinator.receive_beat(Beat(0, P, 1), 0.2)
    assert told(coordinator.receive_beat(Beat(0, B, 0), 0.3))[B] == (
        Configuration(0, 2, P, B),
        False,
    )


def test_a_backup_that_is_not_in_sync_is_never_promoted() -> None:
    """The shard waits for its primary, however long."""
    coordinator = Coordinator(1, silence_s=1.0)
    for beat in (Beat(0, P, 0), Beat(0, P, 1), Beat(0, B, 0), Beat(0, P, 2)):
        coordinator.receive_beat(beat, 0.0)
    for now in (0.9, 1.8, 2.7):
        coordinator.receive_beat(Beat(0, B, 2), now)
        coordinator.tick(now)
    assert coordinator.groups[0] == ShardGroup(Configuration(0, 2, P, B))


def test_a_primary_that_never_accepted_leaves_the_last_holders_promotable() -> None:
    """B is proposed, and dies before it accepts; P, which was only cut off, is primary again."""
    coordinator = whole()
    coordinator.tick(0.4)
    coordinator.tick(0.8)
    coordinator.receive_beat(Beat(0, B, 2), 0.9)
    coordinator.tick(1.1)
    assert coordinator.groups[0].pending == Configuration(0, 3, B)
    coordinator.receive_beat(Beat(0, P, 2, in_sync=True), 1.5)
    coordinator.receive_beat(Beat(0, P, 2, in_sync=True), 2.0)
    coordinator.tick(2.0)
    assert coordinator.groups[0].pending == Configuration(0, 4, P)


def test_a_suspect_is_not_called_back_once_its_heir_has_accepted() -> None:
    """P returns, and learns that it is neither primary nor backup."""
    coordinator = whole()
    coordinator.tick(0.4)
    coordinator.tick(0.8)
    coordinator.receive_beat(Beat(0, B, 2), 0.9)
    coordinator.tick(1.1)
    coordinator.receive_beat(Beat(0, B, 3), 1.2)
    answer = coordinator.receive_beat(Beat(0, P, 2, in_sync=True), 1.3)
    assert told(answer)[P] == (Configuration(0, 3, B), True)
    assert coordinator.groups[0] == ShardGroup(Configuration(0, 3, B))


def test_a_late_beat_cannot_undo_in_sync() -> None:
    """Once reported in an epoch, in sync holds for the epoch."""
    coordinator = whole()
    coordinator.receive_beat(Beat(0, P, 2, in_sync=False), 0.1)
    assert coordinator.groups[0].in_sync


def test_in_sync_of_one_epoch_says_nothing_of_the_next() -> None:
    """A new backup is not promotable at first, whatever beats are still in transit."""
    coordinator = bereaved()
    coordinator.receive_beat(Beat(0, C, 0), 1.6)
    coordinator.receive_beat(Beat(0, P, 4), 1.6)
    coordinator.receive_beat(Beat(0, P, 2, in_sync=True), 1.7)
    assert coordinator.groups[0] == ShardGroup(Configuration(0, 4, P, C))


def test_a_process_that_had_a_part_is_no_spare() -> None:
    """Its state may be outdated, so only a fresh process may become a backup."""
    coordinator = bereaved()
    coordinator.receive_beat(Beat(0, B, 2), 1.6)
    assert coordinator.groups[0] == ShardGroup(Configuration(0, 3, P))
    assert coordinator.under_replicated(1.7) == [0]


@pytest.mark.parametrize("first", ["a tick", "its primary", "its backup", "another's death"])
@pytest.mark.parametrize("pause_s", [0.6, 50.0])
def test_silence_counts_only_while_the_coordinator_listens(first: str, pause_s: float) -> None:
    """After its own pause it suspects no copy, in whatever order their beats come.

    A copy that stays silent is suspected after a second of listening since its last beat.
    """
    coordinator = whole(shards=2)
    coordinator.receive_beat(Beat(1, C, 0), 0.0)
    coordinator.tick(0.5)
    now = 0.5 + pause_s
    match first:
        case "a tick":
            coordinator.tick(now)
        case "its primary":
            coordinator.receive_beat(Beat(0, P, 2, in_sync=True), now)
        case "its backup":
            coordinator.receive_beat(Beat(0, B, 2), now)
        case _:
            coordinator.report_death(C, now)
    coordinator.tick(now)
    assert coordinator.groups[0].pending is None
    coordinator.receive_beat(Beat(0, P, 2, in_sync=True), now)
    coordinator.receive_beat(Beat(0, B, 2), now)
    assert coordinator.groups[0].pending is None
    coordinator.receive_beat(Beat(0, P, 2, in_sync=True), now + 0.5)
    coordinator.tick(now + 0.9)
    assert coordinator.groups[0].pending is None
    coordinator.tick(now + 1.1)
    assert coordinator.groups[0].pending == Configuration(0, 3, P)


def test_a_restarted_coordinator_goes_on_from_its_record() -> None:
    """It gives the copies in its record time to beat, then decides as it would have before."""
    coordinator = Coordinator(1, silence_s=1.0, record=whole().groups)
    assert coordinator.tick(100.0).assignments == []
    coordinator.receive_beat(Beat(0, B, 2), 100.5)
    coordinator.tick(100.6)
    decision = coordinator.tick(101.1)
    assert told(decision)[B] == (Configuration(0, 3, B), False)
