"""Messages in parts over several connections: whole, in order and bounded."""

import itertools
import random
import socket
import struct
from contextlib import closing, suppress

import msgspec
import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.threads import local_shards
from ps.transport import shard_sockets
from ps.transport.link_emulator import LinkEmulator
from ps.transport.link_model import parse_link
from ps.transport.striping import (
    MAX_STRIPES,
    MIN_BYTES,
    TOKEN_BYTES,
    Cutter,
    Gatherer,
    Parts,
    stripes_for,
)
from shards import wire_format
from shards.errors import BadInput, BadMessage, Resynchronise
from shards.messages import AskStatus
from tests.support.eventually import eventually

SEED = 31
TOKEN = b"t" * TOKEN_BYTES
SENDER = b"\xff\xfe" + TOKEN  # the mark before it: no address begins so
PLENTY = 1 << 30


def message(dice: random.Random, number: int) -> list[bytes]:
    """A message that contains its number, of no, few or many bytes, in one frame or several."""
    sizes = [dice.choice((0, 1, 100, MIN_BYTES + 3, 2 * MIN_BYTES)) for _ in range(3)]
    frames = [dice.randbytes(size) for size in sizes[: dice.randrange(4)]]
    return [struct.pack("<I", number), *frames]


def as_bytes(parts: Parts) -> list[bytes]:
    return [bytes(part) for part in parts]


def number_of(parts: Parts) -> int:
    (number,) = struct.unpack("<I", parts[0])
    return int(number)


def over_the_wire(part: Parts) -> Parts:
    """What the other side receives: the same bytes in other memory."""
    return [memoryview(bytes(frame)) for frame in part]


def lanes_of(messages: list[list[bytes]], stripes: int) -> list[list[Parts]]:
    """The parts that each connection carries, in order."""
    cutter = Cutter(TOKEN)
    cut = [cutter.cut(list(one), stripes) for one in messages]
    return [[over_the_wire(parts[index]) for parts in cut] for index in range(stripes)]


def received(gatherer: Gatherer, lanes: list[list[Parts]], dice: random.Random) -> list[Parts]:
    """Take the connections' parts in an order that keeps each connection's own."""
    found = []
    lanes = [list(lane) for lane in lanes]
    while any(lanes):
        index = dice.choice([index for index, lane in enumerate(lanes) if lane])
        whole = gatherer.take(b"%d" % index, lanes[index].pop(0))
        if whole is not None:
            assert whole[0] == SENDER
            found.append(whole[1])
    return found


@pytest.mark.parametrize("stripes", [2, 3, 8, MAX_STRIPES])
def test_whatever_arrives_when_messages_come_whole_and_in_order(stripes: int) -> None:
    """If only each connection keeps its order, all messages arrive intact."""
    dice = random.Random(SEED + stripes)
    for _ in range(10):
        messages = [message(dice, number) for number in range(8)]
        gatherer = Gatherer(PLENTY)
        found = received(gatherer, lanes_of(messages, stripes), dice)
        assert list(map(as_bytes, found)) == messages
        assert gatherer.buffer_bytes == 0


def test_what_is_lost_holds_back_nothing() -> None:
    """Parts are lost and doubled: complete messages come once and in order, the others never."""
    dice = random.Random(SEED)
    for _ in range(30):
        messages = [message(dice, number) for number in range(10)]
        lanes = lanes_of(messages, 4)
        lost = {(dice.randrange(4), number) for number in range(9) if dice.random() < 0.3}
        lanes = [
            [part for number, part in enumerate(lane) if (index, number) not in lost]
            for index, lane in enumerate(lanes)
        ]
        doubled = [[part for part in lane for _ in range(dice.randint(1, 2))] for lane in lanes]
        found = received(gatherer := Gatherer(PLENTY), doubled, dice)
        whole = [number for number in range(10) if number not in {number for _, number in lost}]
        assert list(map(number_of, found)) == whole
        assert all(as_bytes(parts) == messages[number_of(parts)] for parts in found)
        assert gatherer.buffer_bytes == 0, "the last one was whole, so nothing is waited for"


