"""A worker's own state across restarts: what its strategy keeps between pushes, and its residual.

A worker with a place for snapshots writes its state there whenever a snapshot is taken
(ps/snapshots/residual_writer.py), and after exchanges (ps/snapshots/worker_saves.py), together with
the push number that it belongs to. A restarted worker looks for the newest one. Then

- a residual is restored unless it is older than the shards, which would send values twice;
- of the same push as the shards, the strategy's state continues to the bit, within a window too;
- of another push, only what outlives a push is kept, such as a momentum: it is an estimate, and
  one of some pushes ago is a better one than zero. The window that was under way is taken again;
- the state of the user's optimiser is of the same kind.

A worker that has no state of its own, also a new one, begins with the moments of another worker.

What could not be restored is reported: in `WorkerReport.lost`, and so to the job's operator.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from operator import le

import msgspec
from msgspec import structs

from ps.client import Client
from ps.logs import logger
from ps.snapshots import residuals
from ps.snapshots.catalog import SnapshotCatalog
from ps.snapshots.residual_writer import saved_residual
from ps.snapshots.worker_saves import WorkerSave, find_saves
from ps.snapshots.worker_state import Arrays, OwnState, WorkerState
from ps.storage import Place, open_store
from shards.errors import BadInput, GiveUp
from shards.plurals import format_count
from worker.strategies import Local, Strategy
from worker.training.optimizer_state import (
    KEY,
    PREFIX,
    LocalOptimizer,
    OptimizerState,
    read_state,
    write_values,
)

_STRATEGY = "strategy"
_Saved = tuple[WorkerState, Arrays]


class Continued(msgspec.Struct, frozen=True):
    """The state that a restarted worker continues with, and in words what it has lost.

    `optimizer` is the state of the user's optimiser, and `lost_with_optimizer` what is lost where
    the worker has one.
    """

    local: Local | None = None
    lost: str = ""
    optimizer: OptimizerState | None = None
    lost_with_optimizer: str = ""

    @property
    def steps(self) -> int:
        """The steps of the window under way, which the shards do not know yet."""
        return self.local.steps if self.local is not None else 0

    def between_windows(self, keeps: Collection[str]) -> "Continued":
        """This without the window under way, which is taken again."""
        if self.local is None or not self.local.steps:
            return self
        return structs.replace(self, local=self.local.between_windows(keeps))


def save_state(
    strategy: Strategy, local: Local, optimizer: LocalOptimizer | None = None
) -> OwnState:
    """The state of a worker between two steps, copied."""
    arrays, counters = local.save()
    own = OwnState(arrays, {_STRATEGY: strategy.name, **counters})
    if optimizer is None:
        return own
    state = optimizer.save()
    of_optimizer = {PREFIX + name: array for name, array in state.arrays.items()}
    return OwnState({**own.arrays, **of_optimizer}, {**own.values, **write_values(state)})


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
    saves = _Saves(client, resumed, snapshots, first_incarnation)
    if not client.seq:
        return _join(client, strategy, saves)
    saved, why = None, ""
    try:
        saved = saves.newest()
    except (BadInput, GiveUp) as error:
        why = f": {error}"
    lost = []
    if client.compresses:
        residual_why = why
        try:
            if saved is not None:
                residuals.restore(client.session, *saved)
        except BadInput as error:
            residual_why = f": {error}"
        if saved is None or residual_why:
            lost.append(f"without its residual{residual_why}")
    local, late = _local(client, strategy, saved)
    optimizer, late_optimizer = _optimizer(client, saved, why)
    if saved is None and (other := saves.newest_of_others()) is not None:
        of = f"of {other[0].worker}{why}"
        if strategy.keeps_moments:
            local, _ = _local(client, strategy, other, of_other=True)
            late = f"with the {', '.join(strategy.keeps)} {of}" if local is not None else late
        optimizer, _ = _optimizer(client, other, "")
        late_optimizer = f"with the state of the optimizer {of}" if optimizer else late_optimizer
    return Continued(
        local,
        _report(client, [*lost, late]),
        optimizer,
        _report(client, [*lost, "" if strategy.keeps_moments else late, late_optimizer]),
    )


def fresh_state(client: Client, strategy: Strategy) -> Continued:
    """The state of a worker that saved none; `lost` says so if it has pushed before."""
    return Continued(None, _report(client, [_without(strategy)] if client.seq else []))


def _join(client: Client, strategy: Strategy, saves: "_Saves") -> Continued:
    """The state of a new worker: the moments of another one, if any has saved them."""
    other = saves.newest_of_others()
    if other is None:
        return Continued()
    local = None
    if strategy.keeps_moments:
        local, _ = _local(client, strategy, other, of_other=True)
    optimizer, _ = _optimizer(client, other, "")
    if local is not None or optimizer is not None:
        log = logger("worker", job=client.cluster.job, worker=client.worker)
        log.info("%s begins with the moments of %s", client.worker, other[0].worker)
    return Continued(local, "", optimizer)


class _Saves:
    """The states of a job's workers: those saved by themselves, and those in snapshots.

    `snapshots` is the place of the job's own, in which lives from `first_incarnation` on count;
    `resumed` is the snapshot that the job began with.
    """

    def __init__(
        self, client: Client, resumed: Place | None, snapshots: Place | None, first_incarnation: int
    ) -> None:
        self._client = client
        self._resumed, self._snapshots = resumed, snapshots
        self._first_incarnation = first_incarnation

    def newest(self) -> _Saved | None:
        """This worker's newest state; raises BadInput or GiveUp if there are only damaged ones."""
        client, worker, snapshots = self._client, self._client.worker, self._snapshots
        own = [save for save in self._find() if save.note.worker == worker]
        own.sort(key=lambda save: (save.note.incarnation, save.note.seq), reverse=True)
        state, damage = self._read(own)
        if state is not None:
            return state
        if snapshots is not None and client.incarnation > self._first_incarnation:
            catalog = SnapshotCatalog(snapshots)
            for entry in reversed(catalog.entries()):
                with suppress(BadInput):  # damaged: an older one will do
                    state = saved_residual(catalog.store.below(entry.name).address, worker)
                if state is not None and state[0].incarnation >= self._first_incarnation:
                    return state
        state = saved_residual(self._resumed, worker) if self._resumed is not None else None
        if state is None and damage is not None:
            raise damage
        return state

    def newest_of_others(self) -> _Saved | None:
        """The newest state of another worker; None if there is none that can be read."""
        others = [save for save in self._find() if save.note.worker != self._client.worker]
        others.sort(key=lambda save: save.note.seq, reverse=True)
        state, _ = self._read(others)
        return state

    def _find(self) -> list[WorkerSave]:
        if self._snapshots is None:
            return []
        try:
            return find_saves(open_store(self._snapshots), self._client.cluster.job)
        except OSError:
            return []

    def _read(self, saves: list[WorkerSave]) -> tuple[_Saved | None, BadInput | None]:
        """The first of these that can be read, and the first error."""
        damage = None
        for save in saves:
            try:
                return save.read(self._client.layout.size), None
            except BadInput as error:
                damage = damage or error
        return None, damage


