"""Requests of operators: installing and exporting a state, whole and of one version."""

import msgpack
import numpy as np
import pytest
from msgspec.structs import replace

from shards import shard_state, wal_format
from shards.ledger import Ledger, LedgerEntry
from shards.messages import (
    PROTOCOL,
    Ack,
    Describe,
    Described,
    Export,
    HandOver,
    Install,
    Installed,
    Join,
    Joined,
    Quiesce,
    Read,
    Remedy,
    State,
    Welcome,
)
from shards.rules import Adam, Momentum
from shards.schema_digest import SCHEMA
from shards.shard_state import SavedProgress
from shards.shard_status import Standing
from tests.support.shard_dsl import (
    SIZE,
    Talk,
    as_bytes,
    blank,
    fresh,
    gradient,
    hello,
    join,
    pull,
    push,
    refusal,
)

EMPTY = np.zeros(4, np.float32)

pytestmark = pytest.mark.usefixtures("on_host_and_device")


def test_a_served_version_never_changes() -> None:
    """However many pushes follow, the served arrays do not change, and the next pull is newer."""
    talk = Talk(bound=None)
    talk.enter("w")
    held = []
    for seq in range(1, 30):
        talk.say(pull("w", seq))
        held.append(talk.weights()[10:150][::3])
        talk.say(push("w", seq), gradient(1))
        talk.say(push("w", seq), gradient(1))
    for age, weights in enumerate(held):
        assert set(weights) == {-age}


def test_pulls_of_one_version_share_its_memory() -> None:
    """Nothing is copied for a pull, a read or an export."""
    talk = Talk(bound=None)
    talk.enter("w")
    addresses = set()
    for message in (pull("w", 0), Read(1, "job"), Export(2, "job")):
        talk.say(message)
        addresses.add(next(f.ctypes.data for f in talk.frames if isinstance(f, np.ndarray)))
    assert len(addresses) == 1


def test_what_was_exported_never_changes() -> None:
    """Exported weights and slots, which are not copied, do not change while pushes follow; and the
    shard computes the same as one that is never exported."""
    talk, alone = Talk(rule=Adam(), bound=None), Talk(rule=Adam(), bound=None)
    for one in (talk, alone):
        one.enter("w")
    held = []
    for seq in range(1, 30):
        if seq % 3 == 0:
            talk.say(Export(seq, "job"))
            arrays = [frame for frame in talk.frames if isinstance(frame, np.ndarray)]
            held.append((arrays, [array.copy() for array in arrays]))
            held = held[-2:]  # earlier arrays are dropped, and reused
        for one in (talk, alone):
            one.say(push("w", seq), gradient(seq))
        for arrays, copies in held:
            assert all(map(np.array_equal, arrays, copies))
    for one in (talk, alone):
        one.say(Export(99, "job"))
    assert as_bytes(talk.frames)[1:] == as_bytes(alone.frames)[1:]


# --- install and export ---------------------------------------------------------------------------


def test_a_state_goes_to_another_life_whole() -> None:
    """Weights, slots, counters and ledger arrive; both lives then apply the same push alike."""
    first = Talk(rule=Adam(), bound=0)
    first.enter("a", "b")
    for seq in (1, 2):
        for worker in ("a", "b"):
            first.say(push(worker, seq), gradient(seq))
    assert first.say(Export(3, "job")) == [("operator", State(3, 0, 1, 4))]
    exported, _ = shard_state.decode(as_bytes(first.frames))
    assert list(exported.arrays) == ["net/weights", "net/mean", "net/square_mean"]
    assert exported.saved.updates == {"net": 4}, "which Adam's bias correction needs"
    second = Talk(rule=Adam(), bound=0, boot=2, installed=False)
    # Arrays are named, and may come in any order.
    arrays = dict(reversed(exported.arrays.items()))
    frames = as_bytes(shard_state.encode(replace(exported, arrays=arrays)))
    said = second.say(Install(4, "job"), frames)
    assert said == [("operator", Installed(4, 0, 2, 4))]
    assert second.say(hello("a")) == [("a", Welcome(10, 0, 2, 1, 4, 2, 2, 10.0))]
    for talk, boot in ((first, 1), (second, 2)):
        talk.say(hello("a", 1))
        talk.say(Join(11, "job", "a", 1, boot, 0))
        talk.say(push("a", 3, incarnation=1, boot=boot), gradient(5))
        talk.say(Export(3, "job"))
    assert as_bytes(first.frames)[1:] == as_bytes(second.frames)[1:]


