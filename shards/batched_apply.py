"""Applies several pushes in one pass over memory, and computes their norms on the way.

Applied one after another, k pushes read and write all weights k times. For an additive rule such as
plain SGD, one update by the sum of the gradients has the same result, up to rounding. The sum is
computed piece by piece, so that each piece is used while it is in the cache: each gradient and the
weights are read once, and the next version is written once.

The norm of each gradient is computed in the same pass, which saves a pass over the gradient even
for a single push. If a norm is not finite, the result is discarded and nothing has changed, because
an additive rule has no slots.
"""

from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.updates import squared_norm
from shards.rules import SGD, Decay, Rule
from shards.tables import RateRun

Floats = NDArray[np.float32]

PIECE = 1 << 19  # floats; 2 MB of each array are in use at once


def may_be_summed(rule: Rule, decay: Decay) -> bool:
    """Return whether an update by a sum of gradients equals one by each, up to rounding."""
    return rule.additive and decay.weight == 0


class FusedApply:
    """The one-pass update of one shard's array, piece by piece."""

    def __init__(self, segments: Sequence[RateRun], size: int, piece: int = PIECE) -> None:
        self._segments = tuple(segments)
        self._pieces = list(_cut(segments, size, piece))
        # One array for all pieces and pushes: fresh memory at each push would cost page faults.
        self._sum = np.empty(min(piece, size), np.float32)

    def apply(
        self, rule: Rule, weights: Floats, gradients: Sequence[Floats], out: Floats, rate: float
    ) -> list[float]:
        """Write `weights` updated by all `gradients` into `out`; return each one's squared norm.

        Arrays are flat, aligned, float32, of one size, and in host memory. If a norm is not finite,
        the contents of `out` are undefined.
        """
        # One compiled loop reads the gradient once for both the norm and the update.
        if len(gradients) == 1 and isinstance(rule, SGD):
            (gradient,) = gradients
            return [rule.apply_measured(weights, gradient, out, self._segments, rate)]
        squares = [0.0] * len(gradients)
        for part, segments in self._pieces:
            for number, gradient in enumerate(gradients):
                squares[number] += squared_norm(gradient[part])
            if not all(map(isfinite, squares)):
                continue  # the remaining norms are still needed
            # The first gradient is only read, and the sum goes elsewhere: a gradient may be a view
            # of the network's memory, or of a worker's.
            total = gradients[0][part]
            for gradient in gradients[1:]:
                total = np.add(total, gradient[part], out=self._sum[: len(total)])
            rule.apply(
                *(weights[part], total, (), out[part], segments),
                rate=rate,
                decay=Decay(),
                count=1,
            )
        return squares


def _cut(
    segments: Sequence[RateRun], size: int, piece: int
) -> Iterator[tuple[slice, tuple[RateRun, ...]]]:
    """Each piece, and its segments with bounds relative to the piece."""
    for start in range(0, size, piece):
        stop = min(start + piece, size)
        yield (
            slice(start, stop),
            tuple(
                RateRun(
                    max(run.start, start) - start,
                    min(run.stop, stop) - start,
                    run.lr_mult,
                    run.decay_mult,
                    run.buffer,
                )
                for run in segments
                if run.start < stop and run.stop > start
            ),
        )
