"""The memory that a connection's unfinished messages can take in a listening process."""

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from ps.transport import unfinished_messages
from ps.transport.unfinished_messages import Accepted
from tests.fuzz.hostile import spoken_to
from tests.support.eventually import eventually

MB = 1 << 20
MORE = b"\x03" + MB.to_bytes(8, "big") + bytes(MB)  # a frame of 1 MB that is not the last
EMPTY = b"\x01\x00"  # an empty frame that is not the last
GREETING = b"\x01\x02hi\x00\x00"  # a whole message


class Memory:
    """The resident memory that this process pretends to have."""

    def __init__(self) -> None:
        self.resident = 100 * MB

    def __call__(self) -> int:
        return self.resident


class Door:
    """A ROUTER that strangers and a legitimate peer connect to."""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", memory: Memory) -> None:
        self.socket = context.socket(zmq.ROUTER)
        self.memory = memory
        self.accepted = Accepted(self.socket, MB, peers=4)
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{self.port}"

    def heard(self) -> list[list[bytes]]:
        """The number of whole messages that have come; unfinished ones are checked."""
        came = [[frame.bytes for frame in one[1:]] for one in self.accepted.take_messages(16)]
        self.accepted._look_at = 0.0
        self.accepted.check_connections()
        return came

    def grow(self, by: int) -> None:
        """The process seems to take more memory, and checks its connections."""
        self.memory.resident += by
        self.heard()


@pytest.fixture
def door(monkeypatch: pytest.MonkeyPatch) -> Iterator[Door]:
    memory = Memory()
    monkeypatch.setattr(unfinished_messages, "resident_bytes", memory)
    with zmq.Context() as context:
        one = Door(context, memory)
        one.heard()  # the memory so far is not caused by any peer
        yield one
        one.socket.disable_monitor()
        context.destroy(linger=0)


@contextlib.contextmanager
def stranger(door: Door) -> Iterator[socket.socket]:
    """A peer that has shaken hands, and has sent one whole message."""
    with spoken_to(door.endpoint) as connection:
        connection.sendall(GREETING)
        eventually(lambda: [b"hi", b""] in door.heard(), because="the greeting arrives")
        door.accepted._count()
        yield connection


def dropped(connection: socket.socket) -> bool:
    """Whether the other side has reset the connection."""
    connection.setblocking(False)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    return True


def send_until(connection: socket.socket, piece: bytes, enough: Callable[[], bool]) -> bool:
    """Send the same bytes repeatedly, as fast as possible, until `enough` or the connection is
    reset.
    """
    connection.setblocking(False)
    rest = memoryview(piece)

    def sent() -> bool:
        nonlocal rest
        with contextlib.suppress(BlockingIOError):
            while not enough():
                rest = rest[connection.send(rest) :] or memoryview(piece)
        return enough()

    try:
        return eventually(sent, because="enough is sent")
    except ConnectionError:
        return True


def test_a_message_without_an_end_is_dropped_with_its_sender(door: Door) -> None:
    """A peer cannot send more than a message may take, and a legitimate peer is not disturbed."""
    good = door.socket.context.socket(zmq.DEALER)
    good.connect(door.endpoint)
    sent = 0

    def enough() -> bool:
        nonlocal sent
        door.grow(MB)
        sent += MB
        return door.accepted.reset > 0

    with stranger(door) as connection:
        assert send_until(connection, MORE, enough)
        assert sent < 200 * MB
        eventually(lambda: dropped(connection), because="the connection is reset")
    good.send_multipart([b"a", b"b"])
    eventually(lambda: [b"a", b"b"] in door.heard(), because="the good peer's message arrives")
    assert door.accepted.reset == 1


def test_empty_frames_take_more_than_they_weigh(door: Door) -> None:
    """A peer that sends little, but makes the process grow far more, is reset before the limit."""
    with stranger(door) as connection:
        connection.sendall(EMPTY * 200_000)
        door.grow(5 * MB)
        eventually(lambda: unfinished(door) == 400_000, because="all frames are counted")
        assert not was_reset(door)
        door.grow(10 * MB)
        assert was_reset(door)
        eventually(lambda: dropped(connection), because="the connection is reset")


