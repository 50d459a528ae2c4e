"""A shard's part of the weights, with all that belongs to it.

Floats, ledger and the counts of what was applied belong together: who changed one alone would break
a promise. Together they are what `Export` gives away and `Install` brings, what a snapshot, a log's
base and another copy of the shard hold.

What a life of a shard knows besides dies with it, and its workers greet the next one: who waits at
the gate (workers.py), and how far it is in a move (reshard_state.py), which a copy is told as a
value of its own.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.backends import Backend
from shards.ledger import Ledger
from shards.metrics import Metrics
from shards.parameters import ParameterStore, SavedProgress
from shards.pull_replies import PullReplies
from shards.spec import ShardSpec
from shards.updates import Updates
from shards.versions import Buffers

Floats = NDArray[np.float32]


class ShardPart:
    """What one life of a shard owns; each of these is the same object for all of that life.

    `exported` is the last push of each worker in the state that was last given away. A life that
    was `rolled_back` goes on from a state that may lack what a former one has acknowledged.
    """

    def __init__(
        self, spec: ShardSpec, boot: int, buffers: Callable[[int], Buffers], place: Backend
    ) -> None:
        """As for a Shard."""
        self.spec = spec
        self.boot = boot
        self.held = ParameterStore(spec, buffers, place)
        self.ledger = Ledger()
        self.journal = Metrics()
        self.updates = Updates(spec, self.held, self.journal)
        self.serving = PullReplies(spec, boot, self.held, self.journal)
        self.exported: dict[str, int] = {}
        self.rolled_back = False

    def copy(self) -> tuple[SavedProgress, Floats, dict[str, Floats]]:
        """All of it, of one version, in this host's memory; the arrays stay as they are."""
        weights, slots = self.held.copy()
        done = self.updates
        return (
            SavedProgress(self.held.version, done.steps, done.samples, self.ledger),
            weights,
            slots,
        )

    def restore(self, saved: SavedProgress, weights: Floats, slots: dict[str, Floats]) -> None:
        """Become what `copy` returned elsewhere, its workers counting as they did there."""
        self.held.restore(saved.version, weights, slots)
        self.serving.reset()
        self.updates.steps, self.updates.samples = saved.steps, saved.samples
        self.ledger.entries, self.ledger.floor = saved.ledger.entries, saved.ledger.floor

    def is_at(self, saved: SavedProgress, weights: Floats, slots: dict[str, Floats]) -> bool:
        """Whether that was installed here, and nothing has been pushed since."""
        same = (self.held.version, self.updates.steps, self.updates.samples) == (
            saved.version,
            saved.steps,
            saved.samples,
        )
        return same and self.ledger.lives == saved.ledger.lives and self.held.is_at(weights, slots)
