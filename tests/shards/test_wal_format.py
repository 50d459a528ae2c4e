"""A shard's WAL: replaying it makes the shard that wrote it, bit for bit.

A shard handles random turns, which are written as records, read back, and replayed on an empty
shard with another boot number. The seed of a failing run is the test's parameter.
"""

import random
from typing import Any

import msgspec
import numpy as np
import pytest

from shards import wal_format
from shards.aggregation import ROUND, Buffer, Round
from shards.errors import BadInput
from shards.gradient_guard import Guard
from shards.messages import (
    Ack,
    AskStatus,
    ChangeSettings,
    Install,
    LiveSettings,
    Push,
    Refusal,
    Request,
)
from shards.rules import SGD, AdaptiveDelayCompensation, Decay, DelayedNesterov, HeLoCo, Momentum
from shards.shard import Shard
from shards.transition_io import Arrival
from shards.wal_format import Damage, Entry, Expired, Frames, Opening, Replay, Turn
from tests.support.shard_dsl import SIZE, fresh, hello, join, leave, pull, push, renew, spec

KINDS: dict[str, dict[str, Any]] = {
    "sums": {"rule": SGD(), "bound": None},
    "guarded": {"rule": SGD(), "bound": None, "guard": Guard(quarantine_after=2)},
    "slots": {"rule": Momentum(0.9), "decay": Decay(weight=0.01)},
    "rounds": {"merge": ROUND, "bound": 0},
    "backups": {"merge": Round(1), "bound": 0},
    "buffer": {"merge": Buffer(3), "rule": Momentum(0.9), "weigh": "inverse_root", "bound": None},
    "versions": {"rule": AdaptiveDelayCompensation(versions=2), "bound": None},
    "every third": {"rule": DelayedNesterov(n=3), "bound": None, "deltas": True},
    "whole tensors": {"rule": HeLoCo(), "bound": None, "deltas": True},
    "warm": {"warm_steps": 6, "bound": 2},
}
NAMES = "abcd"
NUMBER = 6  # the file number of all records
Written = list[bytes]


def encoded(entry: Entry, frames: Frames = ()) -> bytes:
    return b"".join(wal_format.encode(entry, frames, number=NUMBER))


def values(dice: random.Random) -> bytes:
    """A gradient with sums that depend on their order; now and then one that is not finite."""
    rng = np.random.default_rng(dice.randrange(2**32))
    flat = rng.standard_normal(SIZE).astype(np.float32)
    if dice.random() < 0.05:
        flat[dice.randrange(SIZE)] = np.nan
    return flat.tobytes()


def said(shard: Shard, dice: random.Random) -> Arrival:
    """A random message of a worker, usually a valid one."""
    worker = dice.choice(NAMES)
    entry = shard.ledger.entries.get(worker)
    life = entry.incarnation if entry else 0
    message: Request
    frames: list[bytes] = []
    match dice.choices(range(8), [2, 3, 12, 4, 1, 1, 1, 1])[0]:
        case 0:
            message = hello(worker, life + (dice.random() < 0.3))
        case 1:
            message = join(worker, dice.randrange(5), life)
        case 2:
            seq = (entry.seq if entry else 0) + dice.choices((1, 0, 2), (12, 1, 1))[0]
            read = max(0, shard.version - dice.randrange(3))
            message = push(worker, seq, incarnation=life, read_version=read, clock=seq)
            frames = [values(dice)]
        case 3:
            message = pull(worker, dice.randrange(4), incarnation=life)
        case 4:
            message = msgspec.structs.replace(leave(worker), incarnation=life)
        case 5:
            message = renew(worker)
        case 6:  # some are late, and some have a bound that the job cannot have
            bound, revision = dice.choice([0, 1, 4, None]), dice.randrange(9)
            settings = LiveSettings(bound, dice.choice([0.5, 1.0, 2.0]), revision)
            message = ChangeSettings(14, "job", settings)
        case _:
            message = AskStatus(1, "job")
    # The requests of a turn differ: a server passes on one copy of each (`life`).
    if dice.random() < 0.03 and hasattr(message, "boot"):
        message = msgspec.structs.replace(message, boot=7)  # an earlier life's
    return Arrival(worker.encode(), message, frames)


