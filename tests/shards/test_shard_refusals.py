"""Invalid messages: each is refused in one line, with its remedy, and changes nothing."""

from typing import Any

import msgspec
import pytest

from shards.errors import BadMessage
from shards.job_ids import digest_of
from shards.messages import (
    LONGEST_TEXT,
    MAX_IN_FLIGHT,
    MAX_STEPS,
    PROTOCOL,
    Ack,
    Describe,
    Joined,
    Refusal,
    Remedy,
)
from shards.refusals import refusal as refusal_of
from shards.schema_digest import SCHEMA
from tests.support.shard_dsl import (
    SIZE,
    Said,
    Talk,
    gradient,
    hello,
    join,
    leave,
    pull,
    push,
    refusal,
    served,
)

pytestmark = pytest.mark.usefixtures("on_host_and_device")


@pytest.mark.parametrize(
    ("changes", "frames", "remedy", "text"),
    [
        (
            {"job": "jab-77"},
            None,
            Remedy.BAD_MESSAGE,
            "shard 0 serves another job than jab-6c76b8db31fa26de",
        ),
        (
            {"table": "ten"},
            None,
            Remedy.BAD_MESSAGE,
            ("push 1: expected parts of the tables net of shard 0, got one of ten"),
        ),
        ({"boot": 2}, None, Remedy.RESYNCHRONISE, "shard 0 is incarnation 1, the message is for 2"),
        ({"epoch": 9}, None, Remedy.RESYNCHRONISE, "shard 0 is at map epoch 1, the message at 9"),
        (
            {"stop": 512},
            None,
            Remedy.BAD_MESSAGE,
            f"push 1: expected keys [0, {SIZE}) of table net, got [0, 512)",
        ),
        (
            {"read_version": 1},
            None,
            Remedy.BAD_MESSAGE,
            "push 1 of worker w was computed from version 1; shard 0 is at 0",
        ),
        ({}, [], Remedy.BAD_MESSAGE, "push 1: expected 1 frames, got 0"),
        ({}, [b""] * 1000, Remedy.BAD_MESSAGE, "push 1: expected 1 frames, got 1000"),
        (
            {},
            [bytes(12)],
            Remedy.BAD_MESSAGE,
            f"push 1: keys [0, {SIZE}) as f4 take {4 * SIZE} bytes, got 12",
        ),
        (
            {"loss": float("nan")},
            gradient(float("inf")),
            Remedy.BAD_INPUT,
            (
                "push 1 of worker w: table net holds NaN or infinity: expected finite gradients"
                " (loss nan); is the rate too high?"
            ),
        ),
    ],
)
def test_a_push_that_does_not_fit(
    changes: dict[str, Any], frames: list[bytes] | None, remedy: Remedy, text: str
) -> None:
    """An invalid push is refused in one line with the expected and the found value."""
    talk = Talk()
    talk.enter("w")
    said = refusal(talk.say(push("w", 1, **changes), gradient(1) if frames is None else frames))
    assert said == Refusal(101, 0, 1, remedy, text)
    assert talk.shard.status().refused == 1
    assert (talk.shard.version, talk.shard.ledger.entries["w"].seq) == (0, 0)
    assert talk.say(push("w", 1), gradient(1)) == [("w", Ack(101, 0, 1, 1, 1, 0, False))]


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"protocol": 99}, f"expected protocol {PROTOCOL}, got protocol 99"),
        (
            {"schema": "other"},
            f"expected schema {SCHEMA} of protocol {PROTOCOL}, got schema other",
        ),
    ],
)
def test_another_protocol_or_schema_is_refused(changes: dict[str, Any], difference: str) -> None:
    """A Hello or Describe of other messages is refused with both sides' protocol or schema."""
    said = refusal(Talk().say(hello("w", **changes)))
    assert (said.remedy, said.text) == (Remedy.MISMATCH, f"shard 0: {difference} of worker w")
    asked = msgspec.structs.replace(Describe(9, "job", PROTOCOL, SCHEMA), **changes)
    said = refusal(Talk().say(asked))
    assert (said.remedy, said.text) == (Remedy.MISMATCH, f"shard 0: {difference}")


def test_before_the_weights_are_there() -> None:
    """A Hello before the Install is refused with the remedy to retry."""
    said = refusal(Talk(installed=False).say(hello("w")))
    assert said.remedy is Remedy.RETRY
    assert said.text == "shard 0 has no weights yet: give all shards theirs by AdminClient.install"


