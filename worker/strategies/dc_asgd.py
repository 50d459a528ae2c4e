"""Delay-compensated asynchronous SGD (Zheng et al. 2017, arXiv 1609.08326).

    each step:  pull w_read;  g = gradient at w_read;  push g
    the shards: w -= scale * rate * (g + L * g * g * (w - w_read))

The second term estimates what the gradient would be at the present w, with g * g in place of the
Hessian's diagonal. L is `strength`; the adaptive variant divides it by sqrt(v + 1e-7), where
v = mean * v + (1 - mean) * g * g. The shards keep the last versions of their weights for this.
"""

from msgspec import structs

from shards import argument_checks
from shards.aggregation import ServerHalf
from shards.rules import AdaptiveDelayCompensation, DelayCompensation
from worker.strategies.base import Asynchronous, check_options, positive, share


class DCASGD(Asynchronous, frozen=True, tag="dc_asgd", kw_only=True):
    """Push every step; the shards correct each gradient for its delay.

    `strength` is 0.04, or 2 for the `adaptive` variant, unless given; `mean` is that variant's.
    """

    adaptive: bool = False
    strength: float | None = None
    mean: float = 0.95

    def __post_init__(self) -> None:
        super().__post_init__()
        check_options(self, adaptive=argument_checks.flag, mean=share)
        if self.strength is not None:
            check_options(self, strength=positive)

    @property
    def plain(self) -> bool:
        return True

    def server(self, workers: int) -> ServerHalf:
        default = 2.0 if self.adaptive else 0.04
        strength, versions = self.strength or default, 2 * workers
        rule = (
            AdaptiveDelayCompensation(strength, self.mean, versions)
            if self.adaptive
            else DelayCompensation(strength, versions)
        )
        return structs.replace(super().server(workers), rule=rule)
