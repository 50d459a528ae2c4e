"""`codecs` in CUDA kernels: arenas, residuals and payloads on a device.

A payload is written on the device in the form that is sent, so only the bytes for the network are
copied to the host. Sparse pushes have kernels, too, but no implementation here: the k-th largest
value cannot be found on a device yet.
"""

from typing import Any

import numpy as np

from cupy_kernels.backends import backend_of, copy_to
from cupy_kernels.launch import launch
from cupy_kernels.ops.updates.spec import VERDICT
from cupy_kernels.types import AnyArray, Array


def write(
    kernel: str,
    g: Array,
    error: Array | None,
    q: AnyArray,
    scales: AnyArray | None,
    factor: np.float32,
) -> None:
    """Run a kernel that encodes `error + factor * g`; denormals count as zeros.

    `q` and `scales` are the parts of the payload. A cast has no `scales`, and may have no `error`.
    """
    verdict: Any = None
    if factor != 1:
        scaled = np.zeros(1, VERDICT)
        scaled["scale"] = factor
        verdict = copy_to(scaled.view(np.uint8), backend_of(g))
    more: dict[str, Any] = {} if scales is None else {"scales": scales}
    launch(kernel, g=g, error=error, q=q, verdict=verdict, n=g.size, **more)


def read(kernel: str, q: AnyArray, scales: AnyArray | None, y: Array) -> None:
    """Run a kernel that decodes the parts of a payload into `y`."""
    more: dict[str, Any] = {} if scales is None else {"scales": scales}
    launch(kernel, q=q, y=y, n=y.size, **more)
