"""Headers and envelopes: our own messages come back unchanged, and all others are refused."""

import tracemalloc
from typing import Any

import msgpack
import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from shards import wire_format
from shards.errors import BadMessage
from shards.ledger import Ledger, LedgerEntry
from shards.messages import (
    MAX_PROBE_BYTES,
    MAX_SAMPLES,
    MAX_STEPS,
    PROTOCOL,
    Ack,
    AskedPart,
    AskPiece,
    AskRecords,
    AskStatus,
    ChangeSettings,
    Describe,
    Described,
    Export,
    HandedOver,
    HandOver,
    Hello,
    Install,
    Installed,
    Join,
    Joined,
    Kind,
    Leave,
    Left,
    LiveSettings,
    Message,
    Parked,
    Part,
    Piece,
    Probe,
    Probed,
    Pull,
    PulledPart,
    Push,
    Quiesce,
    Quiesced,
    Read,
    Records,
    Refusal,
    Remedy,
    Renew,
    Renewed,
    Reply,
    Request,
    SettingsInForce,
    State,
    Status,
    Weights,
    Welcome,
)
from shards.shard_state import SavedProgress
from shards.tables import MAX_TABLES

TOP = 2**62
LONG = "\N{DUCK}" * 128
NAMES = (LONG, LONG, TOP)
TABLES = MAX_TABLES
PARTS = [Part(LONG, Kind.SPARSE, TOP, TOP, True)] * TABLES

# Every kind of message, as large as its fields allow.
REQUESTS: list[Request | Probe] = [
    Hello(TOP, *NAMES, 1, LONG),
    Join(TOP, *NAMES, TOP, TOP),
    Push(
        TOP, *NAMES, TOP, TOP, TOP, TOP, TOP, MAX_STEPS, MAX_SAMPLES, TOP, PARTS, 1e300, 1, 1, TOP
    ),
    Pull(TOP, *NAMES, TOP, TOP, TOP, [AskedPart(LONG, Kind.SPARSE, True, TOP, 0.1)] * TABLES),
    Renew(TOP, *NAMES, TOP, "h" * 128, 1e300),
    Leave(TOP, *NAMES, TOP),
    Install(TOP, LONG, True, Piece(TOP, TOP, TOP)),
    Export(TOP, LONG),
    AskPiece(TOP, LONG, TOP, TOP, TOP),
    Read(TOP, LONG),
    Describe(TOP, LONG, TOP, LONG),
    Quiesce(TOP, LONG, 3600.0, TOP, True),
    HandOver(TOP, LONG, TOP, TOP),
    ChangeSettings(TOP, LONG, LiveSettings(TOP, 1e6, TOP, TOP)),
    AskStatus(TOP, LONG),
    AskRecords(TOP, LONG, TOP),
    Probe(TOP, LONG, MAX_PROBE_BYTES),
]
REPLIES: list[Reply] = [
    Welcome(TOP, TOP, TOP, TOP, TOP, TOP, TOP, 10.0),
    Joined(TOP, TOP, TOP, TOP),
    Ack(TOP, TOP, TOP, TOP, TOP, TOP, True),
    Weights(
        *(TOP, TOP, TOP, TOP, TOP),
        [PulledPart(LONG, Kind.SPARSE, TOP, TOP, True, TOP, TOP)] * TABLES,
        0.5,
    ),
    Parked(TOP, TOP, TOP, TOP),
    Renewed(TOP, TOP, TOP),
    Left(TOP, TOP, TOP),
    Refusal(TOP, TOP, TOP, Remedy.GAP, 2 * LONG, TOP),
    Quiesced(TOP, TOP, TOP, True, 3600.0, TOP),
    HandedOver(TOP, TOP, TOP),
    SettingsInForce(TOP, TOP, TOP, LiveSettings(TOP, 1e6, TOP, TOP), True, 3600.0),
    Installed(TOP, TOP, TOP, TOP, TOP),
    State(TOP, TOP, TOP, TOP, Piece(TOP, TOP, TOP)),
    Described(TOP, TOP, TOP),
    Status(TOP, TOP, TOP),
    Probed(TOP, TOP, TOP, TOP, LONG, 1e300, 1e300, TOP),
    Records(TOP, TOP, TOP, TOP),
]
LEAVE: dict[str, Any] = {
    "t": "leave",
    "request": 1,
    "job": "j",
    "worker": "w",
    "incarnation": 0,
    "boot": 1,
}


