"""A buffer is reused only when nothing refers to it any more."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import zmq
from numpy.typing import NDArray

from cupy_kernels.backends import HOST
from shards.buffer_pool import _LATELY, Buffers, are_unshared
from shards.parameters import ParameterStore
from shards.rules import Momentum
from tests.support.shard_dsl import SIZE, blank, spec


def test_a_dropped_buffer_is_recycled() -> None:
    """Without a reader one buffer serves for ever; its address does not change."""
    buffers = Buffers(100)
    addresses = set()
    for _ in range(10):
        addresses.add(buffers.take().ctypes.data)
    assert len(addresses) == len(buffers) == 1


def test_held_buffers_are_distinct() -> None:
    """All buffers in use are distinct, and they return one by one."""
    buffers = Buffers(100)
    held = [buffers.take() for _ in range(5)]
    assert len({array.ctypes.data for array in held}) == len(buffers) == 5
    freed = held.pop(2).ctypes.data
    assert buffers.take().ctypes.data == freed
    assert len(buffers) == 5


def test_surplus_buffers_are_freed() -> None:
    """Buffers that were in use together once are freed after a while of disuse; one stays."""
    buffers = Buffers(100)
    held = [buffers.take() for _ in range(6)]
    kept = held.pop()
    del held
    for _ in range(2 * _LATELY):
        buffers.take()
    assert len(buffers) == 3, "one that is held, one that is taken, and one more"
    kept[:] = 7
    for _ in range(2 * _LATELY):
        buffers.take()[:] = 1
    assert kept.min() == 7


def test_buffers_in_regular_use_are_kept() -> None:
    """Four buffers that are in use together again and again stay the same four."""
    buffers = Buffers(100)
    seen: set[int] = set()
    for _ in range(2 * _LATELY):
        held = [buffers.take() for _ in range(4)]
        seen.update(array.ctypes.data for array in held)
        del held
    assert len(seen) == len(buffers) == 4


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
    """A buffer that ZeroMQ still sends is not overwritten: it arrives as it was sent."""
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


def test_buffers_live_where_their_allocator_puts_them() -> None:
    """The allocator is called once per buffer; slices of foreign memory keep it in use too."""
    sizes = []

    def foreign(size: int) -> NDArray[np.float32]:
        sizes.append(size)
        return np.frombuffer(bytearray(4 * size), np.float32)

    buffers = Buffers(100, foreign)
    first = buffers.take()
    reader = first[10:20]
    del first
    second = buffers.take()
    assert not np.shares_memory(second, reader)
    del second, reader
    for _ in range(3):
        buffers.take()
    assert sizes == [100, 100]


def test_a_list_knows_whether_others_read_its_arrays() -> None:
    """A view, a memoryview or another list counts as a reader until it is dropped."""
    arrays = [np.zeros(8, np.float32), np.zeros(8, np.float32)]
    assert are_unshared(arrays)
    for reader in (arrays[1][2:4], arrays[0].data, list(arrays)):
        assert not are_unshared(arrays), reader
    del reader
    assert are_unshared(arrays)
    assert are_unshared([])


def test_slots_have_two_sets_of_arrays_and_no_more() -> None:
    """However often a state is read, one set is in use, and the other is read or spare."""
    held, ones = ParameterStore(spec(rule=Momentum()), Buffers, HOST), np.ones(SIZE, np.float32)
    held.restore(blank().saved, {"net/weights": ones, "net/history": ones})
    seen = set()
    for _ in range(9):
        arrays = held.copy()
        seen.add(arrays["net/history"].ctypes.data)
        held.apply([{"net": ones}], {"net": 0.1})
        del arrays
    assert len(seen) == 2
