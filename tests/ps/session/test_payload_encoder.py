"""A worker's view of a shard's weights, in whatever order the answers arrive."""

from typing import Any

import msgspec
import numpy as np
import pytest

from ps import Compression
from ps.session.events import Pulled
from ps.session.payload_encoder import PulledView, advance
from shards import payloads
from shards.messages import Kind, Pull, PulledPart, Weights
from tests.support.session_replies import deliver, ready_session, weights

Told = tuple[Weights, PulledPart]


def reply(base: int, number: int, version: int, boot: int = 2) -> Told:
    kind = Kind.SPARSE if base else Kind.F4
    part = PulledPart("net", kind, 0, 256, False, base, number)
    return Weights(1, 0, boot, 1, version, [part], 0.0), part


def whole(value: float) -> Any:
    return np.full(256, value, np.float32).view(np.uint8)


def change(place: int, value: float) -> Any:
    return payloads.sparse(np.array([place], np.uint32), np.array([value], np.float32))


def test_changes_are_added_to_a_view_that_stays_as_it_was() -> None:
    """The caller may still read an earlier answer, so every view is an array of its own."""
    first = advance(None, *reply(0, 10, 4), whole(1.0))
    assert first is not None
    second = advance(first, *reply(10, 11, 6), change(3, 0.5))
    assert second is not None
    assert (second.number, second.version) == (11, 6)
    assert (second.weights[3], second.weights.sum()) == (1.5, 256.5)
    assert (first.weights == 1).all()


@pytest.mark.parametrize(("number", "boot"), [(11, 2), (1, 3), (1, 1), (10, 1)])
def test_a_whole_answer_replaces_the_view(number: int, boot: int) -> None:
    """This includes one from another life of the shard, which counts from 1 and may have the lower
    boot number: a backup may be older than the primary that it follows.
    """
    first = advance(None, *reply(0, 10, 4), whole(1.0))
    later = advance(first, *reply(0, number, 5, boot), whole(2.0))
    assert later is not None
    assert (later.boot, later.number, later.weights[0]) == (boot, number, 2.0)
    changed = advance(later, *reply(number, number + 1, 6, boot), change(0, 0.5))
    assert changed is not None
    assert (changed.boot, changed.number, changed.weights[0]) == (boot, number + 1, 2.5)


@pytest.mark.parametrize("number", [9, 10, 11])
@pytest.mark.parametrize("boot", [1, 3])
def test_changes_of_another_life(number: int, boot: int) -> None:
    """They cannot be applied, even where the numbers would fit."""
    first = advance(None, *reply(0, 10, 4), whole(1.0))
    assert advance(first, *reply(number, number + 1, 5, boot), change(0, 1.0)) is None


@pytest.mark.parametrize("late", [reply(10, 11, 5), reply(0, 11, 5), reply(9, 10, 4)])
def test_what_was_overtaken_changes_nothing(late: Told) -> None:
    """The worker's view is newer than the one that the late answer leads to."""
    newer = PulledView(2, 12, 7, np.ones(256, np.float32))
    frames = change(0, 1.0) if late[1].base else whole(3.0)
    assert advance(newer, *late, frames) is newer


@pytest.mark.parametrize("number", [None, 9, 8])
def test_changes_to_a_view_that_never_came(number: int | None) -> None:
    """An earlier answer was lost, so they cannot be applied."""
    mine = None if number is None else PulledView(2, number, 7, np.ones(256, np.float32))
    assert advance(mine, *reply(10, 11, 8), change(0, 1.0)) is None


def test_weights_are_asked_for_again_when_changes_are_of_no_use() -> None:
    """They are requested in full under a new number, and that answer completes the pull."""
    session = ready_session(1, compression=Compression(pull=Kind.INT8))
    request, sends = session.pull(0, 0.0)
    part = PulledPart("net", Kind.INT8, 0, 512, False, 7, 8)
    lost = msgspec.structs.replace(weights(0, sends[0].message.request), parts=[part])
    ((_, again),), events = deliver(session, lost, 1.0, [bytes(520)])
    assert isinstance(again, Pull)
    (ask,) = again.parts
    assert (ask.base, ask.kind, again.request > sends[0].message.request) == (0, "int8", True)
    assert events == []
    part = msgspec.structs.replace(part, kind=Kind.F4, base=0)
    whole_answer = msgspec.structs.replace(lost, request=again.request, parts=[part])
    _, (pulled,) = deliver(session, whole_answer, 2.0, [bytes(2048)])
    assert isinstance(pulled, Pulled)
    assert (pulled.request, pulled.kinds) == (request, {"net": Kind.F4})
