"""Messages that are almost valid: each valid one of the protocol, and seeded ways to spoil it.

A message is a list of frames. Half of them are spoiled in bytes, blindly or by what MessagePack's
own length fields could claim; of the others the header's map is taken apart and written again with
something extreme in place of a value, so that they get past the decoder's first look.
"""

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ps.security.enrolment import Enrol
from ps.shared_memory import handshake
from ps.transport.striping import Cutter
from shards import row_codecs, shard_state, wire_format
from shards.messages import (
    PROTOCOL,
    AskedPart,
    AskRecords,
    AskStatus,
    ChangeSettings,
    Cut,
    Export,
    HandOver,
    Hello,
    Install,
    Join,
    Kind,
    Leave,
    LiveSettings,
    Message,
    Part,
    Probe,
    Pull,
    Push,
    Quiesce,
    Read,
    Renew,
)
from shards.schema_digest import SCHEMA
from shards.shard import Shard

Frames = list[bytes]

# What a MessagePack field may claim: the largest strings, binaries, extensions, arrays and maps,
# numbers beyond every bound, NaN and infinities.
CLAIMS = (
    *(b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"),
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xde\xff\xff"),
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xcb\x7f\xf8" + b"\x00" * 6),
    *(b"\xcb\x7f\xf0" + b"\x00" * 6, b"\xc1", b"\xc0", b"\xc3", b"\x91" * 200, b"\x81\xa1a" * 200),
)
EXTREMES: tuple[Any, ...] = (
    *(0, 1, -1, 2**31, 2**32, 2**62, 2**62 + 1, 2**63 - 1, 2**63, 2**64 - 1),
    *(0.0, -0.0, math.nan, math.inf, -math.inf, 1e308, 5e-324, 0.5),
    *("", "w", "x" * 128, "x" * 129, "\x00", "\udcff", "é" * 64, "../../etc/passwd"),
    *(None, True, b"", b"\xff" * 16, [], {}, [[]], [0] * 65, {"t": "push"}),
    *([0, 2**62], [0, 256], [256, 0], *(kind.value for kind in Kind)),
)


def valid(shard: Shard) -> list[Frames]:
    """One of each message that `shard` would answer from a joined worker "w", and an operator."""
    job, boot = shard.spec.job, shard.boot
    floats = shard.size
    who = (job, "w", 0)
    table, user = shard.parameters.parts
    keys = shard.spec.keys
    part = Part(table, Kind.F4, keys.start, keys.stop)
    push = Push(
        *(7, *who, boot, shard.spec.map.epoch, 1, 1, 1, 1, 8, 0),
        [part],
        *(0.5, 0.01, 0.0),
    )
    pull = Pull(8, *who, boot, shard.spec.map.epoch, 0, [AskedPart(table)])
    half = msgspec.structs.replace(push, parts=[msgspec.structs.replace(part, kind=Kind.FP16)])
    few = msgspec.structs.replace(push, parts=[msgspec.structs.replace(part, kind=Kind.SPARSE)])
    pairs = np.arange(4, dtype=np.uint32).tobytes() + np.ones(4, np.float32).tobytes()
    gradient = np.ones(floats, np.float32).tobytes()
    rows = draw_rows(random.Random(1))
    of_rows = row_push(shard, 1)
    of_both = msgspec.structs.replace(push, parts=[part, *of_rows.parts])
    said: list[tuple[Message, list[bytes]]] = [
        (Hello(1, *who, PROTOCOL, SCHEMA), []),
        (Join(2, *who, boot, 0), []),
        (push, [gradient]),
        (half, [np.ones(floats, np.float16).tobytes()]),
        (few, [pairs]),
        (of_rows, rows),
        (of_both, [gradient, *rows]),
        (msgspec.structs.replace(pull, parts=[AskedPart(table), AskedPart(user)]), rows[:1]),
        (row_pull(shard), rows[:1]),
        (Read(20, job, [AskedPart(user)]), rows[:1]),
        (pull, []),
        (msgspec.structs.replace(pull, parts=[AskedPart(table, Kind.SPARSE, False, 0, 0.1)]), []),
        (msgspec.structs.replace(pull, parts=[AskedPart(table, Kind.INT8, False, 3)]), []),
        (Renew(9, *who, boot), []),
        (Leave(10, *who, boot), []),
        (Install(11, job), list(map(bytes, shard_state.encode(shard.copy())))),
        (Export(12, job), []),
        (Read(13, job), []),
        (AskStatus(14, job), []),
        (AskRecords(15, job, 0), []),
        (Quiesce(16, job, 0.0, 1), [wire_format.encode_state(Cut({"w": 1}))]),
        (HandOver(17, job, 2, 1), [b"{}"]),
        (ChangeSettings(19, job, LiveSettings(2, 0.5, 1, 3)), []),
        (Probe(18, job, 100), [b"x" * 100]),
    ]
    alone = [list(map(bytes, wire_format.enclose([one]))) for one in said]
    together = list(map(bytes, wire_format.enclose([(push, [gradient]), (pull, [])])))
    noted = [
        handshake.encode(handshake.SharedFrames("m" * 16, "y" * 16, True, 3, [1, 2])),
        *together,
    ]
    parts = Cutter(b"t" * 16).cut(list(together), 3)
    striped = [[bytes(piece) for piece in part] for part in parts]
    return [*alone, together, noted, *striped, [wire_format.encode_state(Enrol("w", 0, "0" * 64))]]


def row_push(shard: Shard, seq: int, kind: Kind = Kind.F4) -> Push:
    """A push of worker "w" with rows alone."""
    (user,) = (table.name for table in shard.spec.layout.sparse)
    (buckets,) = shard.spec.map.buckets
    sender = shard.spec.job, "w", 0, shard.boot, shard.spec.map.epoch
    part = Part(user, kind, buckets.start, buckets.stop)
    return Push(100 + seq, *sender, seq, seq, seq, 1, 8, 0, [part], 0.5, 0.01, 0.0)


def row_pull(shard: Shard, kind: Kind = Kind.F4) -> Pull:
    """A pull of worker "w" of rows alone."""
    (user,) = (table.name for table in shard.spec.layout.sparse)
    sender = shard.spec.job, "w", 0, shard.boot, shard.spec.map.epoch
    return Pull(8, *sender, 0, [AskedPart(user, kind)])


def draw_rows(dice: random.Random, kind: Kind = Kind.F4) -> Frames:
    """The frames of ids and of rows of two floats, of up to eight ids, many of them near others."""
    ids = {dice.choice((dice.randrange(40), dice.randrange(2**64))) for _ in range(8)}
    drawn = [dice.choice((0.5, -2.0, 1e9)) for _ in range(2 * len(ids))]
    rows = np.empty(len(ids) * row_codecs.row_bytes(kind, 2), np.uint8)
    row_codecs.encode(kind, np.array(drawn, np.float32).reshape(-1, 2), rows)
    return [np.array(sorted(ids), np.uint64).tobytes(), rows.tobytes()]


def spoil_rows(frames: Frames, dice: random.Random) -> Frames:
    """The frames spoiled in up to two ways: in their bytes, their order, or their number."""
    frames = list(frames)
    for _ in range(dice.randrange(3)):
        dice.choice((*_WAYS[:-1], _turn, _repeat, _fill))(frames, dice)
    return frames


def _turn(frames: Frames, dice: random.Random) -> None:
    """Turn the order of the values of a frame round."""
    _words(frames, dice, lambda words: words[::-1])


def _repeat(frames: Frames, dice: random.Random) -> None:
    """Give a frame one value more than once."""
    _words(frames, dice, lambda words: np.repeat(words, 2))


def _fill(frames: Frames, dice: random.Random) -> None:
    """Fill a frame with bits that are NaN as floats, and the largest id as integers."""
    _words(frames, dice, lambda words: np.full_like(words, 2**64 - 1))


def _words(
    frames: Frames,
    dice: random.Random,
    change: Callable[[NDArray[np.uint64]], NDArray[np.uint64]],
) -> None:
    """Change one frame as words of eight bytes, without those of a last part of a word."""
    if frames:
        which = dice.randrange(len(frames))
        words = np.frombuffer(frames[which][: len(frames[which]) // 8 * 8], np.uint64)
        frames[which] = change(words).tobytes()


def spoiled(messages: list[Frames], seed: int) -> Iterator[Frames]:
    """Endlessly many that are spoiled in one to three ways; the seed alone decides which."""
    dice = random.Random(seed)
    while True:
        frames = list(dice.choice(messages))
        if dice.random() < 0.5:
            _extreme(frames, dice)
        else:
            for _ in range(dice.randint(1, 3)):
                dice.choice(_WAYS)(frames, dice)
        yield frames


def _flip(frames: Frames, dice: random.Random) -> None:
    _bytes(
        frames, dice, lambda b, at: b[:at] + bytes([b[at] ^ 1 << dice.randrange(8)]) + b[at + 1 :]
    )


def _claim(frames: Frames, dice: random.Random) -> None:
    claim = dice.choice(CLAIMS)
    skip = dice.choice((0, 1, len(claim)))
    _bytes(frames, dice, lambda b, at: b[:at] + claim + b[at + skip :])


def _cut(frames: Frames, dice: random.Random) -> None:
    _bytes(frames, dice, lambda b, at: b[:at] + b[at + dice.randrange(9) :])


def _grow(frames: Frames, dice: random.Random) -> None:
    _bytes(frames, dice, lambda b, at: b[:at] + dice.randbytes(dice.randrange(9)) + b[at:])


def _bytes(frames: Frames, dice: random.Random, change: Callable[[bytes, int], bytes]) -> None:
    """Change one frame, most often the first, at some place, most often near the front."""
    if not frames:
        return
    which = 0 if dice.random() < 0.7 else dice.randrange(len(frames))
    if frames[which]:
        near = min(len(frames[which]), 300)
        frames[which] = change(frames[which], dice.randrange(near))


def _shuffle(frames: Frames, dice: random.Random) -> None:
    dice.shuffle(frames)


def _drop(frames: Frames, dice: random.Random) -> None:
    if len(frames) > 1:
        del frames[dice.randrange(len(frames))]


def _double(frames: Frames, dice: random.Random) -> None:
    if frames:
        frames.insert(dice.randrange(len(frames) + 1), dice.choice(frames))


def _add(frames: Frames, dice: random.Random) -> None:
    frames.append(dice.choice((b"", b"\x00" * 1024, dice.randbytes(40))))


def _extreme(frames: Frames, dice: random.Random) -> None:
    """Another value in the map of the first header, and its places made right again."""
    try:
        (header, own), *others = wire_format.disclose(frames[0], frames[1:])
        fields = msgspec.msgpack.decode(header)
        name = dice.choice([*fields, "more"])
        fields[name] = dice.choice(EXTREMES)
        packed = msgspec.msgpack.encode(fields)
    except Exception:  # noqa: BLE001  # spoiled already, beyond being a message
        return
    place = wire_format._PLACE
    first = place.pack(len(packed) & 0xFFFF, len(own)) + packed
    for other, its in others:
        first += place.pack(len(other), len(its)) + bytes(other)
    frames[0] = first


_WAYS = (_flip, _claim, _cut, _grow, _shuffle, _drop, _double, _add, _extreme)
