"""A worker's device, by the user's request, Spark's assignment and the devices present."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cupy_kernels import cupy_device
from shards.errors import BadInput
from tests.support.ones_job import Ones
from worker.training import device_selection
from worker.training.device import Gpu
from worker.training.device_selection import (
    DeviceRequest,
    check,
    check_here,
    lend_weights,
    parse_device,
    place_model,
)
from worker.training.model import Batch


class OnGpu(Ones):
    """A model on a device that records the device."""

    def __init__(self, where: Any) -> None:
        super().__init__()
        self.device = where

    def allocate(self, size: int) -> NDArray[np.float32]:
        return np.zeros(size, np.float32)

    def begin(self, weights: Any, batch: Batch, out: Any, *, step: int, seed: int) -> None:
        self.gradient(weights, batch, out, step=step, seed=seed)

    def finish(self) -> float:
        return 0.0


class Able(Ones):
    """A model that can compute on a device."""

    def on(self, device: Any) -> OnGpu:
        return OnGpu(device)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Pretend that this machine has `count` GPUs."""
    count: int = request.param
    monkeypatch.setattr(device_selection, "gpu_count", lambda: count)
    monkeypatch.setattr("worker.training.device.gpu_count", lambda: count)
    monkeypatch.setattr(cupy_device, "gpu", lambda: object() if count else None)
    return count


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("auto", DeviceRequest()),
        ("cpu", DeviceRequest(False)),
        ("gpu", DeviceRequest(True)),
        ("gpu:0", DeviceRequest(True, 0)),
        ("gpu:12", DeviceRequest(True, 12)),
    ],
)
def test_a_device_is_parsed_and_printed_alike(text: str, wanted: DeviceRequest) -> None:
    """What is parsed prints as it was written."""
    assert parse_device(text) == wanted
    assert str(wanted) == text


@pytest.mark.parametrize("text", ["", "GPU", "cuda", "gpu:", "gpu:-1", "cpu:0", "gpu:1,2", "gpu:٣"])
def test_other_names_are_refused(text: str) -> None:
    """An unknown name is refused; the error lists the four forms."""
    with pytest.raises(BadInput, match=r"device: expected auto, cpu, gpu or gpu:N, got"):
        parse_device(text)


@pytest.mark.parametrize("gpus", [3], indirect=True)
@pytest.mark.parametrize(
    ("wanted", "partition", "assigned", "index"),
    [
        ("auto", 0, [], 0),
        ("auto", 4, [], 1),
        ("gpu", 5, [], 2),
        ("gpu", 5, ["0"], 0),
        ("auto", 0, ["2", "1"], 2),
        ("gpu:1", 5, ["0"], 1),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_a_worker_takes_its_own_gpu(
    wanted: str, partition: int, assigned: list[str], index: int
) -> None:
    """A worker uses the named GPU, else Spark's assignment, else takes turns by partition."""
    found = place_model(Able(), parse_device(wanted), partition=partition, assigned=assigned)
    assert isinstance(found, OnGpu)
    assert isinstance(found.device, Gpu)
    assert (found.device.index, str(found.device)) == (index, f"gpu:{index}")


@pytest.mark.parametrize("gpus", [0, 2], indirect=True)
def test_auto_takes_a_gpu_where_there_is_one(gpus: int) -> None:
    """And leaves the model alone elsewhere, as it does where the model knows no device."""
    model, simple = Able(), Ones()
    assert isinstance(place_model(model, DeviceRequest(), partition=0), OnGpu) == bool(gpus)
    assert place_model(model, DeviceRequest(False), partition=0) is model
    assert place_model(simple, DeviceRequest(), partition=0) is simple


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_a_gpu_that_is_wanted_must_answer() -> None:
    """In the task, and, where the tasks run on this machine, before anything is started."""
    for text in ("gpu", "gpu:1"):
        with pytest.raises(
            BadInput, match=r"^device gpu:\d: expected a GPU that answers, and CuPy"
        ):
            place_model(Able(), parse_device(text), partition=0)
        with pytest.raises(
            BadInput, match=r"^device gpu:\d: expected a GPU that answers, and CuPy"
        ):
            check_here(parse_device(text))
    check_here(DeviceRequest())
    check_here(DeviceRequest(False))


@pytest.mark.parametrize("gpus", [0], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_weights_stay_where_no_gpu_is() -> None:
    """Inference runs on the CPU if that is requested or there is no GPU."""
    weights = np.ones(3, np.float32)
    for wanted in (DeviceRequest(), DeviceRequest(False)):
        with lend_weights(weights, wanted) as there:
            assert there is weights
    with (
        pytest.raises(BadInput, match=r"^device gpu:1: expected"),
        lend_weights(weights, DeviceRequest(True, 1)),
    ):
        pytest.fail("lent without a GPU")


@pytest.mark.parametrize("gpus", [2], indirect=True)
@pytest.mark.usefixtures("gpus")
def test_what_cannot_be_had_is_refused() -> None:
    """A number that no GPU here has, an address that is no number, a model that knows no device."""
    with pytest.raises(BadInput, match=r"gpu:2: expected a number below 2, the GPUs here"):
        place_model(Able(), DeviceRequest(True, 2), partition=0)
    with pytest.raises(BadInput, match=r"addresses to be numbers, .* got 'GPU-61cd'"):
        place_model(Able(), DeviceRequest(True), partition=0, assigned=["GPU-61cd"])
    with pytest.raises(BadInput, match=r"device gpu: expected a model with `on`, got Ones"):
        check(Ones(), DeviceRequest(True))