def life(shard: Shard, dice: random.Random, turns: int, written: Written) -> None:
    """Handle random turns, and write what each changed."""
    for turn in range(turns):
        now = float(turn)
        arrivals = {(one.sender, one.message.request): one for one in _some(shard, dice)}
        take(shard, list(arrivals.values()), now, written)
        if dice.random() < 0.05 and (silent := shard.ledger.active[:1]):
            shard.expire(silent, now)
            written.append(encoded(Expired(now, silent)))


def _some(shard: Shard, dice: random.Random) -> list[Arrival]:
    return [said(shard, dice) for _ in range(dice.randrange(1, 7))]


def take(shard: Shard, arrivals: list[Arrival], now: float, written: Written) -> None:
    answers = shard.handle_together(arrivals, now)
    noted = wal_format.turn_of(arrivals, answers, now)
    if noted is not None:
        written.append(encoded(*noted))


def begun(kind: str, written: Written) -> Shard:
    """A shard with weights, and the beginning of its WAL in `written`."""
    shard = Shard(spec(**KINDS[kind]), boot=1)
    written.append(encoded(wal_format.opening(shard, 0, begins=True, now=0.0)))
    install = Arrival(b"operator", Install(1, "job"), fresh())
    take(shard, [install], 0.0, written)
    return shard


def replayed(kind: str, written: Written) -> Shard:
    shard = Shard(spec(**KINDS[kind]), boot=2)
    replay, content, at = Replay(shard), memoryview(b"".join(written)), 0
    while at < len(content):
        record = wal_format.read(content, at, "log", number=NUMBER)
        replay.take(record.entry, record.frames)
        at = record.end
    return shard


def held(shard: Shard) -> tuple[Any, ...]:
    """Everything that must be equal, bit for bit; the ends of leases differ between lives."""
    state = shard.copy()
    saved = state.saved
    workers = {
        name: msgspec.structs.replace(entry, lease_until=0.0)
        for name, entry in saved.ledger.entries.items()
    }
    waiting = [(one.message.worker, one.message.request) for one in shard.gate.waiting]
    joins = [key for key in waiting if key[1] == 11]
    arrays = {name: array.tobytes() for name, array in state.arrays.items()}
    counted = saved.version, saved.steps, saved.samples, saved.ledger.floor, saved.updates
    pushes = shard.metrics.pushes
    return (
        (*counted, saved.settings),
        workers,
        arrays,
        sorted(shard.updates.round),
        sorted(joins),
        pushes,
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_replay_is_the_shard_that_wrote(kind: str, seed: int) -> None:
    """Weights, slots, ledger, counters and open rounds are equal, whatever was refused, repeated,
    not finite or applied in one pass."""
    dice, written = random.Random(seed), Written()
    shard = begun(kind, written)
    life(shard, dice, 60, written)
    assert held(replayed(kind, written)) == held(shard)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(3))
def test_a_base_stands_for_what_came_before_it(kind: str, seed: int) -> None:
    """The state when a file was opened, the requests that waited then, and the file make the same
    shard; so do all files without the base."""
    dice, written = random.Random(100 + seed), Written()
    shard = begun(kind, written)
    life(shard, dice, 40, written)
    second = [encoded(wal_format.opening(shard, 1, begins=False, now=40.0))]
    second += [encoded(*one) for one in wal_format.waiting_payloads(shard, 40.0)]
    base = encoded(*wal_format.state_of(shard, 1))
    life(shard, dice, 40, second)
    assert held(replayed(kind, [base, *second])) == held(shard)
    assert held(replayed(kind, written + second)) == held(shard)


def test_waiting_requests_are_not_judged_again() -> None:
    """A push in an open round still counts when its worker's lease has expired since."""
    written = Written()
    shard = begun("rounds", written)
    for name in "ab":
        take(shard, [Arrival(name.encode(), hello(name))], 1.0, written)
        take(shard, [Arrival(name.encode(), join(name))], 1.0, written)
    take(shard, [Arrival(b"a", push("a", 1), [bytes(4 * SIZE)])], 2.0, written)
    shard.expire(["a"], 3.0)
    assert list(shard.updates.round) == ["a"]
    base = encoded(*wal_format.state_of(shard, 1))
    second = [encoded(wal_format.opening(shard, 1, begins=False, now=4.0))]
    second += [encoded(*one) for one in wal_format.waiting_payloads(shard, 4.0)]
    assert held(replayed("rounds", [base, *second])) == held(shard)


