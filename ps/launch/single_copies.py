"""Starts, waits for, restarts and ends shards that have one copy each.

The code is shared by processes (processes.py) and Ray actors (ray_launcher.py).
"""

import secrets
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from msgspec.structs import replace

from ps.cluster import Cluster
from ps.job_spec import make_cluster
from ps.launch.child_protocol import RefusalLaunch, ShardLaunch
from ps.launch.launch_plan import START_S, LaunchPlan, bind_again, join_advice, recovery_s, remedy
from ps.launch.process_handle import ProcessHandle
from ps.launch.restart import RestartingProcess
from ps.logs import logger
from ps.process_owner import OwnerStack
from ps.shared_memory.shm_files import temporary_folder
from ps.wal.autosave import delete_autosaves
from ps.wal.log_folder import LogFolder
from shards.errors import BadInput, DownpourError
from shards.spec import ShardSpec

_NAMED = 8  # most shards named in one error
_AGAIN_S = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0, 4.0)
"""Pauses before attempts to answer for a dead shard: its port is free only when it is gone."""

Start = Callable[[ShardLaunch, ProcessHandle | None], ProcessHandle]
"""Starts a shard without waiting for it: for the first time, or to replace one that has died."""
Refuse = Callable[[RefusalLaunch, ProcessHandle], Callable[[], None]]
"""Takes a shard's last process, answers in its place, and returns a function that ends that."""


class SingleCopies:
    """The shards of one job, one process each, and the cluster they form.

    While `restart_enabled` is off, a shard that rolls back to an autosave is not restarted: its
    death is final.
    """

    degraded_reason = ""  # there are no second copies that could be missing

    def __init__(
        self, cluster: Cluster, shards: Sequence[RestartingProcess], plan: LaunchPlan
    ) -> None:
        self.cluster = cluster
        self._shards = shards
        self._plan = plan
        self._restart_enabled = True

    @property
    def pids(self) -> tuple[int, ...]:
        """Each shard's process id; it changes when the process is started again.

        In Ray the id is valid on the shard's node, and changes once the new actor has reported it.
        """
        return tuple(shard.pid for shard in self._shards)

    @property
    def restart_enabled(self) -> bool:
        return self._restart_enabled

    @restart_enabled.setter
    def restart_enabled(self, whether: bool) -> None:
        self._restart_enabled = whether
        if self._plan.autosave_s:
            for shard in self._shards:
                shard.restart_enabled = whether

    def lost_updates(self) -> list[str]:
        """The updates that deaths have cost since the last call, in words; empty with WALs."""
        return [
            f"{died}; restarted from its last autosave; updates since then are lost"
            for shard in (self._shards if self._plan.autosave_s else ())
            for died in shard.lost_updates()
        ]

    @property
    def deaths(self) -> int:
        """The number of processes that have died, while serving or starting."""
        return sum(shard.deaths for shard in self._shards)

    def check(self) -> None:
        """Raise GiveUp naming a shard that has died for good, or has a failed loop, and how."""
        for shard in self._shards:
            shard.check()

    def delete_logs(self) -> None:
        """Delete the WALs in the nodes' own folders when the shards end; the caller owns others."""
        if self._plan.logs_apart:
            for shard in self._shards:
                shard.child.delete_logs()


@contextmanager
def single_copies(
    plan: LaunchPlan, start: Start, refuse: Refuse, *, on_this_machine: bool
) -> Iterator[SingleCopies]:
    """Start the shards of `plan` with `start`; end them on leaving.

    `refuse` answers in place of one that has died for good. `on_this_machine`: all run here. Raises
    what a process's `endpoint` raises if it does not serve, and BadInput if some shards have found
    weights in their WALs and others have not.
    """
    access, admission = plan.issue_keys()
    folders = [plan.durability.folder_for(plan.logs, spec.shard) for spec in plan.specs]
    seen = plan.durability.keeps_log and not plan.logs_apart
    for folder in folders:
        if folder is not None and seen:
            LogFolder(Path(folder)).make()
    own_folders = plan.autosave_s > 0 or (admission is not None and not plan.durability.keeps_log)
    with _folders_of(plan.specs, needed=own_folders, on_this_machine=on_this_machine) as saves:
        orders = [
            ShardLaunch(
                spec,
                plan.bind(spec.shard),
                plan.transport,
                plan.device,
                admission,
                plan.durability,
                folder,
                seen,
                saved,
                plan.autosave_s,
                plan.advertised(spec.shard),
            )
            for spec, folder, saved in zip(plan.specs, folders, saves, strict=True)
        ]
        advice = remedy(plan.logs, plan.rollback_s)
        with serving(orders, start, refuse, advice) as (endpoints, shards):
            yield SingleCopies(make_cluster(plan.specs, endpoints, access), shards, plan)


