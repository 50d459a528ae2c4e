"""A buffer is lent again only when nothing refers to it any more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq

from shards.versions import Buffers


def test_a_dropped_buffer_is_recycled() -> None:
    """Without a reader one buffer serves for ever; its address does not change."""
    buffers = Buffers(100)
    addresses = set()
    for _ in range(10):
        addresses.add(buffers.take().ctypes.data)
    assert len(addresses) == len(buffers) == 1


def test_held_buffers_are_distinct() -> None:
    """Every buffer that is still held is another one, and they come back one by one."""
    buffers = Buffers(100)
    held = [buffers.take() for _ in range(5)]
    assert len({array.ctypes.data for array in held}) == len(buffers) == 5
    freed = held.pop(2).ctypes.data
    assert buffers.take().ctypes.data == freed
    assert len(buffers) == 5


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[10:20],
        lambda array: array[10:20][3:4].reshape(1, 1),
        lambda array: array[::7],
        lambda array: array.data,
        lambda array: memoryview(array[5:9].data),
        lambda array: np.frombuffer(array, np.uint8),
        lambda array: zmq.Frame(array.data, copy=False),
        lambda array: {"deep": [(array.view(np.int32),)]},
    ],
    ids=[
        "itself",
        "slice",
        "slice of it",
        "stride",
        "memory",
        "memory of it",
        "bytes",
        "frame",
        "deep",
    ],
)
def test_any_reader_keeps_a_buffer(hold: Callable[[Any], Any]) -> None:
    """Slices, memoryviews and ZeroMQ frames all keep a buffer from being written."""
    buffers = Buffers(100)
    reader = hold(buffers.take())
    for _ in range(3):
        buffers.take()[:] = 1
    assert len(buffers) == 2, "one that is read, one for everyone else"
    del reader


def test_a_message_under_way_keeps_a_buffer() -> None:
    """What ZeroMQ still sends is not written: it arrives as it was when it was sent."""
    size, sent = 100_000, 8
    with zmq.Context() as context, context.socket(zmq.PUSH) as out, context.socket(zmq.PULL) as to:
        out.connect(f"tcp://127.0.0.1:{to.bind_to_random_port('tcp://127.0.0.1')}")
        buffers = Buffers(size)
        for number in range(sent):
            array = buffers.take()
            array[:] = number
            out.send(array.data, copy=False)
        for number in range(sent):
            arrived = np.frombuffer(to.recv(copy=False).buffer, np.float32)
            assert arrived.shape == (size,)
            assert np.all(arrived == number)
    assert 1 <= len(buffers) <= sent