def test_a_peer_that_knows_the_job_is_not_blamed_for_other_memory(door: Door) -> None:
    """Its large message is in flight while the process grows for another reason."""
    with spoken_to(door.endpoint) as connection:
        connection.sendall(GREETING)
        heard: list[zmq.Frame] = []

        def vouched() -> bool:
            for frames in door.accepted.take_messages(16):
                door.accepted.trust(frames[0])
                heard.extend(frames)
            return bool(heard)

        eventually(vouched, because="the greeting arrives")
        door.accepted._count()
        connection.sendall(MORE)
        door.grow(5 * MB)
        eventually(lambda: unfinished(door) == len(MORE), because="the frame is counted")
        door.grow(500 * MB)
        assert door.accepted.reset == 0
        connection.sendall(b"\x00\x00")
        eventually(lambda: [bytes(MB), b""] in door.heard(), because="the message arrives")


def test_many_connections_share_one_bound(door: Door) -> None:
    """Many strangers, each below its own limit, are reset until they are below the common one."""
    with contextlib.ExitStack() as stack:
        crowd = [stack.enter_context(stranger(door)) for _ in range(5)]
        for connection in crowd:
            connection.sendall(MORE * 12)
            door.grow(12 * MB)
            eventually(
                lambda: was_reset(door) or unfinished(door) % len(MORE) == 0,
                because="whole frames are counted, or a stranger is reset",
            )
        eventually(
            lambda: door.heard() or door.accepted.reset,
            because="a stranger is reset or heard",
        )
        eventually(lambda: unfinished(door) <= 36 * MB, because="they share one bound")
        assert 1 <= door.accepted.reset < 5


def test_too_many_frames_are_not_kept(door: Door) -> None:
    """A message with more frames than any of ours is never delivered, and its sender is reset."""
    with stranger(door) as connection:
        connection.sendall(EMPTY * 2000 + b"\x00\x00")
        eventually(
            lambda: door.heard() or door.accepted.reset,
            because="a stranger is reset or heard",
        )
        eventually(lambda: dropped(connection), because="the connection is reset")


def test_looks_are_rare_while_every_peer_knows_the_job(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection of an unknown peer wakes the loop, and looks are frequent until it is known."""
    monkeypatch.setattr(unfinished_messages, "_BUSY", 0)  # however long a look takes here

    def next_look_s() -> float:
        door.accepted._look_at = 0.0
        return door.accepted.check_connections()

    assert next_look_s() == unfinished_messages._CALM_POLL_S
    with stranger(door) as connection:
        assert next_look_s() == unfinished_messages.POLL_S
        connection.sendall(GREETING[4:])
        eventually(lambda: vouched_for(door), because="the greeting arrives")
        assert next_look_s() == unfinished_messages._CALM_POLL_S
        with spoken_to(door.endpoint):
            assert door.accepted.events.poll(10_000), "the loop that waits at it wakes"
            door.accepted.check_connections()
            assert door.accepted._look_at <= time.monotonic() + unfinished_messages.POLL_S


def test_a_message_is_not_counted_for_the_next_connection_of_its_number(door: Door) -> None:
    """What was heard over a connection that has closed since is forgotten."""
    with spoken_to(door.endpoint) as connection:
        connection.sendall(GREETING)
        eventually(lambda: door.accepted.take_messages(16), because="the greeting arrives")
        door.accepted._hear_events()
        assert len(door.accepted._connections) == 1
        heard = dict(door.accepted._heard)
    frame = next(iter(heard.values()))
    eventually(lambda: closed(door), because="no connection is left")
    door.accepted._settle()
    assert frame.get(zmq.SRCFD) not in door.accepted._connections
    assert not door.accepted._heard


def vouched_for(door: Door) -> bool:
    came = door.accepted.take_messages(16)
    for message in came:
        door.accepted.trust(message[0])
    return bool(came)


def closed(door: Door) -> bool:
    """Whether the door has heard that no connection is left."""
    door.accepted._hear_events()
    return not door.accepted._connections


def unfinished(door: Door) -> int:
    """The unfinished bytes of all connections, at the last count."""
    door.heard()
    door.accepted._count()
    return sum(one.partial_bytes for one in door.accepted._connections.values())


def was_reset(door: Door) -> bool:
    return door.accepted.reset > 0
