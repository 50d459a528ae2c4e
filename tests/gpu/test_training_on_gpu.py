"""A worker on the GPU of this machine, if it has one, learns what one on the CPU does."""

from typing import Any

import numpy as np
import pytest

from cupy_kernels import cupy_device
from tests.support import tiny_job
from tests.support.model_training import LENET, PLANS, TINY, Trained, digits, same, small
from worker.caffe.device_model import DeviceModel
from worker.caffe.model import CaffeModel
from worker.training.device import Gpu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(cupy_device.gpu() is None, reason="no GPU answers here"),
]


@pytest.mark.parametrize("more", PLANS.values(), ids=PLANS)
def test_a_network_on_the_gpu_trains_as_on_the_cpu(
    more: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Eight steps of a small net with dropout, by every way that the loop has, all captured."""
    batches = [small(tiny_job.BATCH, seed) for seed in range(8)]
    found = Trained(DeviceModel(TINY, Gpu()), batches, **more)
    same(found.weights, Trained(CaffeModel(TINY), batches, **more).weights, 1e-4)
    assert found.report.device == "gpu:0"
    assert caplog.messages == [], "nothing was left uncaptured"


def test_lenet_on_the_gpu_trains_as_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    """Twenty steps on batches of 64, begun ahead; later ones would part as any two sums do."""
    batches = [digits(64, seed) for seed in range(20)]
    found = Trained(DeviceModel(LENET, Gpu()), batches, prefetch=True)
    same(found.weights, Trained(CaffeModel(LENET), batches, prefetch=True).weights, 1e-3)
    assert caplog.messages == []


def test_the_memory_it_uses_does_not_grow() -> None:
    """Not a byte of the GPU's after the step was captured, however many follow."""
    cupy = cupy_device.gpu()
    assert cupy is not None
    model = DeviceModel(TINY, Gpu())
    weights, out = (model.allocate(model.table.size) for _ in range(2))
    used = []
    for number in range(10):
        model.gradient(weights, small(8, number), out, step=number, seed=7)
        used.append(cupy.get_default_memory_pool().used_bytes())
    assert len(set(used[2:])) == 1
    assert np.isfinite(out).all()
