"""The segments of an array as the loops of an update need them: runs with a rate and a decay each.

Plans are cached, because segments never change and the rate seldom does.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cupy_kernels.ops import updates
from shards.tables import RateRun

Floats = NDArray[np.float32]


class _Layout(NamedTuple):
    bounds: NDArray[np.int64]
    lr_mults: Floats
    decay_mults: Floats
    gaps: tuple[slice, ...]


@lru_cache(maxsize=256)
def _layout(segments: tuple[RateRun, ...], size: int) -> _Layout:
    """The segments as arrays; cached, because a shard needs the same at every push."""
    edges = [0, *(edge for segment in segments for edge in (segment.start, segment.stop)), size]
    assert edges == sorted(edges), f"segments must ascend within [0, {size})"
    return _Layout(
        # Two columns also where a section is all padding and has no segment.
        np.array([(s.start, s.stop) for s in segments], np.int64).reshape(-1, 2),
        np.array([s.lr_mult for s in segments], np.float32),
        np.array([s.decay_mult for s in segments], np.float32),
        tuple(slice(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b),
    )


class RunPlan(NamedTuple):
    """The runs that a rule updates, the gaps between them, and the buffers."""

    runs: updates.Runs
    gaps: tuple[slice, ...]
    buffers: tuple[slice, ...]


@lru_cache(maxsize=256)
def plan_runs(
    segments: tuple[RateRun, ...], size: int, rate: float, decay: float, l1: bool
) -> RunPlan:
    """The segments as the loops need them; cached, because the rate seldom changes."""
    layout = _layout(tuple(segment for segment in segments if not segment.buffer), size)
    runs = updates.Runs(
        layout.bounds,
        np.float32(rate) * layout.lr_mults,
        np.float32(decay) * layout.decay_mults,
        l1,
    )
    buffers = tuple(segment.keys for segment in segments if segment.buffer)
    return RunPlan(runs, _layout(segments, size).gaps, buffers)


@lru_cache(maxsize=256)
def cover_gaps(segments: tuple[RateRun, ...], size: int, rate: float) -> updates.Runs:
    """The segments of an array of `size` for `sgd_measured`, and the gaps between them.

    A gap is a run of rate 0, because w - 0*g is w if g is finite; a buffer is a run of rate 1.
    """
    gaps = [RateRun(gap.start, gap.stop, 0.0, 0.0) for gap in _layout(segments, size).gaps]
    ordered = sorted((*segments, *gaps), key=lambda run: run.start)
    trained = tuple(structs.replace(run, buffer=False) for run in ordered)
    runs = plan_runs(trained, size, rate, 0.0, l1=False).runs
    buffers = np.array([run.buffer for run in ordered])
    return runs._replace(rates=np.where(buffers, np.float32(1), runs.rates))
