"""Starts, waits for, restarts and ends shards that have one copy each.

The code is shared by processes (processes.py) and Ray actors (ray_launcher.py).
"""

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from msgspec.structs import replace

from ps.cluster import Cluster
from ps.launch import restart
from ps.launch.child_protocol import ShardLaunch
from ps.launch.launcher import START_S, bind_again, recovery_s
from ps.launch.restart import RestartingProcess
from ps.logs import logger
from ps.shared_memory.shm_files import temporary_folder
from ps.wal.autosave import forget_saves
from shards.errors import BadInput
from shards.spec import ShardSpec

_NAMED = 8  # most shards named in one error


class SingleCopyProcess(restart.RestartableProcess, Protocol):
    """A shard's process or actor, which can be checked and ended for good."""

    deaths: int
    """Always 0: a process dies once, and `RestartingProcess` counts the deaths of all."""

    empty: bool
    """Whether the shard started without weights; known once it listens."""

    def check(self) -> None:
        """Raise GiveUp with the exit reason if the process has ended."""
        ...

    def end(self) -> None:
        """Wait until the process has ended; kill it if that takes too long."""
        ...


C = TypeVar("C", bound=SingleCopyProcess)


class SingleCopies(Generic[C]):
    """The shards of one job, one child each, and the cluster they form.

    While `restart_enabled` is off, a shard that `rolls_back` is not restarted: its death is final.
    """

    degraded_reason = ""  # there are no second copies to miss

    def __init__(
        self, cluster: Cluster, children: Sequence[C | RestartingProcess[C]], *, rolls_back: bool
    ) -> None:
        """`rolls_back`: a shard is restarted from its last autosave, not from its WAL."""
        self.cluster = cluster
        self._children = children
        self._rolls_back = rolls_back
        self._restart_enabled = True

    @property
    def restart_enabled(self) -> bool:
        return self._restart_enabled

    @restart_enabled.setter
    def restart_enabled(self, whether: bool) -> None:
        self._restart_enabled = whether
        for child in self._kept() if self._rolls_back else ():
            child.restart_enabled = whether

    def lost_updates(self) -> list[str]:
        """The updates that deaths have cost since the last call, in words; empty with WALs."""
        return [
            f"{died}; restarted from its last autosave; updates since then are lost"
            for child in (self._kept() if self._rolls_back else ())
            for died in child.lost_updates()
        ]

    @property
    def deaths(self) -> int:
        """How many restartable processes have died, while serving or starting."""
        return sum(child.deaths for child in self._children)

    def check(self) -> None:
        """Raise GiveUp naming a shard that has died for good, or whose loop has failed, and how."""
        for child in self._children:
            child.check()

    def _kept(self) -> list[RestartingProcess[C]]:
        return [one for one in self._children if isinstance(one, RestartingProcess)]

    def _present(self) -> list[C]:
        return [one.child if isinstance(one, RestartingProcess) else one for one in self._children]


Start = Callable[[ShardLaunch, C | None], C]
"""Starts a shard without waiting for it: for the first time, or to replace one that has died."""


@contextmanager
def serving(
    orders: Sequence[ShardLaunch], start: Start[C]
) -> Iterator[tuple[list[str], Sequence[C | RestartingProcess[C]]]]:
    """Run one child an order while the context lasts; yields each endpoint, and the children.

    A child whose order `restarts` is restarted on the same endpoint when it dies (restart.py).
    Raises what a child's `endpoint` raises if it does not serve, and BadInput if some shards have
    found weights in their WALs and others have not.
    """
    children: list[C] = []
    kept: list[RestartingProcess[C]] = []
    try:
        for order in orders:
            # One at a time, so that `finally` ends the earlier ones if the next does not start.
            children.append(start(order, None))  # noqa: PERF401  # see above
        until = time.monotonic() + START_S
        endpoints = [child.endpoint(until) for child in children]
        _check_all_or_none(orders, children)
        if all(order.restarts for order in orders):
            kept += [
                _kept(child, order, endpoint, start)
                for child, order, endpoint in zip(children, orders, endpoints, strict=True)
            ]
        yield endpoints, kept or children
    finally:
        for one in kept or children:
            one.ask_to_end()
        for one in kept or children:
            one.end()


def _check_all_or_none(
    orders: Sequence[ShardLaunch], children: Sequence[SingleCopyProcess]
) -> None:
    """Raise BadInput if some shards have recovered weights and others have none.

    Clients of such a job would wait for ever, or continue with a part of the acknowledged pushes.
    """
    folders = [order.log_folder for order in orders]
    empty = [child.name for child in children if child.empty]
    held = [child.name for child in children if not child.empty]
    if None in folders or not (empty and held):
        return
    logs = Path(str(folders[0])).parent
    raise BadInput(
        f"logs {logs}: expected weights of every shard or of none, got those of {_listed(held)} and"
        f" none of {_listed(empty)}: put back the missing logs, or remove {logs} to start without"
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} shards"


@contextmanager
def saves_of(
    specs: Sequence[ShardSpec], rollback_s: float, *, here: bool = False
) -> Iterator[list[str | None]]:
    """Each shard's folder of autosaves, or None if it makes none; removed on leaving.

    The paths are relative to the folder for temporary files of the machine where a shard runs.
    Autosaves on this machine are removed whatever the shards have died of. If all shards run `here`
    and this process is killed, the next start on this machine removes them.
    """
    with ExitStack() as stack:
        job = f"downpour-{secrets.token_hex(16)}"
        if here and rollback_s:
            job = stack.enter_context(temporary_folder("saves")).name
        folders = [f"{job}/shard-{spec.shard}" for spec in specs] if rollback_s else []
        try:
            yield [*folders] or [None] * len(specs)
        finally:
            for folder in folders:
                forget_saves(Path(tempfile.gettempdir()) / folder)


def _kept(child: C, order: ShardLaunch, endpoint: str, start: Start[C]) -> RestartingProcess[C]:
    again = replace(order, bind=bind_again(order.bind, endpoint))
    spec = order.spec
    values = sum(map(len, spec.map.ranges[spec.shard]))
    log = logger(__name__, job=spec.job, shard=spec.shard)
    return RestartingProcess(child, lambda: start(again, child), recovery_s(values, spec.rule), log)
