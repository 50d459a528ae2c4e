"""Slots that are read while pushes continue: copied ahead, in pieces, or all at once."""

import random

import numpy as np
import pytest
from numpy.typing import NDArray

from cupy_kernels import backends
from shards import dense_part
from shards.messages import Export
from shards.rules import RULES, Adam, Decay, Rule
from tests.support.shard_dsl import SIZE, Talk, as_bytes, gradient, push

WITH_SLOTS = [rule for rule in RULES.values() if rule.slot_names]
SEED = 2012


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the size of pieces so that each slot has several, the last one smaller."""
    assert SIZE % 50
    monkeypatch.setattr(dense_part, "_PIECE", 50)


def exported(talk: Talk) -> list[NDArray[np.float32]]:
    talk.say(Export(1, "job"))
    return [frame for frame in talk.frames if isinstance(frame, np.ndarray)]


def prepare(talk: Talk, most: int = 1000) -> int:
    """Let the shard use at most `most` idle moments; return the number that it used."""
    for used in range(most):
        if talk.shard.is_prepared:
            return used
        talk.shard.prepare()
    return most


@pytest.mark.parametrize("rule", WITH_SLOTS, ids=lambda rule: rule.__name__)
def test_no_export_is_torn_and_no_push_is_changed(rule: type[Rule]) -> None:
    """Exports, idle moments, pushes and dropped readers come in a seeded random order.

    Exported arrays do not change until their reader drops them, and the shard equals, bit for bit,
    one that was never exported.
    """
    for seed in range(SEED, SEED + 8):
        dice, rng = random.Random(seed), np.random.default_rng(seed)
        talk, alone = (Talk(rule=rule(), bound=None, decay=Decay(0.01)) for _ in range(2))
        for one in (talk, alone):
            one.enter("w")
        held: list[tuple[list[NDArray[np.float32]], list[bytes]]] = []
        seq = 0
        for _ in range(60):
            match dice.choice(["export", "prepare", "prepare", "push", "push", "drop"]):
                case "export":
                    arrays = exported(talk)
                    held.append((arrays, as_bytes(arrays)))
                    talk.frames = ()
                case "prepare":
                    prepare(talk, dice.choice([1, 1, 2, 100]))
                case "drop" if held:
                    del held[dice.randrange(len(held))]
                case "push":
                    seq += 1
                    frames = gradient(float(rng.standard_normal()))
                    for one in (talk, alone):
                        one.say(push("w", seq), frames)
            for arrays, copies in held:
                assert as_bytes(arrays) == copies, f"seed {seed}"
        assert as_bytes(exported(talk)) == as_bytes(exported(alone)), f"seed {seed}"


def test_a_push_after_idle_moments_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each moment copies one piece of each slot; then the push finds nothing to copy."""
    copied: list[int] = []
    real = backends.copy

    def copy(source: NDArray[np.float32], out: NDArray[np.float32]) -> None:
        copied.append(source.size)
        real(source, out)

    monkeypatch.setattr(backends, "copy", copy)
    talk = Talk(rule=Adam(), bound=None)
    talk.enter("w")
    held = exported(talk)
    copied.clear()
    assert prepare(talk) == -(-SIZE // 50)
    assert copied == [*[50, 50] * (SIZE // 50), SIZE % 50, SIZE % 50]
    copied.clear()
    talk.say(push("w", 1), gradient(1))
    assert copied == []
    talk.frames = ()
    held = exported(talk)
    prepare(talk, 1)
    copied.clear()
    talk.say(push("w", 2), gradient(1))
    assert copied == [SIZE - 50, SIZE - 50], "what was left"
    talk.frames = ()
    del held


def test_nothing_is_copied_without_a_reader() -> None:
    """Idle moments are unused without slots, without a reader, or once it has gone."""
    talk = Talk(bound=None)
    held = exported(talk)
    assert prepare(talk) == 0
    talk = Talk(rule=Adam(), bound=None)
    assert prepare(talk) == 0
    held = exported(talk)
    assert prepare(talk, 1) == 1
    talk.frames = ()
    del held
    assert prepare(talk) == 0
