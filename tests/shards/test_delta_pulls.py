"""Pulls of changes: both ends hold the same floats, close to the weights that are served."""

from typing import Any

import msgspec
import numpy as np
import pytest

from shards import delta_pulls, payloads, wire_format
from shards.delta_pulls import Change, DeltaViews
from shards.dense_part import DensePart
from shards.messages import Kind, PulledPart, Weights
from shards.tables import KeyRange
from tests.support.shard_dsl import Talk, gradient, hello, join, leave, pull, push

pytestmark = pytest.mark.usefixtures("on_host_and_device")

KEYS = KeyRange(256, 1024)
SIZE = len(KEYS)


def drift(steps: int) -> list[Any]:
    """Weights during training: a random walk with ever smaller steps."""
    dice = np.random.default_rng(2)
    walk = [dice.standard_normal(SIZE)]
    for step in range(1, steps):
        walk.append(walk[-1] + dice.standard_normal(SIZE) / (10 * step))
    return [weights.astype(np.float32) for weights in walk]


def received(view: Any, change: Change) -> Any:
    """The floats of a worker with `view` after it has applied the change."""
    if change.base == 0:
        return change.frame.view(np.float32)
    payload = payloads.validate("change", change.kind, False, KEYS, change.frame.data)
    new = np.empty_like(view)
    delta_pulls.add(change.kind, payload, view, new)
    return new


@pytest.mark.parametrize("kind", delta_pulls.KINDS)
def test_both_ends_hold_the_same_view(kind: Kind) -> None:
    """Whole weights first, then changes; views agree bit for bit and approach the weights."""
    served, number = DeltaViews(), 0
    mine: Any = None
    for weights in drift(12):
        change = served.serve("w", weights, kind, 0.1, number)
        assert (change.base, change.kind) == ((number, kind) if number else (0, Kind.F4))
        mine, number = received(mine, change), change.number
        assert mine.tobytes() == served._views["w"].weights.tobytes()
    for _ in range(40):  # the weights do not change
        change = served.serve("w", weights, kind, 0.1, number)
        mine, number = received(mine, change), change.number
    np.testing.assert_allclose(mine, weights, atol=1e-6)


def test_the_first_change_is_small() -> None:
    """int8 is a quarter of the floats, a hundredth of them eight bytes each."""
    first, second = drift(2)
    for kind, share, most in ((Kind.INT8, 0.0, 0.26), (Kind.SPARSE, 0.01, 0.03)):
        served = DeltaViews()
        whole = served.serve("w", first, kind, share, 0)
        change = served.serve("w", second, kind, share, whole.number)
        assert change.frame.nbytes <= most * first.nbytes


@pytest.mark.parametrize("base", [0, 1, 2**32, 2**62])
def test_a_view_that_is_not_the_one_kept(base: int) -> None:
    """After a lost answer, or in another life, whole weights are sent as a new view."""
    first, second, third = drift(3)
    served = DeltaViews()
    served.serve("another", first, Kind.INT8, 0.0, 0)
    number = served.serve("w", first, Kind.INT8, 0.0, 0).number
    number = served.serve("w", second, Kind.INT8, 0.0, number).number
    assert base < served._views["w"].first or base > number
    whole = served.serve("w", third, Kind.INT8, 0.0, base)
    assert (whole.base, received(None, whole).tobytes()) == (0, third.tobytes())
    assert served.serve("w", third, Kind.INT8, 0.0, whole.number).base == whole.number


def test_pulls_that_are_on_their_way_together() -> None:
    """Each answer builds on the one before, although all pulls named the same view."""
    weights = drift(4)
    served = DeltaViews()
    whole = served.serve("w", weights[0], Kind.INT8, 0.0, 0)
    mine = received(None, whole)
    for step in (1, 2, 3):
        change = served.serve("w", weights[step], Kind.INT8, 0.0, whole.number)
        assert change.base == whole.number + step - 1
        mine = received(mine, change)
    assert mine.tobytes() == served._views["w"].weights.tobytes()


def test_numbers_are_never_used_twice() -> None:
    """Each view of a life has its own number, whatever the worker, and the numbers rise."""
    served = DeltaViews()
    numbers = [served.serve(worker, drift(1)[0], Kind.INT8, 0.0, 7).number for worker in "aba"]
    assert numbers == [1, 2, 3]


@pytest.mark.parametrize("boot", [1_790_000_000_000_000, 2**62])
def test_any_life_can_number_its_changes(boot: int) -> None:
    """A process numbers its life by the microseconds since 1970, and messages hold no more than
    2**62: a shard's answers can be encoded whatever the number of its life."""
    talk = Talk(bound=None, boot=boot)
    talk.say(hello("a"))
    talk.say(msgspec.structs.replace(join("a"), boot=boot))
    base = 0
    for expected in (Kind.F4, Kind.INT8):
        ((_, reply),) = talk.say(pull("a", 0, boot=boot, kind=Kind.INT8, base=base))
        assert isinstance(reply, Weights)
        assert wire_format.decode_reply(wire_format.encode(reply)) == reply
        (part,) = reply.parts
        assert (part.kind, part.base) == (expected, base)
        base = part.number


def changes(talk: Talk, worker: str, base: int) -> PulledPart:
    ((_, reply),) = talk.say(pull(worker, 0, kind=Kind.INT8, base=base))
    assert isinstance(reply, Weights)
    (part,) = reply.parts
    return part


def views(talk: Talk) -> int:
    """The number of workers whose view the shard keeps."""
    part = talk.shard.parameters.parts["net"]
    assert isinstance(part, DensePart)
    return len(part._views)


def test_a_shard_serves_changes_and_keeps_the_views_of_active_workers() -> None:
    """A view is kept from the first pull of changes to a Leave, expired lease or next Hello."""
    talk = Talk(bound=None)
    talk.enter("a", "b")
    first = changes(talk, "a", 0)
    talk.say(push("b", 1), gradient(1.0))
    second = changes(talk, "a", first.number)
    assert (first.kind, first.base, second.kind, second.base) == (
        Kind.F4,
        0,
        Kind.INT8,
        first.number,
    )
    assert talk.shard.version == 1
    assert talk.shard.metrics.bytes_out == 4 * talk.shard.size + 260 * talk.shard.size // 256
    changes(talk, "b", 0)
    assert views(talk) == 2
    talk.say(leave("b"))
    talk.enter("a")
    assert views(talk) == 0
    changes(talk, "a", 0)
    talk.tick(1000.0)
    assert views(talk) == 0
