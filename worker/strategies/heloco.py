"""Asynchronous DiLoCo with deltas corrected by the momentum, HeLoCo (arXiv 2606.00271).

Where learners have data of different kinds, an old delta often points away from where the model is
going. For each tensor the shards compare its direction with that of the momentum m: a delta D along
m is applied as it is, one across m is turned towards it, and one against m loses a part of what
opposes it. With the result G (shards/rules.py has the formula)

    m = momentum * m + (1 - momentum) * G;  w -= scale * rate * (G + momentum * m)

No shard may cut a tensor, so a job has at most as many shards as tensors.
"""

from shards.aggregation import EACH, ServerHalf
from shards.argument_checks import number_from_0, number_to_1
from shards.rules import HeLoCo
from worker.strategies.base import check_options
from worker.strategies.outer_momentum import ScaledWindows


class AsyncHeLoCo(ScaledWindows, frozen=True, tag="heloco", kw_only=True):
    """DiLoCo without rounds: each delta is corrected by the momentum, and applied at once.

    `c_ok`, `k_s`, `k_d`, `beta_max` and `kappa` are those of the rule `ps.HeLoCo`. In a text:
    heloco:speeds=worker-0/1+worker-1/2.
    """

    c_ok: float = HeLoCo().c_ok
    k_s: float = HeLoCo().k_s
    k_d: float = HeLoCo().k_d
    beta_max: float = HeLoCo().beta_max
    kappa: float = HeLoCo().kappa

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, c_ok=number_to_1, beta_max=number_to_1)
        check_options(self, k_s=number_from_0, k_d=number_from_0, kappa=number_from_0)

    def server(self, workers: int) -> ServerHalf:
        rule = HeLoCo(self.momentum, self.c_ok, self.k_s, self.k_d, self.beta_max, self.kappa)
        scale = self.scale_for(workers)
        return ServerHalf(merge=EACH, rule=rule, rate=self.outer_lr, scale=scale)