def test_pushes_in_one_pass_are_replayed_in_one() -> None:
    """A sum rounds differently from single updates; a request between pushes ends a pass."""
    parts = [np.full(SIZE, value, np.float32).tobytes() for value in (1e8, -1e8, 1.0)]
    pushes = [
        Arrival(name.encode(), push(name, 1), [part])
        for name, part in zip("abc", parts, strict=True)
    ]
    question = Arrival(b"x", AskStatus(1, "job"))
    seen = set()
    for turn in (pushes, [*pushes[:2], question, pushes[2]], [pushes[0], question, *pushes[1:]]):
        written = Written()
        shard = begun("sums", written)
        for name in "abc":
            take(shard, [Arrival(name.encode(), hello(name))], 1.0, written)
            take(shard, [Arrival(name.encode(), join(name))], 1.0, written)
        take(shard, turn, 2.0, written)
        assert held(replayed("sums", written)) == held(shard)
        seen.add(shard.parameters.weights()[0])
    assert seen == {np.float32(-1.0), np.float32(0.0)}, "the order of the passes matters"


def test_a_quarantine_outlives_the_shard() -> None:
    """The next life refuses the worker too, and its push splits no pass, in replay either."""
    parts = {"a": 1e8, "x": 1.0, "b": -1e8, "c": 1.0}
    turn = [
        Arrival(name.encode(), push(name, 1), [np.full(SIZE, part, np.float32).tobytes()])
        for name, part in parts.items()
    ]
    bad = Arrival(b"x", push("x", 1), [np.full(SIZE, np.nan, np.float32).tobytes()])
    seen = []
    for refusals in (1, 2):
        written = Written()
        shard = begun("guarded", written)
        for name in parts:
            take(shard, [Arrival(name.encode(), hello(name))], 1.0, written)
            take(shard, [Arrival(name.encode(), join(name))], 1.0, written)
        for _ in range(refusals):
            take(shard, [bad], 2.0, written)
        take(shard, turn, 3.0, written)
        again = replayed("guarded", written)
        assert held(again) == held(shard)
        again.handle(b"x", hello("x", 1), (), 4.0)
        again.handle(b"x", msgspec.structs.replace(join("x", incarnation=1), boot=2), (), 4.0)
        last = msgspec.structs.replace(turn[1].message, incarnation=1, boot=2, seq=3 - refusals)
        seen.append((shard.parameters.weights()[0], again.handle(b"x", last, turn[1].frames, 4.0)))
    (_, heard), (passed, refused) = seen
    assert isinstance(heard[0].message, Ack)
    assert isinstance(refused[0].message, Refusal)
    assert refused[0].message.text == "worker x is in quarantine: 2 of its gradients were refused"
    assert passed == np.float32(-1.0), "in two passes it would be 0"


def test_a_waiting_worker_may_be_in_quarantine() -> None:
    """Its earlier push to a round counts, and no state or WAL that holds it is refused."""
    written = Written()
    shard = Shard(spec(**KINDS["rounds"], guard=Guard(quarantine_after=1)), boot=1)
    take(shard, [Arrival(b"o", Install(1, "job"), fresh())], 0.0, written)
    for name in "ab":
        take(shard, [Arrival(name.encode(), hello(name))], 1.0, written)
        take(shard, [Arrival(name.encode(), join(name))], 1.0, written)
    good, bad = bytes(4 * SIZE), np.full(SIZE, np.nan, np.float32).tobytes()
    for gradient in (good, bad):
        take(shard, [Arrival(b"a", push("a", 1), [gradient])], 2.0, written)
    assert (list(shard.updates.round), shard.ledger.entries["a"].refused) == (["a"], 1)
    other = Shard(shard.spec, boot=2)
    other.restore(shard.copy())
    ((waiting, frames),) = shard.waiting()
    assert isinstance(waiting, Push)
    other.park_request(waiting, frames, 3.0)
    assert held(other)[3] == ["a"]


