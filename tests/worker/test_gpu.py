"""`Gpu` calls CuPy correctly; here CuPy is a strict stand-in."""

import shutil
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cupy_kernels import cupy_device
from shards.errors import BadInput
from tests.support import tiny_job
from tests.support.fake_cuda import DEVICES, fake_cuda, launches_are_captured
from tests.support.model_training import TINY, Trained, same, small
from worker.caffe.device_model import DeviceModel
from worker.caffe.model import CaffeModel
from worker.training.device import CannotCapture, Gpu, gpu_count
from worker.training.device_selection import DeviceRequest, lend_weights, place_model

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator needs g++")


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Install the stand-in as the module `cupy`."""
    module = fake_cuda()
    monkeypatch.setitem(sys.modules, "cupy", module)
    launches_are_captured(module.state, monkeypatch)
    caches = cupy_device.gpu, cupy_device._function, cupy_device._module
    for cache in caches:
        cache.cache_clear()
    yield module
    for cache in caches:
        cache.cache_clear()


def test_a_worker_trains_on_the_second_gpu(cupy: Any) -> None:
    """Everything happens on the device of that number: one capture, a launch for each later step,
    and weights as on the CPU."""
    batches = [small(tiny_job.BATCH, seed) for seed in range(5)]
    assert gpu_count() == DEVICES
    model = place_model(CaffeModel(TINY), DeviceRequest(True), partition=3)
    found = Trained(model, batches, prefetch=True)
    same(found.weights, Trained(CaffeModel(TINY), batches, prefetch=True).weights, 1e-5)
    assert found.report.device == "gpu:1"
    assert cupy.state.log == ["capture", *["launch"] * 4]
    assert cupy.state.device == 0, "what was current is so again"


def test_a_capture_that_fails_leaves_the_stream_usable(cupy: Any) -> None:
    """CuPy's errors become CannotCapture, others pass; no capture is left open."""
    gpu = Gpu(1)
    with gpu.use():
        stream = gpu.stream()
    for error, seen in (
        (NotImplementedError("calling cuBLAS API during stream capture"), CannotCapture),
        (RuntimeError("cudaErrorStreamCaptureInvalidated"), CannotCapture),
        (BadInput("labels"), BadInput),
    ):

        def work(error: Exception = error) -> None:
            raise error

        with gpu.use(stream), pytest.raises(seen, match=str(error)):
            gpu.capture(work)
        assert cupy.state.capture is None
    with gpu.use(stream):
        array = gpu.zeros((3,), np.float32)
        again = gpu.capture(lambda: array.fill(2.0))
        again()
    assert np.array(array, subok=False).tolist() == [2.0] * 3


def test_inference_runs_on_a_gpu(cupy: Any) -> None:
    """With weights on the GPU the network runs there; its outputs are the CPU's."""
    model, batch = CaffeModel(TINY), small(6, seed=1)
    weights = model.initial(2)
    with lend_weights(weights, DeviceRequest(True, 1)) as there:
        assert there.device_id == 1  # type: ignore[attr-defined]
        found = model.forward(there, batch, ["ip2"])
    np.testing.assert_allclose(
        found["ip2"], model.forward(weights, batch, ["ip2"])["ip2"], rtol=1e-4, atol=1e-6
    )


def test_page_locked_memory_is_what_cupy_gives(cupy: Any) -> None:
    """A model's arenas lie in it, zeroed, and slices keep the whole alive."""
    model = DeviceModel(TINY, Gpu())
    array = model.allocate(model.table.size)
    assert type(array.base).__name__ == "bytearray", "the memory that the stand-in allocates"
    assert array.shape == (model.table.size,)
    assert array.dtype == np.float32
    assert not array.any()
