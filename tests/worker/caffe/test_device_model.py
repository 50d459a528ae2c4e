"""A network trains to the same weights on a device as on the CPU; the device is the late fake.

Its arrays are emulated, so the CUDA sources run; its streams are queues that run as late as they
may, and a captured step is what was queued while it was captured, and nothing else.
"""

import shutil
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupy_kernels.emulator.array import Emulated
from shards.errors import BadInput
from tests.support import tiny_job
from tests.support.fake_gpu import FakeGpu, queue_moves
from tests.support.model_training import LENET, PLANS, TINY, Floats, Trained, digits, same, small
from worker.caffe.device_model import DeviceModel
from worker.caffe.layer import Arrays, Gradients, HostLayer, Shape, StepKey
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.registry import LAYERS
from worker.training.model import Ahead, Batch, Movable

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


@pytest.fixture(autouse=True)
def moves(monkeypatch: pytest.MonkeyPatch) -> None:
    queue_moves(monkeypatch)


@pytest.mark.parametrize("more", PLANS.values(), ids=PLANS)
def test_a_network_on_a_device_trains_as_on_the_cpu(more: dict[str, Any]) -> None:
    """With dropout, through real shards, by every way that the loop has: after 8 steps the weights
    are the CPU's up to float32 rounding; no use of an array raced another, and all but the first
    step were replays of one capture."""
    batches = [small(tiny_job.BATCH, seed) for seed in range(8)]
    device = FakeGpu()
    found = Trained(DeviceModel(TINY, device), batches, **more)
    expected = Trained(CaffeModel(TINY), batches, **more)
    same(found.weights, expected.weights, 1e-5)
    assert device.hazards == []
    assert (device.captures, device.replays) == (1, 7)
    assert found.report.device == "fake:0"
    assert (found.report.steps, found.report.samples) == (
        expected.report.steps,
        expected.report.samples,
    )


def test_lenet_on_a_device_trains_as_on_the_cpu() -> None:
    """The demo's own network, batches of two, one step eager and one replayed, begun ahead."""
    batches = [digits(2, seed) for seed in range(2)]
    device = FakeGpu()
    found = Trained(DeviceModel(LENET, device), batches, prefetch=True)
    expected = Trained(CaffeModel(LENET), batches, prefetch=True)
    same(found.weights, expected.weights, 1e-5)
    assert device.hazards == []
    assert (device.captures, device.replays) == (1, 1)


def steps(model: DeviceModel, batches: Iterator[Batch]) -> Iterator[tuple[float, Floats]]:
    """Losses and gradients, one step at a time, from the model's own start."""
    weights = model.allocate(model.table.size)
    weights[:] = model.initial(3)
    out = model.allocate(model.table.size)
    for number, batch in enumerate(batches):
        yield model.gradient(weights, batch, out, step=number, seed=7), out.copy()


def test_nothing_is_allocated_after_the_capture() -> None:
    """Neither arrays that kernels use nor page-locked memory, however many steps follow."""
    device = FakeGpu()
    model = DeviceModel(TINY, device)
    taken = steps(model, (small(tiny_job.BATCH, seed) for seed in range(6)))
    next(taken)
    next(taken)
    made = device.made, Emulated.allocations
    assert len(list(taken)) == 4
    # Views and moves make none either: what grows is memory of its own.
    assert (device.made, Emulated.allocations) == made


def test_buffers_are_recycled_between_steps() -> None:
    """The client's page-locked arrays: as many as are held at a time, not one a step."""
    made = []
    for count in (3, 9):
        device = FakeGpu()
        batches = [small(2, seed) for seed in range(count)]
        Trained(DeviceModel(TINY, device), batches, prefetch=True)
        made.append(device.made)
    assert made[1] <= made[0] + 2, "an unacknowledged push or two more at a time"


def test_each_shape_of_batch_is_captured_by_itself() -> None:
    """Sizes in turn, the larger after the smaller: every gradient is the CPU's, and a step that was
    captured for one size is replayed when that size comes back."""
    device = FakeGpu()
    model, cpu = DeviceModel(TINY, device), CaffeModel(TINY)
    sizes = [2, 5, 2, 5, 2, 5, 2]
    batches = [small(size, seed) for seed, size in enumerate(sizes)]
    weights, out = cpu.initial(3), cpu.table.empty()
    for number, (loss, gradient) in enumerate(steps(model, iter(batches))):
        expected = cpu.gradient(weights, batches[number], out, step=number, seed=7)
        assert loss == pytest.approx(expected, rel=1e-5)
        same(gradient, out, 1e-5)
    assert (device.captures, device.replays) == (2, 5)
    assert device.hazards == []