def _local(
    client: Client, strategy: Strategy, saved: _Saved | None, *, of_other: bool = False
) -> tuple[Local | None, str]:
    """The strategy's part of a state, and what of it is lost, in words."""
    lost = _without(strategy)
    if saved is None:
        return None, lost
    state, arrays = saved
    own_state = state.own_state(arrays)
    own_arrays = {n: a for n, a in own_state.arrays.items() if not n.startswith(PREFIX)}
    if not lost and not own_arrays:
        return None, lost
    if own_state.values.get(_STRATEGY) != strategy.name:
        return None, lost and f"{lost}: it was saved for another strategy"
    if {array.shape for array in own_arrays.values()} != {(client.layout.size,)}:
        return None, lost and f"{lost}: it was saved for other tables"
    counters = {n: v for n, v in own_state.values.items() if n not in (_STRATEGY, KEY)}
    counters["loss"] = counters["loss"] or 0.0  # JSON has no NaN
    local = Local.restore({name: array.copy() for name, array in own_arrays.items()}, counters)
    if of_other:
        return local.between_windows(strategy.keeps), ""
    if state.seq == client.seq and all(
        # Shards that went back to an autosave have not made these versions yet.
        len(fragment.versions) == len(client.versions)
        and all(map(le, fragment.versions, client.versions))
        for fragment in local.fragments
    ):
        local.fetched = local.versions = client.versions  # the saved ones may be beyond these
        return local, ""
    behind = client.seq - state.seq
    kept = bool(strategy.keeps) and behind > 0
    late = (
        f"with its own {', '.join(strategy.keeps)} of {format_count(behind, 'push')} ago"
        if kept
        else ""
    )
    return local.between_windows(strategy.keeps), late


def _optimizer(client: Client, saved: _Saved | None, why: str) -> tuple[OptimizerState | None, str]:
    """The optimiser's part of a state, and what of it is lost, in words."""
    lost = "without the state of its optimizer"
    if saved is None:
        return None, f"{lost}{why}"
    state, arrays = saved
    own_state = state.own_state(arrays)
    try:
        optimizer = read_state(own_state.arrays, own_state.values)
    except BadInput as error:
        return None, f"{lost}: {error}"
    if optimizer is None:
        return None, f"{lost}: it was saved without one"
    if state.worker != client.worker:
        return structs.replace(optimizer, worker=state.worker), ""
    behind = client.seq - state.seq
    ago = f"with its optimizer's state of {format_count(behind, 'push')} ago"
    return optimizer, ago if behind > 0 else ""


def _without(strategy: Strategy) -> str:
    return f"without its own {', '.join(strategy.keeps)}" if strategy.keeps else ""


def _report(client: Client, lost: Iterable[str]) -> str:
    parts = [part for part in lost if part]
    return f"{client.worker} continued {' and '.join(parts)}" if parts else ""
