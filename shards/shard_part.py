"""A shard's part of the weights, with all that belongs to it.

Floats, ledger and the counts of what was applied belong together: changing one alone would break a
promise. Together they are what `Export` returns and `Install` brings, and what a snapshot, the base
of a WAL and another copy of the shard hold.

Other knowledge dies with one incarnation of a shard, and its workers say hello to the next: the
requests that wait at the gate (gate.py), and the progress of a reshard (reshard_state.py), which
another copy receives as a separate value.
"""

from collections.abc import Callable

from cupy_kernels.backends import Backend
from shards.buffer_pool import Buffers
from shards.gate import Gate
from shards.ledger import Ledger
from shards.messages import LiveSettings
from shards.metrics import Metrics
from shards.parameters import ParameterStore
from shards.pull_replies import PullReplies
from shards.shard_state import SavedProgress, ShardState
from shards.spec import ShardSpec
from shards.updates import Updates


class ShardPart:
    """The objects that one incarnation of a shard owns; none of them is replaced during that
    incarnation.

    An incarnation that was `rolled_back` continues from a state that may lack pushes an earlier
    incarnation acknowledged.
    """

    def __init__(
        self, spec: ShardSpec, boot: int, buffers: Callable[[int], Buffers], backend: Backend
    ) -> None:
        """The parameters are those of a `Shard`."""
        self.spec = spec
        self.boot = boot
        self.parameters = ParameterStore(spec, buffers, backend)
        self.ledger = Ledger()
        self.metrics = Metrics()
        self.updates = Updates(spec, self.parameters, self.ledger, self.metrics)
        self.serving = PullReplies(spec, boot, self.parameters, self.metrics)
        self.settings = LiveSettings(spec.bound, spec.rate_factor)
        self.gate = Gate(spec.bound)
        self.rolled_back = False
        self.description = b""

    def copy(self) -> ShardState:
        """The whole state at one version, in host memory; the arrays will not change later.

        The ledger is not copied: encode it before the next transition.
        """
        parameters, done = self.parameters, self.updates
        parts = parameters.parts.items()
        saved = SavedProgress(
            parameters.version,
            done.steps,
            done.samples,
            self.ledger,
            {name: part.count for name, part in parts},
            parameters.buffered,
            {name: part.buffered for name, part in parts},
            self.settings if self.settings.revision else None,
            {name: reports.copy() for name, reports in done.reports.by_table.items()},
        )
        return ShardState(saved, parameters.copy(), self.description)

    def restore(self, state: ShardState) -> None:
        """Take over the state that another part's `copy` returned; active workers stay active."""
        self.parameters.restore(state.saved, state.arrays)
        saved = state.saved
        self.updates.steps, self.updates.samples = saved.steps, saved.samples
        self.updates.restore_reports(saved.reports)
        # In place: other objects of this incarnation refer to the same ledger.
        self.ledger.entries, self.ledger.floor = saved.ledger.entries, saved.ledger.floor
        self.description = state.description
        self.follow(saved.settings or LiveSettings(self.spec.bound, self.spec.rate_factor))

    def follow(self, settings: LiveSettings) -> None:
        """Train with these settings; the caller answers requests that may pass the gate now."""
        self.settings = settings
        self.gate.bound = settings.bound
        self.updates.set_rate_factor(settings.rate_factor)

    def is_at(self, state: ShardState) -> bool:
        """Return whether this state was installed here and no push has been applied since."""
        saved, done = state.saved, self.updates
        reached = self.parameters.version, done.steps, done.samples
        same = reached == (saved.version, saved.steps, saved.samples)
        return (
            same
            and self.ledger.incarnations == saved.ledger.incarnations
            and self.parameters.is_at(state.arrays)
        )