def test_a_refusal_is_one_short_line() -> None:
    """Whatever names the sender chose; and the job's id is not revealed to a stranger."""
    job = "jib\njab\r" * 12 + "-7"
    said = refusal(Talk().say(hello("w", job=job)))
    named = " ".join(["jib jab"] * 12)
    assert said.text == f"shard 0 serves another job than {named} -{digest_of(job)}"
    said = refusal_of(1, 0, 1, BadMessage(f"expected {'word ' * LONGEST_TEXT}"))
    assert len(said.text) == LONGEST_TEXT


def test_a_false_clock_within_the_limit_holds_back_nobody() -> None:
    """The bound of the others is among themselves. A worker that joins after the liar has been
    alone begins at its clock, and the bound counts on from there.
    """
    most = MAX_IN_FLIGHT * MAX_STEPS
    talk = Talk(bound=1)
    talk.enter("a", "b")
    talk.say(hello("liar"))
    ((_, admitted),) = talk.say(join("liar", most))
    assert isinstance(admitted, Joined)
    assert admitted.clock == most
    talk.say(push("a", 1), gradient(0))
    assert talk.say(pull("a", 1)) == [served("a", 1)], "b is one step behind, as the bound allows"
    talk.say(push("a", 2), gradient(0))
    assert talk.say(pull("a", 2)) == [], "b is two steps behind"
    assert talk.say(push("b", 1), gradient(0))[1:] == [served("a", 3)]
    for worker in ("a", "b"):
        talk.say(leave(worker))
    for worker in ("c", "d"):
        talk.say(hello(worker))
        ((_, admitted),) = talk.say(join(worker))
        assert isinstance(admitted, Joined)
        assert admitted.clock == most
    talk.say(leave("liar"))  # until then it counts as any worker that makes no step
    talk.say(push("c", 1, clock=most + 2), gradient(0))
    assert talk.say(pull("c", most + 2)) == [], "d is two steps behind"
    assert len(talk.say(push("d", 1, clock=most + 1), gradient(0))) == 2


def test_pushes_and_steps_that_no_worker_can_have_made() -> None:
    """A Join counts the pushes that the shard lacks as made, with their steps: no more pushes than
    can be on their way to it, and no more steps than these can stand for. After a rollback more
    pushes may be missing.
    """
    talk = Talk(bound=None)
    talk.enter("a")
    talk.say(push("a", 1), gradient(0))

    def join_after(seq: int, step: int, incarnation: int) -> Said:
        talk.say(hello("a", incarnation))
        claim = msgspec.structs.replace(join("a", incarnation=incarnation), seq=seq, step=step)
        return talk.say(claim)

    error = refusal(join_after(MAX_IN_FLIGHT + 2, 5, 1))
    assert (error.remedy, error.text) == (
        Remedy.BAD_MESSAGE,
        "worker a: expected to continue after push 1025 at most, got 1026",
    )
    error = refusal(join_after(3, 2 + 2 * MAX_STEPS, 1))
    assert error.text == (
        f"worker a: expected at most {2 * MAX_STEPS} steps in 2 pushes after step 1,"
        f" got step {2 + 2 * MAX_STEPS}"
    )
    assert talk.shard.updates.steps == 1
    ((_, admitted),) = join_after(3, 1 + 2 * MAX_STEPS, 1)
    assert isinstance(admitted, Joined)
    assert talk.shard.updates.steps == 1 + 2 * MAX_STEPS
    talk.shard.roll_back(0.0)
    most = 3 + MAX_IN_FLIGHT * MAX_STEPS
    assert refusal(join_after(most + 1, 1 + 2 * MAX_STEPS, 2)).remedy is Remedy.BAD_MESSAGE
    ((_, admitted),) = join_after(most, 1 + 2 * MAX_STEPS, 2)
    assert isinstance(admitted, Joined)


def test_a_clock_that_no_worker_can_have_reached() -> None:
    """A worker that claims one is refused, at its Join and at a push, and no later worker inherits
    it; a worker that is ahead by no more than the pushes on their way is admitted."""
    talk = Talk(bound=2)
    talk.say(hello("liar"))
    error = refusal(talk.say(join("liar", 2**62)))
    assert error.remedy is Remedy.BAD_MESSAGE
    assert error.text == (
        "worker liar: expected a clock of at most 16777216 more than the fastest worker's, 0,"
        f" got {2**62}"
    )
    talk.say(join("liar", 5))
    assert refusal(talk.say(push("liar", 1, clock=2**62), gradient(1))).text.startswith(
        "worker liar: expected a clock of at most"
    )
    talk.say(hello("late"))
    ((_, admitted),) = talk.say(join("late"))
    assert isinstance(admitted, Joined)
    assert admitted.clock == 5
