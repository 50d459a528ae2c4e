"""Levels of durability, as far as the harness has to know them: a small value each.

How shards are started at this level, what of them has a process that may be killed, how many of
those may die together, and when the next may.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ps import Cluster, process_shards
from ps.process_host import ProcessShards
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
    processes as
    they are at this moment: `shard 0`, `backup 0`, `coordinator`. `survives` are the kinds of kill
    that the promise covers, and `together` is how many shards may die in one round. `whole` says
    whether the level stands as it must for the next to die.
    """

    name: str
    promise: str
    start: Callable[[Sequence[ShardSpec], str, Path], AbstractContextManager[Any]]
    serving: Callable[[Any], Mapping[str, int]]
    survives: tuple[Kind, ...] = (Kind.KILL_WORKER,)
    together: int = 0
    whole: Callable[[Any], bool] = _always


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

LEVELS = {level.name: level for level in (MEMORY,)}