def test_a_new_life_forgets_waiting_requests() -> None:
    """Replaying its opening drops them, since workers ask again; a late Install is refused."""
    written = Written()
    shard = begun("warm", written)
    for name in "ab":
        take(shard, [Arrival(name.encode(), hello(name))], 1.0, written)
        take(shard, [Arrival(name.encode(), join(name))], 1.0, written)
    assert [one.message.worker for one in shard.gate.waiting] == ["b"]
    again = replayed("warm", written)
    again.take_over(2.0)
    written.append(encoded(wal_format.opening(again, 1, begins=True, now=2.0)))
    third = replayed("warm", written)
    assert third.gate.waiting == again.gate.waiting == []
    late = third.handle(b"operator", Install(1, "job"), fresh(), 3.0)
    assert isinstance(late[0].message, Refusal)
    assert "serves workers by now" in late[0].message.text


def test_what_changed_nothing_is_not_written() -> None:
    """Reads and fully refused turns are not written; of a repeated push only the header is."""
    shard = begun("sums", [])
    a = [Arrival(b"a", message) for message in (hello("a"), join("a"))]
    for one in a:
        shard.handle_together([one], 0.0)
    first = Arrival(b"a", push("a", 1), [bytes(4 * SIZE)])

    def noted(*arrivals: Arrival) -> tuple[list[int], int] | None:
        turn = wal_format.turn_of(arrivals, shard.handle_together(arrivals, 1.0), 1.0)
        if turn is None:
            return None
        return [call.frames for call in turn[0].calls], sum(map(len, turn[1]))

    assert noted(first) == ([1], 4 * SIZE)
    assert noted(first) == ([0], 0)
    assert noted(Arrival(b"a", pull("a", 0)), Arrival(b"x", AskStatus(1, "job"))) is None
    assert noted(Arrival(b"a", push("a", 9), first.frames)) is None
    ahead, second = push("a", 9), push("a", 2)
    both = [Arrival(b"a", one, first.frames) for one in (ahead, second)]
    assert noted(*both) == ([0, 1], 4 * SIZE)
    third = Arrival(b"a", push("a", 3), first.frames)
    assert noted(third, third) == ([1, 1], 8 * SIZE), "answers do not distinguish two copies"


