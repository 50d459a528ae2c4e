"""`updates` in CUDA kernels: weights, gradients and slots on a device.

The kernels of `updates.cu` find the rate and decay of each chunk of 64 floats by its group. Here a
run is a group. The table with each chunk's run stays on the device between updates, and each update
copies only the numbers that change, in one copy.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import Backend, as_host, backend_of, copy_to
from cupy_kernels.launch import launch
from cupy_kernels.ops.updates.spec import CHUNK, CONSTANTS, HYPER, MULTIPLIERS, ROWS, partials
from cupy_kernels.types import AnyArray, Array

if TYPE_CHECKING:
    from cupy_kernels.ops.updates import Runs

_KERNELS = {row.name: row for row in ROWS}
_MOST_RUNS = 2**16 - 1  # including a group for the floats between runs


def has_kernel(rule: str) -> bool:
    return f"update_{rule}" in _KERNELS


def apply(
    rule: str,
    weights: Array,
    gradient: Array,
    slots: tuple[Array, ...],
    out: Array,
    runs: "Runs",
    constants: tuple[np.float32, ...],
) -> None:
    """`updates.apply` on a device's arrays, aligned to 16 bytes. Runs start at multiples of 64.

    The floats between a run's end and the next multiple of 64 are updated with it, in `out` and
    `slots`; zeros stay zeros.
    """
    backend, n = backend_of(weights), weights.size
    hyper = np.zeros(1, HYPER)
    hyper["rate"] = hyper["decay"] = 1  # a run's own are in its multipliers
    hyper["l1"] = runs.l1
    for name, value in zip(CONSTANTS[rule], constants, strict=True):
        hyper[name] = value
    multipliers = np.zeros(len(runs.bounds) + 1, MULTIPLIERS)
    multipliers["rate"][:-1], multipliers["decay"][:-1] = runs.rates, runs.decays
    changing = np.frombuffer(hyper.tobytes() + multipliers.tobytes(), np.uint8)
    device_bytes = copy_to(changing, backend)
    kernel = _KERNELS[f"update_{rule}"]
    names = [p.name for p in kernel.outputs if p.name != "out"]
    state: dict[str, Any] = dict(zip(names, slots, strict=True))
    launch(
        kernel,
        w=weights,
        g=gradient,
        out=out,
        groups=_groups(runs.bounds.tobytes(), n, backend),
        multipliers=device_bytes[HYPER.itemsize :],
        hyper=device_bytes[: HYPER.itemsize],
        verdict=None,
        n=n,
        **state,
    )


def squared_norm(values: Array) -> float:
    """`updates.squared_norm`: blocks are summed in float32, their sums in float64; this waits."""
    sums = backend_of(values).empty((partials(values.size),), np.float32)
    launch("square_sums", x=values, partials=sums, n=values.size)
    return float(as_host(sums).sum(dtype=np.float64))


def mean(arrays: Sequence[Array]) -> Array:
    """`updates.mean`."""
    total: Array = copy_to(arrays[0], backend_of(arrays[0]))
    for other in arrays[1:]:
        launch("add_scaled", x=other, y=total, a=1.0, b=1.0, n=total.size)
    launch("divide", x=total, by=float(len(arrays)), n=total.size)
    return total


@lru_cache(maxsize=16)
def _groups(bounds: bytes, n: int, backend: Backend) -> AnyArray:
    """The run of each chunk, on `backend`; cached, because a shard needs the same at every push."""
    intervals: NDArray[np.int64] = np.frombuffer(bounds, np.int64).reshape(-1, 2)
    if len(intervals) > _MOST_RUNS or (intervals[:, 0] % CHUNK).any():
        raise ValueError(
            f"update on a device: expected at most {_MOST_RUNS} runs that start at multiples of"
            f" {CHUNK}, got {len(intervals)} from {intervals[:3].tolist()} on"
        )
    groups = np.full(-(-n // CHUNK), len(intervals), np.uint16)
    for run, (start, stop) in enumerate(intervals):
        groups[start // CHUNK : -(-stop // CHUNK)] = run
    return copy_to(groups, backend)
