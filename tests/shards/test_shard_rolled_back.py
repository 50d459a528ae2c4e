"""A shard that restarts from an older save: what it reports, and what it believes."""

from typing import Any

import msgspec
import numpy as np

from shards import shard_state
from shards.messages import Ack, AskRecords, Join, Joined, Records, Remedy, Welcome
from tests.support.shard_dsl import (
    Talk,
    as_bytes,
    gradient,
    hello,
    join,
    pull,
    push,
    refusal,
    served,
)


def rolled_back(former: Talk, **options: Any) -> Talk:
    """The next life of a shard, in the present state of the former one."""
    written, _ = shard_state.decode(as_bytes(shard_state.encode(former.shard.copy())))
    talk = Talk(installed=False, boot=5_000_000, **options)
    talk.shard.restore(written)
    talk.shard.roll_back(talk.now)
    return talk


def to(talk: Talk, message: Any, **changes: Any) -> Any:
    """The same message, addressed to this life."""
    return msgspec.structs.replace(message, boot=talk.shard.boot, **changes)


def test_pushes_that_were_lost_are_not_waited_for() -> None:
    """The Welcome says `rolled_back`, the Join reports the last acknowledged push, and the shard
    accepts the next. The lost pushes never come; a repetition of one is a duplicate."""
    former = Talk(bound=None)
    former.enter("w")
    former.say(push("w", 1), gradient(1))
    talk = rolled_back(former, bound=None)
    assert talk.say(hello("w")) == [
        ("w", Welcome(10, 0, 5_000_000, 1, 1, 1, 1, 10.0, rolled_back=True))
    ]
    talk.say(to(talk, join("w", 4), again=True, seq=4, step=40))
    ((_, applied),) = talk.say(to(talk, push("w", 5), step=50), gradient(1))
    ((_, known),) = talk.say(to(talk, push("w", 4)), gradient(1))
    assert isinstance(applied, Ack)
    assert isinstance(known, Ack)
    assert [(ack.version, ack.duplicate) for ack in (applied, known)] == [(2, False), (2, True)]
    entry = talk.shard.ledger.entries["w"]
    assert (entry.seq, entry.step, entry.clock) == (5, 50, 5)


def test_a_shard_that_was_not_rolled_back_believes_a_first_join_alone() -> None:
    """Whatever an admitted worker says later about acknowledged pushes, the shard reports a gap."""
    talk = Talk(bound=None)
    talk.enter("w")
    talk.say(msgspec.structs.replace(join("w"), again=True, seq=4, step=4))
    assert refusal(talk.say(push("w", 5), gradient(1))).expected == 1


def test_a_version_that_was_lost_may_have_been_read() -> None:
    """A push computed from a lost version counts as one that read the present version."""
    former = Talk(bound=None)
    former.enter("w")
    talk = rolled_back(former, bound=None)
    talk.enter("w")
    talk.say(to(talk, join("w")))
    ((_, ack),) = talk.say(to(talk, push("w", 1), read_version=7), gradient(1))
    assert isinstance(ack, Ack)
    assert (ack.version, ack.staleness) == (1, 0)
    assert refusal(former.say(push("w", 1, read_version=7), gradient(1))).remedy is (
        Remedy.BAD_MESSAGE
    )


def test_a_worker_counts_as_it_was_saved_until_it_comes_back() -> None:
    """What others have pushed raises no clock but their own: any number may follow one read."""
    former = Talk(bound=1)
    former.enter("w", "v")
    talk = rolled_back(former, bound=1)
    ledger = talk.shard.ledger
    talk.say(hello("w"))
    talk.say(to(talk, join("w", 5), again=True, seq=5, step=5))
    talk.say(to(talk, push("w", 6)), gradient(1))
    assert {name: e.clock for name, e in ledger.entries.items()} == {"w": 6, "v": 0}
    assert talk.say(to(talk, pull("w", 5))) == [], "v may have come to 0 only"
    assert ledger.clock_gap == 0, "nobody knows how far apart they are"
    talk.say(hello("v"))
    said = talk.say(to(talk, join("v", 4), again=True, seq=4, step=4))
    version = served("w", 1)[1]
    assert said[0] == ("v", Joined(11, 0, 5_000_000, 4))
    assert [(to_whom, type(message)) for to_whom, message in said[1:]] == [("w", type(version))]
    assert ledger.clock_gap == 2