def name_of(message: object) -> str:
    return type(message).__name__


def test_every_kind_is_covered() -> None:
    """The lists above hold each request and each reply of the protocol once."""
    assert [type(m) for m in REQUESTS] == [*Request.__args__, Probe]
    assert [type(m) for m in REPLIES] == list(Reply.__args__)


@pytest.mark.parametrize("message", REQUESTS, ids=name_of)
def test_requests_come_back(message: Request) -> None:
    """The largest header of every kind fits in the limit and is read as it was written."""
    header = wire_format.encode(message)
    assert len(header) <= wire_format.MAX_HEADER_BYTES
    assert wire_format.decode_client_message(memoryview(header)) == message


@pytest.mark.parametrize("message", REPLIES, ids=name_of)
def test_replies_come_back(message: Reply) -> None:
    """The largest reply of every kind fits in the limit and is read as it was written."""
    header = wire_format.encode(message)
    assert len(header) <= wire_format.MAX_HEADER_BYTES
    assert wire_format.decode_reply(header) == message


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"t": "steal"}, "Invalid value 'steal'"),
        ({"t": "welcome"}, "Invalid value 'welcome'"),
        ({"t": 3}, "Expected `str`"),
        ({"t": None}, "Expected `str`"),
        ({"request": -1}, "Expected `int` >= 0"),
        ({"request": 2**62 + 1}, "Expected `int` <="),
        ({"request": 2**64 - 1}, "Expected `int` <="),
        ({"request": 1.5}, "Expected `int`, got `float`"),
        ({"request": "1"}, "Expected `int`, got `str`"),
        ({"request": [1]}, "Expected `int`, got `array`"),
        ({"request": None}, "Expected `int`, got `None`"),
        ({"request": True}, "Expected `int`, got `bool`"),
        ({"worker": ""}, "length >= 1"),
        ({"worker": "w" * 129}, "length <= 128"),
        ({"worker": b"w"}, "Expected `str`, got `bytes`"),
        ({"worker": {"name": "w"}}, "Expected `str`, got `object`"),
        ({"shoe_size": 43}, "unknown field `shoe_size`"),
        ({"worker": "w" * 1025}, "length <= 128"),
        ({"worker": b"w" * 4000}, "Expected `str`, got `bytes`"),
        ({"worker": list(range(65))}, "Expected `str`, got `array`"),
    ],
)
def test_a_header_with_a_flaw(change: dict[str, Any], complaint: str) -> None:
    """A header with one field of a wrong type or size, or one too many, is refused for it."""
    assert wire_format.decode_client_message(msgpack.packb(LEAVE)) == Leave(1, "j", "w", 0, 1)
    with pytest.raises(BadMessage, match=complaint):
        wire_format.decode_client_message(msgpack.packb(LEAVE | change))


@pytest.mark.parametrize(("field", "most"), [("steps", MAX_STEPS), ("samples", MAX_SAMPLES)])
def test_a_push_counts_no_more_than_one_push_can(field: str, most: int) -> None:
    """A push of more steps than the longest window, or of too many samples, is refused by name."""
    plain = Push(1, "j", "w", 0, 1, 1, 1, 1, 1, 1, 1, 0, [], 0.0, 0.0, 0.0)
    largest = msgspec.structs.replace(plain, **{field: most})
    assert wire_format.decode_request(wire_format.encode(largest)) == largest
    beyond = msgspec.structs.replace(plain, **{field: most + 1})
    with pytest.raises(BadMessage, match=rf"Expected `int` <= {most} - at `\$.{field}`"):
        wire_format.decode_request(wire_format.encode(beyond))


