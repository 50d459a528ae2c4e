"""Copies to, within and from a device keep the order of `worker/training/device_pipeline.py`.

The step is `gradient = weights * x + number`, so that a stale or torn array shows in the result.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from shards.buffer_pool import Buffers
from tests.support.fake_device import FakeDevice, Work
from worker.training import device_pipeline
from worker.training.device import Device
from worker.training.device_pipeline import UNDER_WAY, DevicePipeline, Layout, Packet

SIZE, ROWS = 512, 4
LAYOUT: Layout = {
    "x": ((ROWS,), np.dtype(np.float32)),
    "number": ((1,), np.dtype(np.uint64)),
}


class Steps:
    """Steps on a device, with buffers recycled as a client does."""

    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.arena = DevicePipeline(device, SIZE)
        with device.use():
            self.packet = Packet(device, LAYOUT)
            self.buffers = Buffers(SIZE, lambda size: device.allocate_pinned((size,), np.float32))
        self.begun: list[tuple[NDArray[np.float32], float, NDArray[np.float32]]] = []

    def begin(self, number: int) -> None:
        weights, out = self.buffers.take(), self.buffers.take()
        self.device.host_writes(weights)
        weights[:] = number
        x = np.full(ROWS, 10 + number, np.float32)
        wanted = np.full(SIZE, number * (10 + number) + number, np.float32)
        arrays: dict[str, NDArray[Any]] = {"x": x, "number": np.array([number], np.uint64)}
        self.arena.begin(weights, self.packet, arrays, self.compute, out)
        self.begun.append((wanted, 7.0 * number, out))

    def compute(self) -> None:
        a, fixed = self.arena, self.packet.fixed

        def run() -> None:
            a.gradient[:] = a.weights * fixed["x"][0] + fixed["number"].astype(np.float32)
            a.losses[:] = 7 * fixed["number"]

        read, written = (a.weights, self.packet.block), (a.gradient, a.losses)
        self.device.queue(Work("step", run, read, written))

    def finish(self) -> None:
        """The oldest step's results are its own."""
        wanted, loss, out = self.begun.pop(0)
        assert self.arena.finish().tolist() == [loss]
        np.testing.assert_array_equal(out, wanted)


def run(device: FakeDevice, count: int, ahead: int) -> Steps:
    """`count` steps, `ahead` of them begun before one is finished."""
    steps = Steps(device)
    for number in range(count):
        steps.begin(number)
        if len(steps.begun) > ahead:
            steps.finish()
    while steps.begun:
        steps.finish()
    return steps


@pytest.mark.parametrize("ahead", [0, UNDER_WAY - 1])
def test_every_step_sees_its_own_inputs_and_leaves_its_own_results(ahead: int) -> None:
    """One at a time and two under way: values are right and no use of an array races another."""
    device = FakeDevice()
    steps = run(device, 12, ahead)
    assert device.hazards == []
    assert len(steps.buffers) <= 2 * (ahead + 1) + 1


@pytest.mark.parametrize("ahead", [0, UNDER_WAY - 1])
def test_nothing_is_allocated_after_the_first_steps(ahead: int) -> None:
    """No number of steps allocates more, on the device or of page-locked memory."""
    few, many = FakeDevice(), FakeDevice()
    run(few, 4, ahead)
    run(many, 20, ahead)
    assert many.made == few.made


def test_copies_over_the_bus_run_during_a_step() -> None:
    """With a step begun ahead, the next weights come in while one computes, and the next one
    computes while its gradient leaves: neither waits for the other."""
    device = FakeDevice()
    run(device, 6, ahead=1)
    clocks = {
        name: [clock for found, clock in device.queued if found == name]
        for name in ("upload", "step", "download")
    }
    uploads, downloads = clocks["upload"][::2], clocks["download"][::2]  # weights and gradients
    for number in range(2, 6):
        before = clocks["step"][number - 1]
        assert uploads[number].get("compute", 0) < before["compute"], "a pull during a step"
        gone = downloads[number - 1]
        assert clocks["step"][number].get("down", 0) < gone["down"], "a push during a step"


class Without(FakeDevice):
    """A device that omits one kind of waiting: between two streams, or the host's."""

    def __init__(self, waiter: str, awaited: str) -> None:
        super().__init__()
        self.left_out = (waiter, awaited)

    def wait(self, stream: Any, mark: Any) -> None:
        waiter, awaited = self.left_out
        known = {name: at for name, at in mark.items() if (stream.name, name) != (waiter, awaited)}
        super().wait(stream, known)


@pytest.mark.parametrize(
    ("waiter", "awaited"),
    [("compute", "up"), ("up", "compute"), ("down", "compute"), ("compute", "down")],
    ids=["rule 1", "rule 2", "rule 3", "rule 4"],
)
def test_each_rule_between_streams_is_needed(waiter: str, awaited: str) -> None:
    """An omitted wait is found as a hazard between exactly these two streams."""
    device = Without(waiter, awaited)
    steps = Steps(device)
    steps.begin(1)
    steps.begin(2)
    found = [text for text in device.hazards if f"on {waiter}" in text]
    assert found
    assert all(f"on {awaited}" in text for text in found)


def test_the_host_writes_the_packet_only_when_it_has_arrived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rule 5: without the join, a step computes with the next one's batch."""
    device = FakeDevice()
    joins: list[Any] = []
    real = device.join
    monkeypatch.setattr(device, "join", joins.append)
    steps = Steps(device)
    steps.begin(1)
    assert joins == []
    steps.begin(2)
    assert len(joins) == 1
    monkeypatch.setattr(device, "join", real)
    with pytest.raises(AssertionError):
        steps.finish()


def test_weights_and_gradients_are_held_while_they_travel() -> None:
    """Rules 5 and 6: a caller that drops its arrays at once does not get them back to write on."""
    device = FakeDevice()
    steps = Steps(device)
    steps.begin(1)
    steps.begun[0] = (steps.begun[0][0], 7.0, np.empty(0, np.float32))
    assert len(steps.buffers) == 2
    held = [steps.buffers.take() for _ in range(2)]
    assert len(steps.buffers) == 4, "both were still on their way"
    del held
    steps.arena.finish()


def test_a_third_step_may_not_be_begun() -> None:
    """Two may be under way; drain waits for them, and then there is room again."""
    steps = Steps(FakeDevice())
    for number in range(UNDER_WAY):
        steps.begin(number)
    with pytest.raises(AssertionError, match="more often than finish"):
        steps.begin(9)
    steps.arena.drain()
    steps.begun.clear()
    steps.begin(3)
    steps.finish()


def test_a_packet_takes_only_what_it_was_laid_out_for() -> None:
    """Another dtype or shape would be cast or broadcast in silence."""
    device = FakeDevice()
    with device.use():
        packet = Packet(device, LAYOUT)
    number = np.zeros(1, np.uint64)
    for x in (np.zeros(ROWS), np.zeros((1, ROWS + 1), np.float32)):
        with pytest.raises((TypeError, ValueError)):
            packet.write({"x": x, "number": number})
    assert {view.ctypes.data % device_pipeline._ALIGNMENT for view in packet.fixed.values()} <= {
        packet.block.ctypes.data % device_pipeline._ALIGNMENT
    }


def protocol(device: FakeDevice) -> Device:
    """Checked by mypy: the fake implements the pipeline's interface."""
    return device


_: Callable[[FakeDevice], Device] = protocol
