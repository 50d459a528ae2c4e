"""Copies during a reshard: a successor has the progress that the primary had reported."""

import numpy as np
import pytest
from msgspec.structs import replace

from shards import shard_state, wire_format
from shards.aggregation import ROUND
from shards.ledger import Ledger, LedgerEntry
from shards.messages import (
    Ack,
    Cut,
    FromShard,
    HandedOver,
    HandOver,
    Install,
    Installed,
    Quiesce,
    Quiesced,
    Refusal,
    Remedy,
    Welcome,
)
from shards.shard_state import SavedProgress
from shards.shard_status import Standing
from tests.support.shard_copies import GRADIENT, Copies
from tests.support.shard_dsl import SIZE, as_bytes, blank, hello, push

HERE = b"here"


def refused(answer: FromShard) -> tuple[Remedy, str]:
    assert isinstance(answer, Refusal)
    return answer.remedy, answer.text


def hold(seconds: float = 60.0) -> Quiesce:
    return Quiesce(2, "job", seconds, 7)


def cut(**pushes: int) -> list[bytes]:
    return [wire_format.encode_state(Cut(pushes))]


WAITS = (Remedy.RETRY, "worker a: push 2 waits while the shards are quiesced")


@pytest.mark.parametrize("later", [False, True], ids=["replicated", "synchronised later"])
def test_a_successor_is_quiesced_where_its_predecessor_was(later: bool) -> None:
    """No push beyond the cut is applied for the full duration by the successor's clock."""
    group = Copies()
    group.pushed(1, "a", 1)
    (held,) = group.say(1, hold(), cut(a=1, b=1))
    assert isinstance(held, Quiesced)
    assert held.missing
    if later:
        group.configure(1, 3)
    successor = 3 if later else 2
    group.configure(successor, now=1000.0)
    for worker in "ab":
        (welcome,) = group.say(successor, hello(worker), now=1000.0)
        assert isinstance(welcome, Welcome)
        assert welcome.seq == (1 if worker == "a" else 0)
    assert refused(group.pushed(successor, "a", 2, now=1059.0)) == WAITS
    assert isinstance(group.pushed(successor, "b", 1, now=1059.0), Ack)
    assert isinstance(group.pushed(successor, "a", 2, now=1060.0), Ack)


def test_a_quiesce_is_not_reported_before_a_successor_would_keep_it() -> None:
    """A quiesce that the backup has not reported is not answered, and not in force there."""
    group = Copies()
    group.cut_off = {2}
    assert group.say(1, hold()) == []
    group.configure(2, now=10.0)
    group.say(2, hello("a"), now=10.0)
    assert isinstance(group.pushed(2, "a", 1, now=10.0), Ack)


@pytest.mark.parametrize("later", [False, True], ids=["replicated", "synchronised later"])
def test_a_successor_redirects_workers(later: bool) -> None:
    """It redirects to the shards its predecessor was given; another operator is refused."""
    group = Copies()
    group.say(1, hold())
    (answer,) = group.say(1, HandOver(3, "job", len(HERE), 7), [HERE])
    assert isinstance(answer, HandedOver)
    if later:
        group.configure(1, 3)
    successor = 3 if later else 2
    group.configure(successor, now=1000.0)
    effects = group.copies[successor].handle(b"a", hello("a"), (), 1000.0)
    assert [answer.frames for answer in effects.answers] == [(HERE,)]
    (again,) = group.say(successor, HandOver(3, "job", len(HERE), 7), [HERE], now=1000.0)
    assert isinstance(again, HandedOver)
    (other,) = group.say(successor, HandOver(4, "job", 5, 7), [b"there"], now=1000.0)
    assert refused(other)[1] == "hand over: shard 0 has handed over its part to others"


def test_no_worker_is_redirected_before_a_successor_would() -> None:
    """A handover that the backup has not reported shows in no answer, and dies with its copy."""
    group = Copies()
    group.say(1, hold())
    group.cut_off = {2}
    assert group.say(1, HandOver(3, "job", len(HERE), 7), [HERE]) == []
    assert group.say(1, hello("a")) == []
    group.configure(2, now=10.0)
    (welcome,) = group.say(2, hello("a"), now=10.0)
    assert isinstance(welcome, Welcome)
    assert refused(group.pushed(2, "a", 1, now=10.0))[0] is Remedy.RETRY, "it is still quiesced"


def test_a_round_beyond_the_cut_stays_open_at_a_new_copy() -> None:
    """It stays open when the other worker is restarted; both copies close it after the quiesce."""
    group = Copies(ROUND)
    group.say(1, push("a", 1), GRADIENT)
    group.say(1, hold())
    group.say(1, hello("b", 1))
    group.configure(1, 3)
    group.say(1, hello("b", 1))
    assert [group.copies[boot].shard.version for boot in (1, 3)] == [0, 0]
    group.say(1, hold(0.0))
    group.say(1, push("a", 1), GRADIENT)
    assert [group.copies[boot].shard.version for boot in (1, 3)] == [1, 1]


def test_a_successor_recognises_a_state_that_its_predecessor_installed() -> None:
    """An operator that got no answer repeats the Install, and learns that the shard has the state.

    If a worker has pushed since, a late copy is refused: it would undo that push.
    """
    state = replace(blank(), saved=SavedProgress(7, 7, 7, ledger()))
    given = as_bytes(shard_state.encode(state))
    group = Copies(given=(Install(1, "job", True), given))
    again = Install(2, "job", True)
    group.configure(2, 3, now=50.0)
    for _ in range(2):
        (installed,) = group.say(2, again, given, now=50.0)
        assert isinstance(installed, Installed)
        assert installed.version == 7
    for boot in (2, 3):
        shard = group.copies[boot].shard
        assert (shard.version, shard.ledger.cut) == (7, {"a": 7})
    other = [given[0], np.full(SIZE, 2, np.float32).tobytes()]
    text = "install: shard 0 serves workers by now; expected a fresh one"
    (answer,) = group.say(2, again, other, now=50.0)
    assert refused(answer) == (Remedy.GIVE_UP, text)
    group.say(2, hello("a"), now=50.0)
    assert isinstance(group.pushed(2, "a", 8, now=50.0), Ack)
    (answer,) = group.say(2, again, given, now=50.0)
    assert refused(answer) == (Remedy.GIVE_UP, text)


def ledger() -> Ledger:
    """The ledger of worker a, after 7 of its pushes were applied elsewhere."""
    return Ledger(
        {"a": LedgerEntry(0, seq=7, clock=7, step=7, standing=Standing.ACTIVE, admitted=True)}
    )
