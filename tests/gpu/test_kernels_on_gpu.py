"""Every kernel on the GPU of this machine, if it has one."""

import pytest

from cupy_kernels import cupy_device
from tests.cupy_kernels.cases import every_case
from tests.gpu import kernel_check_run


@pytest.mark.gpu
def test_every_kernel_equals_its_reference_on_the_gpu() -> None:
    """All cases, aligned and shifted by one element, within the rows' tolerances."""
    cupy = cupy_device.gpu()
    if cupy is None:
        pytest.skip("no GPU answers here")
    failed = {
        name: found[:3] for name, found in kernel_check_run.run(cupy, every_case()).items() if found
    }
    assert not failed