def test_no_worker_of_an_earlier_job_is_waited_for() -> None:
    """After an Install all workers have left, and each may return at the clock that it had."""
    ledger = Ledger(
        {"w": LedgerEntry(3, seq=5, clock=7, step=6, standing=Standing.ACTIVE)}, floor=7
    )
    talk = Talk(bound=0, installed=False)
    state = replace(blank(), saved=SavedProgress(9, 8, 7, ledger))
    assert talk.say(Install(1, "job"), as_bytes(shard_state.encode(state))) == [
        ("operator", Installed(1, 0, 1, 9))
    ]
    talk.enter("other")
    assert talk.shard.ledger.entries["w"].standing is Standing.LEFT
    assert talk.shard.ledger.entries["other"].clock == 7
    assert talk.say(hello("w", 4)) == [("w", Welcome(10, 0, 1, 1, 9, 5, 6, 10.0))]
    assert talk.say(join("w", incarnation=4)) == [("w", Joined(11, 0, 1, 7))]


def test_the_description_belongs_to_the_state() -> None:
    """A shard describes the job as its last state says, and after a hand-over as that does."""
    describe = Describe(9, "job", PROTOCOL, SCHEMA)
    talk = Talk(installed=False)
    assert refusal(talk.say(describe)).remedy is Remedy.RETRY
    state = replace(blank(), description=b"two shards")
    assert talk.say(Install(1, "job"), as_bytes(shard_state.encode(state)))
    assert talk.say(describe) == [("operator", Described(9, 0, 1))]
    assert talk.frames == (b"two shards",)
    assert talk.shard.copy().description == b"two shards"
    logged, frames = wal_format.state_of(talk.shard, 0)
    restarted = Talk(installed=False)
    wal_format.Replay(restarted.shard).take(logged, [bytes(frame) for frame in frames])
    restarted.say(describe)
    assert restarted.frames == (b"two shards",)
    talk.say(Quiesce(2, "job", 9.0, 1))
    talk.say(HandOver(3, "job", 5, 1), [b"three"])
    talk.say(describe)
    assert talk.frames == (b"three",)


def test_an_install_that_comes_late_undoes_nothing() -> None:
    """The admin client repeats a slow request; a late copy must not reset a running job."""
    talk = Talk()
    assert talk.say(Install(1, "job"), fresh()) == [("operator", Installed(1, 0, 1, 0))]
    talk.enter("w")
    talk.say(push("w", 1), gradient(1))
    said = refusal(talk.say(Install(1, "job"), fresh()))
    assert said.remedy is Remedy.GIVE_UP
    assert said.text == "install: shard 0 serves workers by now; expected a fresh one"
    assert talk.say(push("w", 2), gradient(1)) == [("w", Ack(102, 0, 1, 2, 2, 1, False))]


def frames_of(**arrays: int) -> list[bytes]:
    """The frames of an Install of zeros: for each array of the table its number of floats."""
    zeros = {f"net/{name}": np.zeros(size, np.float32) for name, size in arrays.items()}
    return as_bytes(shard_state.encode(replace(blank(), arrays=zeros)))


SLOTS = "table net: expected weights and the slots ['history'] of rule Momentum, got "


@pytest.mark.parametrize(
    ("frames", "remedy", "text"),
    [
        ([], Remedy.BAD_MESSAGE, "state: expected at least one frame, got none"),
        ([*fresh(), b""], Remedy.BAD_MESSAGE, "install: expected 2 frames, got 3"),
        (fresh()[:1], Remedy.BAD_MESSAGE, "state: expected 2 frames, got 1"),
        (
            frames_of(weights=SIZE, mean=SIZE),
            Remedy.BAD_INPUT,
            SLOTS + "['mean', 'weights']",
        ),
        (frames_of(history=SIZE), Remedy.BAD_INPUT, SLOTS + "['history']"),
        (
            as_bytes(
                shard_state.encode(replace(blank(), arrays={"net/weights": np.zeros(SIZE, "<i4")}))
            ),
            Remedy.BAD_INPUT,
            (
                f"table net: weights: expected {SIZE} float32 for keys [0, {SIZE}),"
                f" got int32 of shape ({SIZE},)"
            ),
        ),
        (
            as_bytes(shard_state.encode(replace(blank(), arrays=blank().arrays | {"x/y": EMPTY}))),
            Remedy.BAD_INPUT,
            "state: expected arrays of the tables net, got net/weights, x/y",
        ),
        (
            [fresh()[0], bytes(8)],
            Remedy.BAD_MESSAGE,
            f"state: net/weights of <f4 and shape ({SIZE},) takes {4 * SIZE} bytes, got 8",
        ),
        ([b"\xc1", fresh()[1]], Remedy.BAD_MESSAGE, None),
        ([msgpack.packb({"version": -1}), fresh()[1]], Remedy.BAD_MESSAGE, None),
    ],
)
def test_an_install_that_does_not_fit(
    frames: list[bytes], remedy: Remedy, text: str | None
) -> None:
    """An invalid Install is refused as a whole: the shard still has no weights."""
    talk = Talk(installed=False, rule=Momentum())
    said = refusal(talk.say(Install(1, "job"), frames))
    assert said.remedy is remedy
    assert text in {None, said.text}
    assert refusal(talk.say(Read(1, "job"))).remedy is Remedy.RETRY
    assert refusal(talk.say(Export(1, "job"))).remedy is Remedy.RETRY
