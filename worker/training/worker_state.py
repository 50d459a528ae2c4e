"""A worker's own state across restarts: what its strategy keeps between pushes, and its residual.

A worker with a place for snapshots writes its state there whenever a snapshot is taken
(ps/snapshots/residual_writer.py), together with the push number that it belongs to. A restarted
worker looks for the newest one. Then

- a residual is restored unless it is older than the shards, which would send values twice;
- of the same push as the shards, the strategy's state continues to the bit, within a window too;
- of another push, only what outlives a push is kept, such as a momentum: it is an estimate, and
  one of some pushes ago is a better one than zero. The window that was under way is taken again.

What could not be restored is reported: in `WorkerReport.lost`, and so to the job's operator.
"""

from collections.abc import Collection
from contextlib import suppress
from operator import le

import msgspec

from ps.client import Client
from ps.snapshots import residuals
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.residual_writer import saved_residual
from ps.snapshots.worker_state import Arrays, OwnState, WorkerState
from ps.storage import Place
from shards.errors import BadInput, GiveUp
from worker.strategies import Local, Strategy

_STRATEGY = "strategy"


class Continued(msgspec.Struct, frozen=True):
    """The state that a restarted worker continues with, and in words what it has lost."""

    local: Local | None = None
    lost: str = ""

    @property
    def steps(self) -> int:
        """The steps of the window under way, which the shards do not know yet."""
        return self.local.steps if self.local is not None else 0

    def between_windows(self, keeps: Collection[str]) -> "Continued":
        """This without the window under way, which is taken again."""
        local = None if self.local is None else self.local.between_windows(keeps)
        return Continued(local, self.lost)


def save_state(strategy: Strategy, local: Local) -> OwnState:
    """The state of a worker between two steps, copied."""
    arrays, counters = local.save()
    return OwnState(arrays, {_STRATEGY: strategy.name, **counters})


def restore_state(
    client: Client,
    strategy: Strategy,
    *,
    resumed: Place | None = None,
    snapshots: Place | None = None,
    first_incarnation: int = 0,
) -> Continued:
    """Restore the residual into `client`, and return the rest of this worker's newest saved state.

    `snapshots` is the place of the job's own snapshots, in which states of lives from
    `first_incarnation` on count; `resumed` is the snapshot that the job began with. Call it before
    the first push. A new worker continues with nothing and has lost nothing.
    """
    if not client.seq:
        return Continued()
    saved, why = None, ""
    try:
        saved = _newest(client, resumed, snapshots, first_incarnation)
    except (BadInput, GiveUp) as error:
        why = f": {error}"
    lost = []
    if client.compresses:
        try:
            if saved is not None:
                residuals.restore(client.session, *saved)
        except BadInput as error:
            why = f": {error}"
        if saved is None or why:
            lost.append(f"without its residual{why}")
    local, late = _local(client, strategy, saved)
    lost += [late] if late else []
    return Continued(local, _report(client, lost))


def fresh_state(client: Client, strategy: Strategy) -> Continued:
    """The state of a worker that saved none; `lost` says so if it has pushed before."""
    lost = _without(strategy) if client.seq else ""
    return Continued(None, _report(client, [lost] if lost else []))


def _newest(
    client: Client, resumed: Place | None, snapshots: Place | None, first_incarnation: int
) -> tuple[WorkerState, Arrays] | None:
    if snapshots is not None and client.incarnation > first_incarnation:
        catalog = SnapshotCatalog(snapshots)
        for entry in reversed(catalog.entries()):
            state = None
            with suppress(BadInput):  # damaged: an older one will do
                state = saved_residual(catalog.store.below(entry.name).address, client.worker)
            if state is not None and state[0].incarnation >= first_incarnation:
                return state
    return saved_residual(resumed, client.worker) if resumed is not None else None


def _local(
    client: Client, strategy: Strategy, saved: tuple[WorkerState, Arrays] | None
) -> tuple[Local | None, str]:
    """The strategy's part of a state, and what of it is lost, in words."""
    lost = _without(strategy)
    if saved is None or not lost:
        return None, lost
    state, arrays = saved
    own_state = state.own_state(arrays)
    if own_state.values.get(_STRATEGY) != strategy.name:
        return None, f"{lost}: it was saved for another strategy"
    sizes = {array.shape for array in own_state.arrays.values()}
    if sizes != {(client.layout.size,)}:
        return None, f"{lost}: it was saved for other tables"
    counters = {name: value for name, value in own_state.values.items() if name != _STRATEGY}
    counters["loss"] = counters["loss"] or 0.0  # JSON has no NaN
    local = Local.restore(
        {name: array.copy() for name, array in own_state.arrays.items()}, counters
    )
    if state.seq == client.seq and all(
        # Shards that went back to an autosave have not made these versions yet.
        len(fragment.versions) == len(client.versions)
        and all(map(le, fragment.versions, client.versions))
        for fragment in local.fragments
    ):
        local.fetched = local.versions = client.versions  # the saved ones may be beyond these
        return local, ""
    behind = client.seq - state.seq
    late = f"with its own {', '.join(strategy.keeps)} of {behind} pushes ago" if behind > 0 else ""
    return local.between_windows(strategy.keeps), late


def _without(strategy: Strategy) -> str:
    return f"without its own {', '.join(strategy.keeps)}" if strategy.keeps else ""


def _report(client: Client, lost: list[str]) -> str:
    return f"{client.worker} continued {' and '.join(lost)}" if lost else ""
