"""The bodies of updates.py where the CUDA kernels run: weights, gradients and slots on a device.

The kernels of `updates.cu` find each chunk of 64 floats' rate and decay by its group. A run is a
group here: which run a chunk belongs to is a table that stays on the device from one update to the
next, and each update brings only the numbers that change, in one copy.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import Backend, as_host, backend_of, copied
from cupy_kernels.kernel_specs.updates import CHUNK, CONSTANTS, HYPER, MULTIPLIERS, partials
from cupy_kernels.launch import launch
from cupy_kernels.registry import KERNELS
from cupy_kernels.types import AnyArray, Array

if TYPE_CHECKING:
    from cupy_kernels.updates import Runs

_MOST_RUNS = 2**16 - 1  # with a group for what lies between them


def has_kernel(rule: str) -> bool:
    return f"update_{rule}" in KERNELS


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
    place, n = backend_of(weights), weights.size
    hyper = np.zeros(1, HYPER)
    hyper["rate"] = hyper["decay"] = 1  # a run's own are in its multipliers
    hyper["l1"] = runs.l1
    for name, value in zip(CONSTANTS[rule], constants, strict=True):
        hyper[name] = value
    multipliers = np.zeros(len(runs.bounds) + 1, MULTIPLIERS)
    multipliers["rate"][:-1], multipliers["decay"][:-1] = runs.rates, runs.decays
    changing = np.frombuffer(hyper.tobytes() + multipliers.tobytes(), np.uint8)
    there = copied(changing, place)
    kernel = KERNELS[f"update_{rule}"]
    names = [p.name for p in kernel.outputs if p.name != "out"]
    state: dict[str, Any] = dict(zip(names, slots, strict=True))
    launch(
        kernel,
        w=weights,
        g=gradient,
        out=out,
        groups=_groups(runs.bounds.tobytes(), n, place),
        multipliers=there[HYPER.itemsize :],
        hyper=there[: HYPER.itemsize],
        verdict=None,
        n=n,
        **state,
    )


def squared_norm(values: Array) -> float:
    """`updates.squared_norm`: blocks' sums in float32, and theirs in float64. Waits for the sum."""
    sums = backend_of(values).empty((partials(values.size),), np.float32)
    launch("square_sums", x=values, partials=sums, n=values.size)
    return float(as_host(sums).sum(dtype=np.float64))


def mean(arrays: Sequence[Array]) -> Array:
    """`updates.mean`."""
    total: Array = copied(arrays[0], backend_of(arrays[0]))
    for other in arrays[1:]:
        launch("add_scaled", x=other, y=total, a=1.0, b=1.0, n=total.size)
    launch("divide", x=total, by=float(len(arrays)), n=total.size)
    return total


@lru_cache(maxsize=16)
def _groups(bounds: bytes, n: int, place: Backend) -> AnyArray:
    """The run of each chunk, in memory of `place`; a shard asks for the same at every push."""
    intervals: NDArray[np.int64] = np.frombuffer(bounds, np.int64).reshape(-1, 2)
    if len(intervals) > _MOST_RUNS or (intervals[:, 0] % CHUNK).any():
        raise ValueError(
            f"update on a device: expected at most {_MOST_RUNS} runs that start at multiples of"
            f" {CHUNK}, got {len(intervals)} from {intervals[:3].tolist()} on"
        )
    groups = np.full(-(-n // CHUNK), len(intervals), np.uint16)
    for run, (start, stop) in enumerate(intervals):
        groups[start // CHUNK : -(-stop // CHUNK)] = run
    return copied(groups, place)