@pytest.mark.parametrize("kind", ["hello", "describe"])
def test_a_greeting_of_another_protocol(kind: str) -> None:
    """It may have other fields, so the refusal names the protocols and not the first odd field."""
    text = f"{kind}: expected protocol {PROTOCOL}, got protocol 2"
    with pytest.raises(BadMessage, match=text):
        wire_format.decode_client_message(msgpack.packb({"t": kind, "protocol": 2, "build": "b"}))
    with pytest.raises(BadMessage, match="header: Object missing required field"):
        wire_format.decode_client_message(msgpack.packb({"t": kind, "protocol": PROTOCOL}))


@pytest.mark.parametrize("key", sorted(LEAVE))
def test_a_header_with_a_hole(key: str) -> None:
    """A key that is missing is named."""
    with pytest.raises(BadMessage, match=f"header: Object missing required field `{key}`"):
        wire_format.decode_client_message(
            msgpack.packb({k: v for k, v in LEAVE.items() if k != key})
        )


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",  # a code that MessagePack never uses
        b"\xc0",
        b"\x93\x01\x02\x03",
        b"\x01\x02",  # more than one value
        b"\x91" * 4000,  # nested deeper than the parser's stack
        b"\x81\xa1t" * 1000,
        b"\xdf\xff\xff\xff\xff",  # a map that claims 4 G entries
        b"\xdd\xff\xff\xff\xff",
        b"\xdb\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\xc9\xff\xff\xff\xff\x01",
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp, which is an extension
        b"\x81\xa2\xff\xfe\x01",  # a key that is not UTF-8
        b"\x81\x01\x02",  # a key that is not a string
        b"\x81\x91\x01\x02",  # nor hashable
        b"\x81\xc4\x01t\x01",
        b"\x00" * 4097,
        bytes(range(256)) * 16,
        b"\x82\xa1x" + b"\x91" * 3900 + b"\x01\xa1t\xa4push",  # deep, and before the tag
        b"\x82\xa1t\xa5leave\xa1x" + b"\x91" * 3900,
        b"\x82\xa1t\xa4push\xa4keys\xdd\x00\x00\x00\x40",
        b"\x82\xa1t\xa4push\xa4keys\xdd\xff\xff\xff\xff",
        b"\x82\xa1t\xa7install\xa5slots\xdd\xff\xff\xff\xff\xa1x",
        b"\x82\xa1t\xa6weights\xa4keys\xdd\x7f\xff\xff\xff\x01",
        b"\x82\xa1t\xa4push\xa3job\xdb\x7f\xff\xff\xff\x01",
    ],
)
def test_headers_that_are_none(header: bytes) -> None:
    """An invalid depth, length or type in a header only leads to a refusal in one line.

    Whatever lengths it claims, it makes the parser allocate no more than a few times its own size.
    """
    for decode in (wire_format.decode_client_message, wire_format.decode_reply):
        tracemalloc.start()
        with pytest.raises(BadMessage, match="header: ") as caught:
            decode(header)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 16 * wire_format.MAX_HEADER_BYTES
        assert "\n" not in str(caught.value)


@settings(max_examples=500)
@given(st.binary(max_size=200), st.integers(0, 200), st.sampled_from(REQUESTS + REPLIES))
@example(b"", 0, REQUESTS[0])
def test_any_bytes_are_a_message_or_refused(noise: bytes, at: int, message: Message) -> None:
    """Random bytes, and real headers with random bytes in them, give a message or BadMessage."""
    header = wire_format.encode(message)
    for mangled in (noise, header[:at] + noise + header[at + len(noise) :], header[:at]):
        try:
            assert isinstance(wire_format.decode_client_message(mangled), Message)
        except BadMessage:
            pass
        try:
            assert isinstance(wire_format.decode_reply(mangled), Message)
        except BadMessage:
            pass