@pytest.mark.parametrize("size", [0, 1, 63, 4096, (1 << 20) - 8, 1 << 20, 3 * (1 << 20) + 12345])
def test_one_flipped_bit_shows(size: int) -> None:
    """A flipped bit in head, description or frames is found; the padding is not checked."""
    rng = np.random.default_rng(size)
    frames = [rng.bytes(size), rng.bytes(17)]
    record = encoded(Expired(1.0, ["w"]), frames)
    assert [
        bytes(f) for f in wal_format.read(memoryview(record), 0, "x", number=NUMBER).frames
    ] == frames
    assert len(record) % 64 == 0
    end = len(record) - len(b"".join(frames)) - (-(size + 17) % 64)
    places = [0, 9, 13, 21, 25, 30, 40, end + 16, end, end + size // 2, end + size - 1]
    for place in (place for place in places if place < end - 40 or end <= place < end + size):
        broken = bytearray(record)
        broken[place] ^= 1 << int(rng.integers(8))
        with pytest.raises(Damage):
            wal_format.read(memoryview(broken), 0, "x", number=NUMBER)


@pytest.mark.parametrize("size", [1, 64, 500, 5000])
def test_a_record_is_whole_or_none(size: int) -> None:
    """A writer that was killed leaves the first bytes of its record, and after them the former
    contents of the file, perhaps a record of the same length. Whatever their number, up to the last
    byte of the record that is not zero, the record is refused; also at the end of a file."""
    entry = Expired(1.0, ["w"])
    frames, ones = [np.random.default_rng(size).bytes(size - 1) + b"e"], [b"\xff" * size]
    record = encoded(entry, frames)
    formers = [
        b"".join(wal_format.encode(entry, held, number=number))
        for held, number in ((ones, NUMBER - 1), (ones, NUMBER + 1), (ones, NUMBER << 32))
    ]
    assert {len(former) for former in formers} == {len(record)}
    read = wal_format.read(memoryview(record), 0, "x", number=NUMBER)
    assert (read.entry, [bytes(frame) for frame in read.frames]) == (entry, frames)
    assert read.end == len(record)
    for size_written in range(len(record.rstrip(b"\0"))):
        for rest in (b"", *(former[size_written:] for former in formers)):
            content = memoryview(record[:size_written] + rest)
            with pytest.raises(Damage):
                wal_format.read(content, 0, "x", number=NUMBER)


def test_a_mark_is_read_whole_or_not_at_all() -> None:
    """Every flipped bit of a mark is found, and so is another length."""
    mark = wal_format.Mark(7, 1 << 40)
    written = wal_format.encode_mark(mark)
    assert wal_format.decode_mark(written) == mark
    for bit in range(8 * len(written)):
        broken = bytearray(written)
        broken[bit // 8] ^= 1 << bit % 8
        assert wal_format.decode_mark(bytes(broken)) is None
    for other in (b"", written[:-1], written + b"\0", bytes(len(written))):
        assert wal_format.decode_mark(other) is None


def test_what_follows_a_damaged_record_is_found() -> None:
    """So damage in the middle can be distinguished from the end of an interrupted WAL."""
    one = encoded(Expired(1.0, ["w"]), [bytes(100)])
    content = memoryview(one[:64] + b"\x01" + one[65:] + one + one[:-64])
    assert wal_format.next_record(content, 0, number=NUMBER) == len(one)
    assert wal_format.next_record(content, len(one), number=NUMBER) == 2 * len(one)
    assert wal_format.next_record(content, 2 * len(one), number=NUMBER) is None
    text = r"^log f: the record at byte \d+ is cut off$"
    with pytest.raises(Damage, match=text) as caught:
        wal_format.read(content, 2 * len(one), "log f", number=NUMBER)
    assert caught.value.offset == 2 * len(one)


def test_a_record_of_another_file_is_none() -> None:
    """A file that reuses another one's space does not contain the other's records, whatever they
    hold and however close the numbers are."""
    entry, frames = Expired(1.0, ["w"]), [bytes(100)]
    content = memoryview(bytes(64) + encoded(entry, frames))
    assert wal_format.next_record(content, 0, number=NUMBER) == 64
    for number in (*range(NUMBER), *range(NUMBER + 1, 200), NUMBER << 8, 2**32 - 1):
        assert wal_format.next_record(content, 0, number=number) is None
        with pytest.raises(Damage):
            wal_format.read(content, 64, "x", number=number)


def test_random_bytes_are_no_record() -> None:
    """Whatever a file contains, reading it raises Damage, not another error. (Seed 11.)"""
    rng = np.random.default_rng(11)
    turn = Turn(1.0, [wal_format.Call(b"header", 1)])
    record = encoded(turn, [bytes(200)])
    for _ in range(500):
        noise = rng.bytes(int(rng.integers(200)))
        cut = int(rng.integers(len(record) - 64))  # the padding at the end is not checked
        for content in (noise, wal_format.MAGIC + noise, record[:cut] + noise):
            if content[: len(record)] != record:
                with pytest.raises(Damage):
                    wal_format.read(memoryview(content), 0, "x", number=NUMBER)


def test_the_spec_travels() -> None:
    """A WAL contains the shard's spec, whatever its rule; an invalid spec names the file."""
    slots = spec(**KINDS["slots"])
    packed = wal_format.encode_spec(slots)
    assert wal_format.decode_spec(packed, "x") == slots
    with pytest.raises(BadInput, match=r"^log f: "):
        wal_format.decode_spec(b"\x01", "log f")
    with pytest.raises(BadInput, match=r"^log f: 'utf-8' codec"):
        wal_format.decode_spec(packed.replace(b"job\xa3job", b"job\xa3\xff\xff\xff"), "log f")
    opening = wal_format.opening(Shard(slots, boot=5), 3, begins=True, now=1.0)
    assert opening == Opening(wal_format.FORMAT, 3, packed, 5, True, 1.0, 0)
