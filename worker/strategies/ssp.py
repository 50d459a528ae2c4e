"""Stale-synchronous parallel training (Ho et al. 2013).

    each step:  pull w;  g = gradient at w;  push g          the shards: w -= scale * rate * g

The fastest worker is at most the bound ahead of the slowest: a pull waits at the shards until they
have the pushes of all workers up to its clock less the bound.
"""

from shards.errors import BadInput
from worker.strategies.base import Asynchronous


class SSP(Asynchronous, frozen=True, tag="ssp", kw_only=True):
    """Push every step, wait at the bound."""

    def check(self, bound: int | None, prefetch: bool) -> None:
        super().check(bound, prefetch)
        if bound is None:
            raise BadInput("strategy ssp", expected="a staleness bound", got="no bound")

    @property
    def plain(self) -> bool:
        return True
