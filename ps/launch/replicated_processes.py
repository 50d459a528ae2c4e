"""Replicated shards as plain processes of this machine: two copies each, and a coordinator.

    with ps.replicated_shards(specs) as hosts, ps.AdminClient(hosts.cluster) as admin:
        admin.install(weights)
        ...

All are children of this process (processes.py) and end with it; replica_supervisor.py replaces
those that die.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch
from ps.launch.processes import ChildProcess
from ps.launch.replica_supervisor import ReplicatedShards, supervise
from ps.replication.coordinator_server import SILENCE_S
from ps.replication.coordinator_store import RECORD
from ps.shared_memory.shm_files import temporary_folder
from shards.spec import ShardSpec


@contextmanager
def replicated_shards(
    specs: Sequence[ShardSpec],
    *,
    host: str = "127.0.0.1",
    silence_s: float = SILENCE_S,
    secure: bool | None = None,
) -> Iterator[ReplicatedShards]:
    """Start a coordinator and two processes a spec; end them on leaving.

    Returns when each shard has a backup. All listen on free ports of `host`; where that is 0.0.0.0,
    they are published under this machine's own address. Where other hosts can reach them, all links
    use CURVE and admit only holders of `cluster.access`, unless `secure` says otherwise. A copy
    counts as dead after `silence_s` of silence, or at once if its connection breaks.

    Raises BadInput when an address is unavailable, GiveUp with the cause when a process does not
    start within minutes, WrongBuild when it runs other code.
    """
    with temporary_folder("record") as folder:
        record = str(folder / RECORD)
        with supervise(
            specs,
            _Processes(),
            host=host,
            silence_s=silence_s,
            record=record,
            secure=secure,
        ) as hosts:
            yield hosts


class _Processes:
    """Starts copies as children of this process, all on this machine."""

    def coordinator(self, order: CoordinatorLaunch) -> ChildProcess:
        return ChildProcess("coordinator", "ps.launch.coordinator_process", order)

    def copy(self, order: CopyLaunch, near: Collection[int]) -> ChildProcess:
        return ChildProcess(f"shard {order.spec.shard}", "ps.launch.copy_process", order)

    def together(self, boot: int, other: int) -> bool:
        return True

    def elsewhere(self, boot: int) -> bool:
        return False