def test_connections_that_break_may_mix_up_anything() -> None:
    """In any order at all, each message comes out whole and once, and never after a later one."""
    dice = random.Random(SEED)
    for _ in range(50):
        messages = [message(dice, number) for number in range(5)]
        parts = list(itertools.chain.from_iterable(lanes_of(messages, 3)))
        dice.shuffle(parts)
        gatherer = Gatherer(PLENTY)
        found = [whole[1] for part in parts if (whole := gatherer.take(b"", part)) is not None]
        numbers = list(map(number_of, found))
        assert numbers == sorted(set(numbers))
        assert all(as_bytes(parts) == messages[number_of(parts)] for parts in found)


def test_only_what_is_cut_is_copied() -> None:
    """Views of the arrays are sent; a frame that was not cut comes out without a copy."""
    gradient = np.arange(MIN_BYTES, dtype=np.float32)
    small = b"small"
    lanes = Cutter(TOKEN).cut([small, gradient.data], 4)
    sent = [np.frombuffer(piece, np.uint8) for _, *pieces in lanes for piece in pieces]
    assert all(np.shares_memory(piece, gradient) for piece in sent[1:])
    sizes = [sum(map(len, pieces)) for _, *pieces in lanes]
    assert max(sizes) - min(sizes) <= 4, "even shares"
    gatherer = Gatherer(PLENTY)
    for part in lanes[:-1]:
        assert gatherer.take(b"", part) is None
    whole = gatherer.take(b"", lanes[-1])
    assert whole is not None
    first, frame = whole[1]
    assert np.shares_memory(np.frombuffer(first, np.uint8), sent[0])
    found = np.frombuffer(frame, np.float32)
    assert found.flags.aligned
    assert not np.shares_memory(found, gradient)
    np.testing.assert_array_equal(found, gradient)


def test_one_connection_needs_no_parts() -> None:
    """Over one connection a message goes whole, and its sender is its address."""
    envelope: Parts = [wire_format.encode(AskStatus(1, "job")), b"frame"]
    assert Cutter(TOKEN).cut(envelope, 1) == [envelope]
    assert Gatherer(PLENTY).take(b"peer", envelope) == (b"peer", envelope)
    assert Gatherer(PLENTY).take(b"peer", []) == (b"peer", [])


def test_answers_go_where_the_parts_come_from() -> None:
    """A sender is answered over its latest connections; one without parts, at its address."""
    gatherer = Gatherer(PLENTY)
    first, second = (list(lane) for lane in lanes_of([[b"a"], [b"b"]], 2))
    gatherer.take(b"x", first[0])
    assert gatherer.addresses(SENDER) == [], "nothing is known of its other connection"
    assert gatherer.take(b"y", second[0]) == (SENDER, [b"a"])
    assert gatherer.addresses(SENDER) == [b"x", b"y"]
    gatherer.take(b"z", second[1])
    assert gatherer.addresses(SENDER) == [b"x", b"z"]
    gatherer.take(b"gone", second[0])
    assert gatherer.addresses(SENDER) == [b"x", b"z"], "what comes late says nothing new"
    assert gatherer.addresses(b"x") == [b"x"]


def test_a_receiver_that_begins_anew_goes_on() -> None:
    """A restarted shard accepts a worker's next message, whatever its number."""
    first, second = lanes_of([[b"%d" % number] for number in range(3)], 2)
    gatherer = Gatherer(PLENTY)
    assert gatherer.take(b"", first[2]) is None
    assert gatherer.take(b"", second[2]) == (SENDER, [b"2"])


def test_unfinished_messages_are_bounded() -> None:
    """One sender may hold its limit, evicting its oldest; many hold four times that."""
    most = 4 * MIN_BYTES
    first, second = lanes_of([[bytes(2 * MIN_BYTES)] for _ in range(10)], 2)
    gatherer = Gatherer(most)
    for part in first:
        gatherer.take(b"", part)
        assert gatherer.buffer_bytes <= most
    whole = [gatherer.take(b"", part) is not None for part in second]
    assert whole[-1]
    assert 1 < sum(whole) < 4
    for sender in range(50):
        token = sender.to_bytes(TOKEN_BYTES, "big")
        for part in Cutter(token).cut([bytes(3 * MIN_BYTES)], 3)[:2]:
            gatherer.take(b"", part)
            assert gatherer.buffer_bytes <= 4 * most
    assert gatherer.buffer_bytes > 2 * most
    with pytest.raises(BadMessage):
        gatherer.take(b"", [lanes_of([[b"x"]], 3)[0][0][0]])


