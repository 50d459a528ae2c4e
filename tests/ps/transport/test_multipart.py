"""Frames leave a socket as they entered it."""

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
import zmq

from ps.transport import multipart
from shards.wire_format import Buffer
from tests.support.eventually import eventually

Pair = tuple["zmq.Socket[bytes]", "zmq.Socket[bytes]"]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two connected sockets, with room for eight messages between them."""
    with zmq.Context() as context, context.socket(zmq.PAIR) as one, context.socket(zmq.PAIR) as two:
        one.setsockopt(zmq.SNDHWM, 4)
        two.setsockopt(zmq.RCVHWM, 4)
        two.bind("inproc://pair")
        one.connect("inproc://pair")
        yield one, two


def taken(socket: "zmq.Socket[bytes]", most: int = 16) -> list[list[bytes]]:
    came = multipart.Inbox(socket).take_messages(most)
    return [[bytes(frame) for frame in multipart.views(message)] for message in came]


def test_messages_come_out_as_they_went_in(pair: Pair) -> None:
    """All frames arrive in order: empty ones, small ones and ones too large to be copied."""
    one, two = pair
    sent = [[b"alone"], [b"", b"x" * 200, b"y" * 70_000], [b"last", b""]]
    for message in sent:
        multipart.send(one, message)
    assert taken(two) == sent


def test_no_more_are_taken_than_are_wanted(pair: Pair) -> None:
    """The others wait; without any, none is returned and the call does not wait."""
    one, two = pair
    for number in range(5):
        multipart.send(one, [b"%d" % number])
    assert taken(two, 2) == [[b"0"], [b"1"]]
    assert taken(two, 3) == [[b"2"], [b"3"], [b"4"]]
    assert taken(two) == []


def test_a_frame_outlives_what_comes_after_it(pair: Pair) -> None:
    """It is a view of its own memory, whether small or large."""
    one, two = pair
    kept: list[Buffer] = []
    for size in (10, 100_000, 10, 100_000):
        multipart.send(one, [bytes([len(kept)]) * size])
        kept += [multipart.views(message)[0] for message in multipart.Inbox(two).take_messages(1)]
    assert [(frame[0], len(frame)) for frame in kept] == [
        (0, 10), (1, 100_000), (2, 10), (3, 100_000),
    ]  # fmt: skip


def test_a_full_socket_takes_nothing_of_a_message(pair: Pair) -> None:
    """It raises, and the earlier messages are complete."""
    one, two = pair
    room = 0
    with contextlib.suppress(zmq.Again):
        while room < 100:
            multipart.send(one, [b"a", b"b"])
            room += 1
    assert 0 < room < 100
    assert taken(two, 100) == [[b"a", b"b"]] * room


def test_the_reference_to_a_watched_frame_dies_when_it_has_left(pair: Pair) -> None:
    """A large frame has left when its receiver has dropped it; a small one is copied, so it has
    left at once. The array itself lives on.
    """
    one, two = pair
    array = np.ones(100_000, np.float32)
    small, large = multipart.send_watched(one, [b"head", array.data])
    assert small() is None
    received = multipart.Inbox(two)
    eventually(lambda: two.poll(0), because="the message comes")
    (frames,) = received.take_messages(1)
    assert large() is not None
    assert np.array_equal(np.frombuffer(frames[1].bytes, np.float32), array)
    frames.clear()
    eventually(lambda: large() is None, because="the receiver has dropped the frame")


def test_a_message_of_too_many_frames_is_dropped(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of it is delivered, one of its frames identifies the sender, and the next message is
    whole; a very long one takes several calls.
    """
    monkeypatch.setattr(multipart, "_DROPPED_A_TURN", 30)
    one, two = pair
    refused: list[zmq.Frame] = []
    inbox = multipart.Inbox(two, 4, refused.append)
    for message in ([b"a"] * 4, [b"x"] * 100, [b"b"]):
        multipart.send(one, message)
    turns = [[[frame.bytes for frame in came] for came in inbox.take_messages(4)] for _ in range(5)]
    assert turns == [[[b"a"] * 4], [], [], [[b"b"]], []]
    assert [frame.bytes for frame in refused] == [b"x"]