def test_a_step_that_is_not_captured_runs_kernel_by_kernel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A failed capture is logged once, with the reason, and the gradients are the same."""
    batches = [small(3, seed) for seed in range(4)]
    refusing = FakeGpu()
    refusing.refuses_capture = "cuBLAS is not for captures"
    found = list(steps(DeviceModel(TINY, refusing), iter(batches)))
    expected = list(steps(DeviceModel(TINY, FakeGpu()), iter(batches)))
    for (loss, gradient), (other_loss, other) in zip(found, expected, strict=True):
        assert loss == other_loss
        np.testing.assert_array_equal(gradient, other)
    assert (refusing.replays, refusing.hazards) == (0, [])
    (told,) = caplog.messages
    assert told == (
        "fake:0: steps on 3 rows are not captured, and run kernel by kernel:"
        " cuBLAS is not for captures"
    )


def test_errors_in_a_batch_are_those_of_the_cpu() -> None:
    """A missing column, two lengths, words, a wrong shape, labels that no class has; and then a
    good batch still works."""
    device = FakeGpu()
    model, cpu, good = DeviceModel(TINY, device), CaffeModel(TINY), small(2, 0)
    out = model.allocate(model.table.size)
    weights = model.allocate(model.table.size)
    wrong: tuple[Batch, ...] = (
        {"data": good["data"]},
        {**good, "label": np.zeros(3, np.int64)},
        {**good, "data": np.array(["a", "b"])},
        {**good, "data": np.zeros((2, 1, 7, 7), np.uint8)},
        {**good, "label": np.array([0, tiny_job.CLASSES])},
        {**good, "label": np.array([0.5, 1.0])},
    )
    for bad in wrong:
        with pytest.raises(BadInput) as told:
            cpu.gradient(weights, bad, out, step=0, seed=0)
        with pytest.raises(BadInput) as found:
            model.gradient(weights, bad, out, step=0, seed=0)
        assert str(found.value) == str(told.value)
    assert np.isfinite(model.gradient(weights, good, out, step=0, seed=0))


def test_models_say_what_they_can() -> None:
    """A network on the host can be moved to a device, and the one there begins ahead."""
    model = CaffeModel(TINY)
    assert isinstance(model, Movable)
    assert not isinstance(model, Ahead)
    moved = model.on(FakeGpu())
    assert isinstance(moved, Ahead)
    assert moved.table == model.table
    np.testing.assert_array_equal(moved.initial(5), model.initial(5))


TINY_NET = tiny_job.NET
BUFFERED = TINY_NET.replace(
    'layer { name: "ip2" ',
    'layer { name: "bn" type: "BatchNorm" bottom: "ip1" top: "ip1" }\nlayer { name: "ip2" ',
)
SOFTENED = BUFFERED.replace(
    'layer { name: "ip2" ',
    'layer { name: "soft" type: "Softsign" bottom: "ip1" top: "ip1" }\nlayer { name: "ip2" ',
)


class Softsign(HostLayer):
    """x / (1 + |x|): a user's own layer, without kernels."""

    def set_up(self) -> tuple[Shape, ...]:
        return (self.bottoms[0],)

    def compute(self, bottoms: Arrays, weights: Arrays, step_key: StepKey) -> Arrays:
        self._over = 1 + np.abs(bottoms[0])
        return (bottoms[0] / self._over,)

    def gradients(self, dtops: Gradients, weights: Arrays, out: Gradients) -> Gradients:
        assert dtops[0] is not None
        return [dtops[0] / self._over**2]


@pytest.mark.parametrize(
    ("net", "replays"), [(BUFFERED, 4), (SOFTENED, 0)], ids=["captured", "not"]
)
def test_buffers_and_layers_on_the_host(
    net: str, replays: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured step moves the statistics of a BatchNorm as the CPU does. A net with a layer that
    has no kernels trains to the same weights, kernel by kernel, and says which layer is why."""
    monkeypatch.setitem(LAYERS, "Softsign", Softsign)
    assert len({TINY_NET, BUFFERED, SOFTENED}) == 3
    description = Description(net, data_shape=(1, 8, 8))
    batches = [small(tiny_job.BATCH, seed) for seed in range(5)]
    device = FakeGpu()
    found = Trained(DeviceModel(description, device), batches)
    expected = Trained(CaffeModel(description), batches)
    same(found.weights, expected.weights, 1e-5)
    views = CaffeModel(description).table.views(found.weights)
    assert views["bn/2"][0] == pytest.approx(sum(0.999**k for k in range(5)))
    assert (device.hazards, device.replays) == ([], replays)
    assert ["(Softsign) has work on the host" in text for text in caplog.messages] == [True] * (
        replays == 0
    )
