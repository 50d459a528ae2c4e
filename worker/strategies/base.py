"""The interface of every strategy, and the local state that it works on."""

from math import gcd
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from shards.spec import Merge

Floats = NDArray[np.float32]


class Local(msgspec.Struct):
    """A worker's own state between pushes: its weights, and the gradients not pushed yet.

    `owed` is the sum of these gradients, `steps` and `samples` their counts, and `loss` the sum of
    their losses. `fetched` are the versions of `weights`, one for each shard; `versions` are those
    of the weights from which the oldest gradient in `owed` was computed.
    """

    weights: Floats
    fetched: tuple[int, ...]
    versions: tuple[int, ...] = ()
    owed: Floats | None = None
    steps: int = 0
    samples: int = 0
    loss: float = 0.0

    def settle(self) -> None:
        """Reset after everything owed has been pushed."""
        self.owed, self.steps, self.samples, self.loss = None, 0, 0, 0.0


class Base(msgspec.Struct, frozen=True, tag_field="strategy", kw_only=True):
    """The questions that the worker loop asks a strategy.

    Steps count from 0 over the worker's whole plan.
    """

    merge: ClassVar[Merge] = Merge.EACH

    def check(self, bound: int | None, prefetch: bool) -> None:
        """Raise BadInput for a combination that would deadlock or is not defined."""
        push, fetch = self.push_period, self.fetch_period
        least = self.least_bound() + prefetch
        if bound is not None and bound < least:
            raise BadInput(
                f"staleness bound: pushing every {push} steps"
                f"{f' and fetching every {fetch}' if fetch > 1 else ''}"
                f"{' with prefetch' if prefetch else ''} needs at least {least}, got {bound}"
            )

    def least_bound(self) -> int:
        """The smallest bound at which no worker waits for itself; a prefetch needs one more."""
        # The shards' clock of the slowest worker lags its steps by those that it has not pushed,
        # and a fetch requests the clock of the last step that its weights will serve.
        push, fetch = self.push_period, self.fetch_period
        return push - gcd(push, fetch) + fetch - 1

    @property
    def push_period(self) -> int:
        """Steps between two pushes."""
        return 1

    @property
    def fetch_period(self) -> int:
        """Steps between two fetches."""
        return 1

    @property
    def warm_up(self) -> int:
        """Steps that one worker takes alone before the others join."""
        return 0

    @property
    def plain(self) -> bool:
        """Whether every step is just a fetch, one gradient and its push."""
        return False

    def fetches(self, step: int) -> bool:
        """Whether new weights are pulled before `step`."""
        return True

    def pushes(self, step: int) -> bool:
        """Whether the gradients owed are pushed after `step`."""
        return (step + 1) % self.push_period == 0

    def learn(self, local: Local, gradient: Floats, rate: float, multipliers: Floats) -> None:
        """Add the gradient of one step at `local.weights`; `local` may keep or change the array.

        `rate` times `multipliers` is the learning rate of each float of the table.
        """
        local.owed = gradient if local.owed is None else np.add(local.owed, gradient, local.owed)