def test_empty_parts_and_many_senders_are_bounded() -> None:
    """Empty parts count, too, and the sender that was silent longest is forgotten."""
    gatherer = Gatherer(100_000)
    for part in lanes_of([[b""]] * 1000, 2)[1]:
        gatherer.take(b"", part)
    assert 0 < gatherer.buffer_bytes <= 100_000
    for sender in range(3000):
        part = Cutter(sender.to_bytes(TOKEN_BYTES, "big")).cut([b""], 2)[1]
        gatherer.take(b"", over_the_wire(part))
    assert gatherer.buffer_bytes <= 400_000
    assert gatherer.addresses(SENDER) == []


def test_a_new_sender_puts_out_the_one_longest_silent() -> None:
    """With room for one sender, a shard's unfinished parts go when its next life sends."""
    gatherer = Gatherer(PLENTY, 1)
    gatherer.take(b"", Cutter(TOKEN).cut([bytes(MIN_BYTES)], 2)[0])
    held = gatherer.buffer_bytes
    gatherer.take(b"", Cutter(b"u" * TOKEN_BYTES).cut([b"x"], 2)[0])
    assert held > MIN_BYTES // 2 > gatherer.buffer_bytes > 0


def test_a_stranger_costs_next_to_nothing() -> None:
    """Until a sender is trusted, small messages come whole, large parts are refused, and however
    many send parts, little is held. What a tick finds is dropped, although more keeps coming.
    """
    gatherer = Gatherer(PLENTY, guarded=True)
    first, second = lanes_of([[b"hello"], [bytes(MIN_BYTES)], [bytes(MIN_BYTES)]], 2)
    for lane in (first, second):
        with pytest.raises(Resynchronise, match="yet to name the job"):
            gatherer.take(b"", lane[1])
    for sender in range(3000):
        token = sender.to_bytes(TOKEN_BYTES, "big")
        gatherer.take(b"", over_the_wire(Cutter(token).cut([bytes(20_000)], 2)[0]))
        assert gatherer.buffer_bytes < 3 << 20
    gatherer.tick()
    assert gatherer.buffer_bytes == 0
    assert gatherer.take(b"x", lanes_of([[b"hello"]], 2)[0][0]) is None
    assert gatherer.take(b"y", lanes_of([[b"hello"]], 2)[1][0]) == (SENDER, [b"hello"])
    assert gatherer.addresses(SENDER) == [b"x", b"y"]
    gatherer.trust(SENDER)
    assert gatherer.take(b"x", first[2]) is None
    assert gatherer.buffer_bytes > MIN_BYTES // 2
    whole = gatherer.take(b"y", second[2])
    assert whole is not None
    assert as_bytes(whole[1]) == [bytes(MIN_BYTES)]


def test_strangers_evict_no_sender_that_is_trusted() -> None:
    """However many come, an answer to a worker has an address; senders that came whole need no
    trust."""
    gatherer = Gatherer(PLENTY, 4, guarded=True)
    first, second = lanes_of([[b"hello"]], 2)
    gatherer.take(b"x", first[0])
    gatherer.take(b"y", second[0])
    gatherer.trust(SENDER)
    gatherer.trust(b"whole")
    for sender in range(50):
        token = sender.to_bytes(TOKEN_BYTES, "big")
        gatherer.take(b"", over_the_wire(Cutter(token).cut([b""], 2)[1]))
    assert gatherer.addresses(SENDER) == [b"x", b"y"]


def test_what_does_not_move_is_dropped() -> None:
    """The parts of a sender that dies in the middle of a message are soon dropped."""
    first, second = lanes_of([[b"a"], [b"b"]], 2)
    gatherer = Gatherer(PLENTY)
    gatherer.take(b"", first[0])
    gatherer.tick()
    assert gatherer.buffer_bytes > 0
    gatherer.tick()
    assert gatherer.buffer_bytes == 0
    assert gatherer.take(b"", second[0]) is None
    gatherer.take(b"", first[1])
    assert gatherer.take(b"", second[1]) == (SENDER, [b"b"])