def test_a_loss_may_be_anything() -> None:
    """Losses and times are only for the records, so infinity and NaN are accepted."""
    push = msgspec.structs.replace(REQUESTS[2], loss=float("inf"), rtt_s=float("nan"))
    came = wire_format.decode_client_message(wire_format.encode(push))
    assert isinstance(came, Push)
    assert came.loss == np.inf
    assert np.isnan(came.rtt_s)


def test_states_may_exceed_headers() -> None:
    """The ledger of a thousand workers travels; more than 64 MB does not."""
    entries = {f"{LONG[:100]}{n}": LedgerEntry(n, seq=n, clock=TOP) for n in range(1000)}
    saved = SavedProgress(7, 8, 9, Ledger(entries, floor=3))
    assert wire_format.decode_state(wire_format.encode_state(saved), SavedProgress) == saved
    with pytest.raises(BadMessage, match="expected at most 67108864 bytes, got 67108865"):
        wire_format.decode_state(bytes((64 << 20) + 1), SavedProgress)


@pytest.mark.parametrize("flaw", [{"version": -1}, {"version": 1 << 63}, {"steps": 0.5}, {"x": 1}])
def test_states_are_checked(flaw: dict[str, Any]) -> None:
    """A saved state with a number that a shard cannot have is refused."""
    good = {"version": 0, "steps": 0, "samples": 0, "ledger": {"entries": {}, "floor": 0}}
    assert wire_format.decode_state(msgpack.packb(good), SavedProgress) == SavedProgress(
        0, 0, 0, Ledger()
    )
    if "x" in flaw:
        flaw = {"ledger": {"entries": {"w": {"incarnation": -1}}}}
    with pytest.raises(BadMessage, match="Expected `int`"):
        wire_format.decode_state(msgpack.packb(good | flaw), SavedProgress)


# --- envelopes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, wire_format.MAX_TOGETHER])
def test_envelopes_come_back(count: int) -> None:
    """Each message is found with its own frames, uncopied, in the order sent."""
    weights = np.arange(8, dtype=np.float32)
    said = [(message, (weights,) * n) for n, message in enumerate(REQUESTS[:count])]
    first, *frames = wire_format.enclose(said)
    assert len(first) <= wire_format.MAX_TOGETHER * (wire_format.MAX_HEADER_BYTES + 4)
    found = list(wire_format.disclose(first, frames))
    assert [wire_format.decode_client_message(header) for header, _ in found] == REQUESTS[:count]
    assert [len(own) for _, own in found] == list(range(count))
    assert all(np.shares_memory(np.frombuffer(f, "<f4"), weights) for _, own in found for f in own)


@pytest.mark.parametrize(
    ("first", "frames"),
    [
        (b"", 0),
        (b"\0", 0),
        (b"\1\0\0\0", 0),
        (b"\1\0\0\0xy", 0),
        (b"\1\0\0\0x", 1),
        (b"\1\0\2\0x", 1),
        (b"\1\0\xff\xffx", 0),
        (b"\xff\xff\0\0x", 0),
        (b"\0\0\0\0" * 9, 0),
    ],
)
def test_envelopes_that_do_not_add_up(first: bytes, frames: int) -> None:
    """Every byte and every frame belongs to one message, and there are at most eight of those."""
    with pytest.raises(BadMessage, match=r"^envelope: "):
        wire_format.disclose(first, [b"f"] * frames)


@settings(max_examples=300)
@given(st.binary(max_size=80), st.integers(0, 4))
def test_any_bytes_are_an_envelope_or_refused(noise: bytes, frames: int) -> None:
    """The messages returned never exceed the bytes and frames that arrived."""
    try:
        found = list(wire_format.disclose(noise, [b"f"] * frames))
    except BadMessage:
        return
    assert sum(len(header) + 4 for header, _ in found) == len(noise)
    assert sum(len(own) for _, own in found) == frames