def test_a_newcomer_waits_until_those_that_counted_are_back() -> None:
    """It is admitted at the clock that they have reached, not at the one that was saved."""
    former = Talk(bound=1)
    former.enter("w", "v")
    talk = rolled_back(former, bound=1)
    for worker in ("w", "n"):
        talk.say(hello(worker))
    talk.say(to(talk, join("w", 5), again=True, seq=5, step=5))
    assert talk.say(to(talk, join("n"))) == []
    talk.say(hello("v"))
    said = talk.say(to(talk, join("v", 4), again=True, seq=4, step=4))
    assert [(worker, m.clock) for worker, m in said if isinstance(m, Joined)] == [
        ("v", 4),
        ("n", 4),
    ]


def test_a_newcomer_waits_for_no_more_than_a_lease() -> None:
    """Those that died, or left after the save, do not come back."""
    former = Talk(bound=1)
    former.enter("w", "v")
    talk = rolled_back(former, bound=1)
    talk.say(hello("n"))
    assert talk.say(to(talk, join("n"))) == []
    said = talk.shard.expire(["w", "v"], talk.now)
    assert [(out.to, type(out.message)) for out in said] == [(b"n", Joined)]


def test_a_worker_that_counts_is_no_newcomer() -> None:
    """It has not heard yet that it was let in, and others may wait for it at other shards."""
    former = Talk(bound=1)
    former.enter("w", "v")
    talk = rolled_back(former, bound=1)
    talk.say(hello("w"))
    ((_, joined),) = talk.say(to(talk, join("w")))
    assert isinstance(joined, Joined)


def test_a_worker_that_was_admitted_is_admitted_again() -> None:
    """Even if this life does not know that the warm-up was over; a newcomer waits for it."""
    former = Talk(warm_steps=10)
    former.enter("w")
    talk = rolled_back(former, warm_steps=10)
    for worker in ("w", "v", "u"):
        talk.say(hello(worker))
    talk.say(to(talk, join("w"), again=True))
    assert talk.say(to(talk, join("u"))) == []
    ((_, joined),) = talk.say(to(talk, join("v", 3), again=True, seq=3, step=3))
    assert isinstance(joined, Joined)
    assert joined.clock == 3


def test_a_collector_of_records_misses_none() -> None:
    """Even if the former life has numbered more records than this one has pushes."""
    former = Talk(bound=None)
    former.enter("w")
    talk = rolled_back(former, bound=None)
    for seq in range(1, 9):
        former.say(push("w", seq), gradient(1))
    talk.enter("w")
    talk.say(to(talk, join("w"), again=True, seq=8, step=8))
    talk.say(to(talk, push("w", 9)), gradient(1))
    ((_, answer),) = talk.say(AskRecords(1, "job", 8))
    assert isinstance(answer, Records)
    (content,) = talk.frames
    assert isinstance(content, bytes)
    rows = talk.shard.metrics.since(0)[1]
    assert content == rows.tobytes()
    assert rows["seq"].tolist() == [9]
    assert rows["apply_version"].tolist() == [1]
    assert np.all(answer.first > 8)


def test_a_join_is_as_short_as_it_was() -> None:
    """The fields for shards that were rolled back have neutral defaults."""
    assert Join(1, "job", "w", 0, 1, 3) == Join(1, "job", "w", 0, 1, 3, False, 0, 0)


def test_an_incarnation_begins_after_pushes_that_other_shards_have() -> None:
    """A shard that lacks them skips them: it applies the next one, and counts their steps."""
    talk = Talk(bound=None)
    talk.enter("w")
    talk.say(push("w", 1), gradient(1))
    before = talk.shard.updates.steps
    step = talk.shard.ledger.entries["w"].step
    talk.say(hello("w", incarnation=1))
    talk.say(msgspec.structs.replace(join("w", incarnation=1), seq=4, step=step + 3))
    ((_, known),) = talk.say(push("w", 4, incarnation=1), gradient(1))
    ((_, applied),) = talk.say(push("w", 5, incarnation=1), gradient(1))
    assert isinstance(applied, Ack)
    assert isinstance(known, Ack)
    assert [(ack.version, ack.duplicate) for ack in (known, applied)] == [(1, True), (2, False)]
    assert talk.shard.updates.steps == before + 3 + 1