def test_a_sender_that_was_put_out_is_answered_nowhere() -> None:
    """Nor once some of its connections are known again: until all are, its answer has no address.
    An address as long as a token is none.
    """
    first, second = (list(lane) for lane in lanes_of([[b"a"], [b"b"]], 2))
    gatherer = Gatherer(PLENTY, 1)
    gatherer.take(b"x", first[0])
    gatherer.take(b"y", second[0])
    gatherer.take(b"z", Cutter(b"u" * TOKEN_BYTES).cut([b"a"], 2)[0])
    assert gatherer.addresses(SENDER) == []
    gatherer.take(b"x", first[1])
    assert gatherer.addresses(SENDER) == []
    assert gatherer.take(b"y", second[1]) == (SENDER, [b"b"])
    assert gatherer.addresses(SENDER) == [b"x", b"y"]
    assert gatherer.addresses(TOKEN) == [TOKEN]


def test_mangled_parts_are_refused() -> None:
    """Malformed or false headers raise BadMessage, and the sender's own messages still arrive."""
    header = struct.Struct(f"<2s{TOKEN_BYTES}sQBB")
    mark = b"\xff\xfe"

    def said(number: int, index: int, stripes: int, *lengths: int, token: bytes = TOKEN) -> bytes:
        lists = b"".join(struct.pack("<Q", length) for length in lengths)
        return header.pack(mark, token, number, index, stripes) + lists

    gatherer = Gatherer(PLENTY)
    gatherer.take(b"", [said(1, 1, 2)])
    for wrong in (
        mark,
        said(2, 0, 2, 1)[:-1],
        said(2, 0, 2),  # no lengths
        said(2, 1, 2, 5),  # lengths where none belong
        said(2, 2, 2),
        said(0, 1, 2),
        said(2, 0, 1, 1),
        said(2, 1, MAX_STRIPES + 1),
        said(2, 1, 3),  # of another count than before
    ):
        with pytest.raises(BadMessage):
            gatherer.take(b"", [wrong, b"x"])
    for lengths in ([2**63, 2**63], [2**40], [0], [1, 1]):
        other = Gatherer(PLENTY)
        other.take(b"", [said(1, 1, 2)])
        with pytest.raises(BadMessage, match="bytes by their lengths, got 1"):
            other.take(b"", [said(1, 0, 2, *lengths), b"x"])
    assert gatherer.take(b"", [said(1, 0, 2, 0, 1), b"x"]) == (SENDER, [memoryview(b""), b"x"])
    dice = random.Random(SEED)
    for _ in range(2000):
        wild = mark + dice.randbytes(dice.randrange(60))
        try:
            gatherer.take(b"", [wild, dice.randbytes(9)])
        except BadMessage:
            continue
    assert gatherer.buffer_bytes < 4 << 20


def test_how_many_follows_from_the_round_trip() -> None:
    """One for a short round trip or small messages; 8 at 100 ms, and never more than the limit."""
    assert stripes_for(0.02, PLENTY) == 1
    assert stripes_for(1.0, MIN_BYTES - 1) == 1
    assert stripes_for(0.021, MIN_BYTES) == 2
    assert stripes_for(0.1, PLENTY) == 8
    assert stripes_for(float("inf"), PLENTY) == MAX_STRIPES


# --- on sockets -----------------------------------------------------------------------------------

TABLE = ps.DenseTable("far", (ps.TensorSpec("w", (200_000,)),))
GRADIENT = np.arange(TABLE.size, dtype=np.float32) % 7


def trained(client: Client) -> NDArray[np.float32]:
    """The weights after three updates by this client."""
    for _ in range(3):
        client.pull()
        client.push(GRADIENT)
    client.flush()
    return client.pull().weights


def connections(client: Client) -> list[int]:
    return [len(stripes) for stripes in client._current.links._stripes]


def test_a_client_over_several_connections_learns_the_same() -> None:
    """Stripes change only the route: three updates over one, four and sixteen."""
    learned = []
    for stripes in (1, 4, MAX_STRIPES):
        with (
            local_shards(shard_specs(TABLE, shards=2)) as cluster,
            # Nothing is repeated because the machine was busy.
            Client(cluster, worker="w", transport="tcp", stripes=stripes, retry_s=10.0) as client,
        ):
            assert connections(client) == [stripes] * 2
            learned.append(trained(client))
            assert client.duplicates == 0
    np.testing.assert_array_equal(learned[1], learned[0])
    np.testing.assert_array_equal(learned[2], learned[0])


def test_an_answer_larger_than_what_is_held_comes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit for unfinished answers follows the shard's part, so the largest ones arrive."""
    monkeypatch.setattr(shard_sockets, "_UNFINISHED_BYTES", 1000)
    with (
        local_shards(shard_specs(TABLE)) as cluster,
        Client(cluster, worker="w", transport="tcp", stripes=4, patience_s=20.0) as client,
    ):
        assert connections(client) == [4]
        assert client.pull().weights.size == TABLE.size