@contextmanager
def serving(
    orders: Sequence[ShardLaunch], start: Start, refuse: Refuse, advice: str
) -> Iterator[tuple[list[str], Sequence[RestartingProcess]]]:
    """Run one process per order while the context lasts; yields the endpoints and processes.

    If its order `restarts`, a process that dies is restarted on the same endpoint (restart.py). One
    that has died for good is answered for by `refuse`, with the cause and the `advice`.
    """
    ending, end_refusals = threading.Event(), list[Callable[[], None]]()
    children: list[ProcessHandle] = []
    shards: list[RestartingProcess] = []
    with OwnerStack() as stack:
        stack.callback(lambda: _end(shards or children, ending, end_refusals))
        for order in orders:
            # One at a time, so that the stack ends the earlier ones if the next does not start.
            children.append(start(order, None))  # noqa: PERF401  # see above
        until = time.monotonic() + START_S
        endpoints = [child.endpoint(until) for child in children]
        _check_all_or_none(orders, children)
        for order, child, endpoint in zip(orders, children, endpoints, strict=True):
            again = replace(order, bind=bind_again(order.bind, endpoint))

            def refuse_for(cause: str, last: ProcessHandle, again: ShardLaunch = again) -> None:
                reason = join_advice(cause, advice)
                for pause_s in _AGAIN_S:
                    if ending.wait(pause_s):
                        return
                    try:
                        end_refusals.append(refuse(RefusalLaunch(again, reason), last))
                    except DownpourError as error:
                        logger(__name__).info("%s: nobody answers for it: %s", again.name, error)
                    else:
                        return

            shards.append(_restarting(again, child, start, refuse_for))
        yield endpoints, shards


def _end(
    processes: Sequence[RestartingProcess | ProcessHandle],
    ending: threading.Event,
    end_refusals: Sequence[Callable[[], None]],
) -> None:
    ending.set()
    for process in processes:
        process.ask_to_end()
    for process in processes:
        process.end()
    for end_refusal in end_refusals:
        end_refusal()


def _restarting(
    again: ShardLaunch,
    child: ProcessHandle,
    start: Start,
    given_up: Callable[[str, ProcessHandle], None],
) -> RestartingProcess:
    spec = again.spec
    start_s = recovery_s(len(spec.keys), [table.rule for table in spec.tables])
    log = logger(__name__, job=spec.job, shard=spec.shard)
    return RestartingProcess(
        child,
        lambda: start(again, child),
        start_s,
        log,
        restart_enabled=again.restarts,
        given_up=given_up,
    )


def _check_all_or_none(orders: Sequence[ShardLaunch], children: Sequence[ProcessHandle]) -> None:
    """Raise BadInput if some shards have recovered weights and others have none.

    Clients of such a job would wait for ever, or continue with a part of the acknowledged pushes.
    """
    folders = [order.log_folder for order in orders]
    empty = [child.name for child in children if child.empty]
    filled = [child.name for child in children if not child.empty]
    if None in folders or not (empty and filled):
        return
    logs = Path(str(folders[0])).parent
    raise BadInput(
        f"logs {logs}",
        expected="weights of every shard or of none",
        got=(
            f"those of {_list_names(filled)} and none of {_list_names(empty)}: put "
            f"back the missing logs, or remove {logs} to start without them"
        ),
    )


def _list_names(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= _NAMED else f"{len(names)} shards"


@contextmanager
def _folders_of(
    specs: Sequence[ShardSpec], *, needed: bool, on_this_machine: bool
) -> Iterator[list[str | None]]:
    """Each shard's folder for its key and its autosaves, or None if not needed; removed on leaving.

    The paths are relative to the folder for temporary files of the machine where a shard runs.
    Folders on this machine are removed however the shards ended. If all shards run on this machine
    and this process is killed, the next start here removes them.
    """
    with OwnerStack() as stack:
        job = f"downpour-{secrets.token_hex(16)}"
        if on_this_machine and needed:
            job = stack.enter_context(temporary_folder("saves")).name
        folders = [f"{job}/shard-{spec.shard}" for spec in specs] if needed else []
        for folder in folders:
            stack.callback(delete_autosaves, Path(tempfile.gettempdir()) / folder)
        yield [*folders] or [None] * len(specs)
