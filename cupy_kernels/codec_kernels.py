"""codecs.py in CUDA kernels: arenas, residuals and payloads on a device.

A payload is written on the device in the form that is sent, so only the bytes for the network are
copied to the host. Sparse pushes have kernels, too, but no implementation here: the k-th largest
value cannot be found on a device yet.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from cupy_kernels.backends import backend_of, copied
from cupy_kernels.kernel_specs.updates import VERDICT
from cupy_kernels.launch import launch
from cupy_kernels.types import AnyArray, Array

if TYPE_CHECKING:
    from cupy_kernels.codecs import Dense


def encode(kind: "Dense", g: Array, error: Array, payload: AnyArray, factor: np.float32) -> None:
    """`codecs.encode`; denormals count as zeros."""
    verdict: Any = None
    if factor != 1:
        told = np.zeros(1, VERDICT)
        told["scale"] = factor
        verdict = copied(told.view(np.uint8), backend_of(g))
    _write(kind, g, error, payload, verdict)


def cast(kind: "Dense", x: Array, payload: AnyArray) -> None:
    """`codecs.cast`."""
    _write(kind, x, None, payload, None)


def decode(kind: "Dense", payload: AnyArray, y: Array) -> None:
    """`codecs.decode`."""
    from cupy_kernels.codecs import parts, reader

    q, scales = parts(kind, payload, y.size)
    more = {} if scales is None else {"scales": scales}
    launch(reader(kind), q=q, y=y, n=y.size, **more)


def _write(kind: "Dense", g: Array, error: Any, payload: AnyArray, verdict: Any) -> None:
    from cupy_kernels.codecs import parts, writer

    q, scales = parts(kind, payload, g.size)
    more = {} if scales is None else {"scales": scales}
    launch(writer(kind), g=g, error=error, q=q, verdict=verdict, n=g.size, **more)
