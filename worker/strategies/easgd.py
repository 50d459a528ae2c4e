"""Elastic averaging SGD (Zhang, Choromanska and LeCun 2015).

    each step:  x -= rate * gradient at x
    each tau steps:  pull c;  e = alpha * (x - c);  x -= e;  push -e          the shards: c += e

Each worker explores on weights x of its own, which an elastic force ties to the shards' centre c.
The exchange uses x as it is before the step that follows it. The workers' pulls on
the centre add up: with W workers it moves by W * alpha of its distance to their mean. With W *
alpha = beta above 1 it overshoots, so that is refused; the default is alpha = 0.9 / W.
"""

from typing import ClassVar, Self

import numpy as np
from msgspec import structs

from shards.aggregation import ServerHalf
from shards.errors import BadInput
from shards.rules import SGD
from worker.strategies.base import Base, Floats, Local, check_options, positive, window_steps

_BETA = 0.9


class EASGD(Base, frozen=True, tag="easgd", kw_only=True):
    """Explore on weights of one's own; every `tau` steps, draw them and the centre together.

    `alpha` is the share of the distance that both move (None: 0.9 / W).
    """

    alpha: float | None = None
    tau: int = 10

    windowed: ClassVar[bool] = True
    exchanges: ClassVar[bool] = True
    takes_optimizer: ClassVar[bool] = True
    keeps: ClassVar[tuple[str, ...]] = ("weights",)

    def __post_init__(self) -> None:
        check_options(self, tau=window_steps)
        if self.alpha is not None:
            check_options(self, alpha=positive)

    def for_workers(self, workers: int) -> Self:
        if self.alpha is None:
            return structs.replace(self, alpha=_BETA / workers)
        if self.alpha * workers > 1:
            raise BadInput(
                f"strategy {self.name}: alpha",
                expected=(
                    f"at most {1 / workers:g} with {workers} workers, beyond which "
                    "the centre overshoots"
                ),
                got=f"{self.alpha:g}",
            )
        return self

    def server(self, workers: int) -> ServerHalf:
        return ServerHalf(rate=1.0)

    @property
    def push_period(self) -> int:
        return self.tau

    def fetches(self, step: int) -> bool:
        return False

    def on_pull(self, local: Local, pulled: Floats) -> None:
        """Begin at the centre; later, find the force, which the next local step applies."""
        if local.count:
            force = np.subtract(pulled, self._position(local), local.gradient)
            force *= np.float32(self._alpha())
            local.slots["force"] = force

    def local_step(self, local: Local, gradient: Floats, rate: float) -> None:
        local.descend(SGD(), gradient, rate)
        if "force" in local.slots:
            local.weights += local.slots.pop("force")

    def contribution(self, local: Local) -> Floats:
        return local.slots["force"]

    def _position(self, local: Local) -> Floats:
        """x, the worker's own weights."""
        return local.weights

    def _alpha(self) -> float:
        if self.alpha is None:
            raise BadInput(f"strategy {self.name}: alpha", expected="a number, or `for_workers`")
        return self.alpha
