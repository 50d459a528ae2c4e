"""Asynchronous DiLoCo with momentum look-ahead, MLA (MCDC at ICLR 2025, OpenReview 4O8nzTkHPI).

The shards apply each delta D at once, and with it the step that the momentum m would take next, so
that a worker which pulls now begins where the deltas under way will soon lead:

    w -= scale * rate * (momentum * m + D);  m = momentum * m + (1 - momentum) * D

m is a mean of deltas, and not a sum as in Nesterov's rule.
"""

from shards.aggregation import EACH, ServerHalf
from shards.rules import MomentumLookAhead
from worker.strategies.outer_momentum import ScaledWindows


class MLA(ScaledWindows, frozen=True, tag="mla", kw_only=True):
    """DiLoCo without rounds: each delta is applied at once, with a step of the momentum ahead.

    `scale` multiplies the outer rate (None: 1/W). `speeds` are steps a second by worker, in any
    unit; a worker not in it is as fast as the fastest. In a text: mla:speeds=worker-0/1+worker-1/2.
    """

    def server(self, workers: int) -> ServerHalf:
        scale, rule = self.scale_for(workers), MomentumLookAhead(self.momentum)
        return ServerHalf(merge=EACH, rule=rule, rate=self.outer_lr, scale=scale)
