"""Levels of durability, as far as the harness has to know them: a small value each.

How shards are started at this level, what of them has a process that may be killed, how many of
those may die together, and when the next may.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ps import Cluster, process_shards, replicated_shards
from ps.process_host import ProcessShards
from ps.replicated_host import ReplicatedShards
from shards.spec import ShardSpec
from tests.chaos.schedule import Kind


class Hosts(Protocol):
    """What hosts a job's shards."""

    @property
    def cluster(self) -> Cluster: ...


def _always(_: Any) -> bool:
    return True


class Level(NamedTuple):
    """A level's name, its promise in a sentence, and how to hold it to that.

    `start` starts the shards at an address, with a folder for what they keep. `serving` names their
    processes as they are at this moment: `shard 0`, `backup 0`, `coordinator`. `survives` are the
    kinds of kill that the promise covers, `together` how many shards may die in one round. `whole`
    says whether the level stands as it must for the next to die; `transports` are those that its
    workers may have; `linkable` says whether its shards may listen where a link leads.
    """

    name: str
    promise: str
    start: Callable[[Sequence[ShardSpec], str, Path], AbstractContextManager[Any]]
    serving: Callable[[Any], Mapping[str, int]]
    survives: tuple[Kind, ...] = (Kind.KILL_WORKER,)
    together: int = 0
    whole: Callable[[Any], bool] = _always
    transports: Sequence[str] = ("auto", "tcp", "ipc")
    linkable: bool = True


def _serving(hosts: ProcessShards) -> Mapping[str, int]:
    return {f"shard {number}": pid for number, pid in enumerate(hosts.pids)}


def _memory(specs: Sequence[ShardSpec], host: str, _: Path) -> AbstractContextManager[Any]:
    return process_shards(specs, host=host, secure=False)


MEMORY = Level(
    "memory",
    "nothing that was acknowledged is lost or doubled while the shards live",
    _memory,
    _serving,
)


def _replicated(specs: Sequence[ShardSpec], host: str, _: Path) -> AbstractContextManager[Any]:
    return replicated_shards(specs, host=host)


def _parts(hosts: ReplicatedShards) -> Mapping[str, int]:
    """`shard 0` is its primary, `backup 0` its backup; a spare has no name yet."""
    found = {}
    for part, pid in hosts.pids.items():
        name, _, role = part.rpartition(" ")
        if role == "primary":
            found[name] = pid
        elif role == "backup":
            found[f"backup {name.removeprefix('shard ')}"] = pid
        elif part == "coordinator":
            found[part] = pid
    return found


def _redundant(hosts: ReplicatedShards) -> bool:
    hosts.check()
    parts = _parts(hosts)
    return hosts.redundant and len(parts) == 1 + 2 * hosts.cluster.map.shards


REPLICATED = Level(
    "replicated",
    "nothing that was acknowledged is lost or doubled by any one death at a time",
    _replicated,
    _parts,
    survives=(Kind.KILL_WORKER, Kind.KILL_SHARD, Kind.KILL_BACKUP, Kind.KILL_COORDINATOR),
    together=1,
    whole=_redundant,
    transports=("auto", "tcp"),
    linkable=False,
)
LEVELS = {level.name: level for level in (MEMORY, REPLICATED)}
