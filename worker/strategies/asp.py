"""Asynchronous SGD without a bound: every worker at its own speed.

    each step:  pull w;  g = gradient at w;  push g          the shards: w -= scale * rate * g

This is Downpour SGD (Dean et al. 2012) with a fetch and a push at every step. Nothing
bounds the staleness of a push, so one slow worker's gradients may be very old.
"""

from typing import ClassVar

from shards.errors import BadInput
from worker.strategies.base import Asynchronous


class ASP(Asynchronous, frozen=True, tag="asp", kw_only=True):
    """Push every step, never wait."""

    usual_bound: ClassVar[int | None] = None

    def check(self, bound: int | None, prefetch: bool) -> None:
        super().check(bound, prefetch)
        if bound is not None:
            raise BadInput("strategy asp", expected="no staleness bound", got=bound)

    def least_allowed(self, prefetch: bool) -> int | None:
        return None

    @property
    def plain(self) -> bool:
        return True
