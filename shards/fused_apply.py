"""Pushes applied in one pass over memory, their norms taken on the way.

Applied one after another, k pushes read and write all weights k times. Where a rule's update by a
sum of gradients is the sum of its updates by each, as plain SGD's is, the sum does, taken piece by
piece, so that it is used while it is in the cache: each gradient and the weights are then read
once, and the next version is written once. The result is that of one after another, up to rounding.

The norm of each gradient is taken on the way, piece by piece too; that of a single push as it is
applied, where its update would otherwise be a second pass over its gradient. If a norm is not
finite the pass was in vain, and nothing has been changed: a rule that may be used like this keeps
no slots.
"""

from collections.abc import Iterator, Sequence
from math import isfinite

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.updates import squared_norm
from shards.rules import SGD, Decay, Rule
from shards.tables import RateRun

Floats = NDArray[np.float32]

PIECE = 1 << 19  # floats; 2 MB of each array are at hand at once


def may_be_summed(rule: Rule, decay: Decay) -> bool:
    """Whether an update by a sum of gradients equals the updates by each, up to rounding."""
    return rule.additive and decay.weight == 0


class FusedApply:
    """The pieces of one shard's array."""

    def __init__(self, segments: Sequence[RateRun], size: int, piece: int = PIECE) -> None:
        self._segments = tuple(segments)
        self._pieces = list(_cut(segments, size, piece))
        self._sum = np.empty(min(piece, size), np.float32)

    def apply(
        self, rule: Rule, weights: Floats, gradients: Sequence[Floats], out: Floats, rate: float
    ) -> list[float]:
        """Write `weights` updated by all of `gradients` into `out`; the squared norm of each.

        Arrays are flat, aligned, float32, of one size, and in the host's memory. When a norm is not
        finite, what `out` holds means nothing.
        """
        if len(gradients) == 1 and isinstance(rule, SGD):
            (gradient,) = gradients
            return [rule.apply_measured(weights, gradient, out, self._segments, rate)]
        squares = [0.0] * len(gradients)
        for part, segments in self._pieces:
            for number, gradient in enumerate(gradients):
                squares[number] += squared_norm(gradient[part])
            if not all(map(isfinite, squares)):
                continue  # the other norms are still wanted
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
    """Each piece, and the segments in it, placed in it."""
    for start in range(0, size, piece):
        stop = min(start + piece, size)
        yield (
            slice(start, stop),
            tuple(
                RateRun(
                    max(one.start, start) - start,
                    min(one.stop, stop) - start,
                    one.lr_mult,
                    one.decay_mult,
                )
                for one in segments
                if one.start < stop and one.stop > start
            ),
        )