def test_a_long_link_gets_as_many_as_its_round_trip_wants() -> None:
    """Measured at the start, by latency; a small table has one connection on any link."""
    small = ps.DenseTable("near", (ps.TensorSpec("w", (100,)),))
    found = []
    for table in (TABLE, small):
        with (
            local_shards(shard_specs(table)) as cluster,
            Client(cluster, worker="w", link=parse_link("rtt=40ms")) as client,
        ):
            found += connections(client)
    assert found[0] >= stripes_for(0.04, PLENTY), "more, where a busy machine adds to it"
    assert found[1] == 1


def test_memory_that_is_shared_needs_no_stripes() -> None:
    """Only TCP traffic is cut."""
    with (
        local_shards(shard_specs(TABLE)) as cluster,
        Client(cluster, worker="w", stripes=4) as client,
    ):
        assert client.transports == ("shm",)
        assert connections(client) == [1]


@pytest.mark.parametrize("stripes", [0, MAX_STRIPES + 1])
def test_a_number_that_cannot_be_is_refused(stripes: int) -> None:
    """The valid numbers are one to the maximum."""
    with (
        local_shards(shard_specs(TABLE)) as cluster,
        pytest.raises(BadInput, match=f"stripes: expected 1 to {MAX_STRIPES}, got {stripes}"),
    ):
        Client(cluster, worker="w", stripes=stripes)


def test_connections_that_are_cut_cost_a_repetition() -> None:
    """Some break during training: they come back, and each push counts once."""
    specs = shard_specs(TABLE, lease_s=60)
    with local_shards(specs) as cluster:
        with closing(LinkEmulator(cluster.endpoints, parse_link("rtt=10ms"))) as slow:
            behind = msgspec.structs.replace(cluster, endpoints=slow.endpoints)
            with Client(behind, worker="w", transport="tcp", stripes=4, retry_s=0.3) as client:
                for step in range(6):
                    client.pull()
                    client.push(GRADIENT)
                    if step % 2:
                        break_some(slow, step)
                client.flush()
                assert client.seq == 6
        with ps.AdminClient(cluster) as console:
            (status,) = console.status()
            learned = console.read()
    assert status.version == 6
    np.testing.assert_allclose(TABLE.views(learned)["w"], -0.06 * GRADIENT[:200_000], rtol=1e-5)


def test_a_crowd_of_strangers_costs_no_answer() -> None:
    """A parked pull is answered although more strangers came than a shard remembers."""
    spec = msgspec.structs.replace(shard_specs(TABLE)[0], bound=0)
    with (
        local_shards([spec]) as cluster,
        ps.AdminClient(cluster) as console,
        Client(cluster, worker="a", transport="tcp", stripes=2, retry_s=0.3) as client,
        Client(cluster, worker="b", transport="tcp") as slowest,
    ):
        client.pull()
        client.push(GRADIENT)
        client.flush()
        client.prefetch(1)
        eventually(
            lambda: any(worker.waiting for worker in console.status()[0].workers),
            because="the pull is parked",
        )
        crowd(cluster.endpoints[0], 1100)
        slowest.pull()
        slowest.push(GRADIENT)
        slowest.flush()
        assert client.pull(1).versions == (2,)


def crowd(endpoint: str, senders: int) -> None:
    """`senders` strangers begin messages, and all of it has been received."""
    context = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    try:
        stranger.connect(endpoint)
        for number in range(senders):
            token = number.to_bytes(TOKEN_BYTES, "big")
            stranger.send_multipart(Cutter(token).cut([b""], 2)[1])
        stranger.send(b"no message")
        assert stranger.poll(60_000), "it is refused, behind the parts"
    finally:
        context.destroy(linger=0)


def break_some(slow: LinkEmulator, which: int) -> None:
    """Cut one of the connections now, as a router that forgets it does."""

    def cut() -> bool:
        with suppress(OSError):  # it has been cut meanwhile
            if pipes := [pipe for pipe in slow._pipes if not pipe.cut_off]:
                pipes[which % len(pipes)]._source.shutdown(socket.SHUT_RDWR)
                return True
        return False

    eventually(cut, because="there is a connection to cut")
