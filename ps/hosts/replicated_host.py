"""Replicated shards as plain processes of this machine: two copies each, and a coordinator.

    with ps.replicated_shards(specs) as hosts, ps.Console(hosts.cluster) as console:
        console.install(weights)
        ...

All are children of this process (process_host.py) and end with it; what died is followed as
keeper.py has it.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from ps.hosts.keeper import ReplicatedShards, keep
from ps.hosts.pipe import CoordinatorOrder, CopyOrder
from ps.hosts.process_host import Child
from ps.replicas.coordinator_server import SILENCE_S
from ps.replicas.record import RECORD
from ps.sharing.claims import temporary_folder
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

    Returns when each shard has a backup. All listen on `host`, wherever is free, and are told as
    this machine's own address where that is 0.0.0.0. Where other hosts can reach them, all links
    speak CURVE and let in only who holds `cluster.access`, unless `secure` says otherwise.
    `silence_s` is how long a copy may be silent before it counts as dead; one
    whose connection breaks does so at once. Raises BadInput when an address cannot be had, GiveUp
    with the cause when a process does not start within minutes, WrongBuild when it runs other code.
    """
    with temporary_folder("record") as folder:
        record = str(folder / RECORD)
        with keep(
            specs,
            _Processes(),
            host=host,
            silence_s=silence_s,
            record=record,
            secure=secure,
        ) as hosts:
            yield hosts


class _Processes:
    """Children of this process; where they run there is no choice."""

    def coordinator(self, order: CoordinatorOrder) -> Child:
        return Child("coordinator", "ps.hosts.coordinator_process", order)

    def copy(self, order: CopyOrder, beside: Collection[int]) -> Child:
        return Child(f"shard {order.spec.shard}", "ps.hosts.copy_process", order)

    def together(self, boot: int, other: int) -> bool:
        return True

    def elsewhere(self, boot: int) -> bool:
        return False
