"""Levels of durability, as far as the harness has to know them: a small value each.

How shards are started at this level, what of them has a process that may be killed, how many of
those may die together, and when the next may.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ps import Cluster
from ps.durability import Durability
from ps.launch import restart
from ps.launch.processes import process_replicas, process_shards
from ps.launch.replica_supervisor import ReplicatedShards
from ps.launch.single_copies import SingleCopies
from shards.spec import ShardSpec
from tests.chaos.schedule import Kind
from tests.support.quick_start import without_numba

_ALL = 1 << 10
ROLLBACK_S = 2.0
"""How often shards at level memory save here, rather than the usual 10 s."""
_SILENCE_S = 2.0  # a busy machine stands still for longer than the usual half a second


class Hosts(Protocol):
    """What hosts a job's shards."""

    @property
    def cluster(self) -> Cluster: ...


def _always(_: Any) -> bool:
    return True


class Level(NamedTuple):
    """A level's name, its promise in a sentence, and how to hold it to that.

    `start` starts the shards at an address, with a folder for what they keep, over CURVE if told
    so. `serving` names their processes as they are at this moment: `shard 0`, `backup 0`,
    `coordinator`. `survives` are the kinds of kill that the promise covers, `together` how many
    shards may die in one round. `whole` says whether the level stands as it must for the next to
    die; `transports` are those that its workers may have; `linkable` says whether its shards may
    listen where a link leads. `rollback_s` is how much a shard's death may take back, None where it
    may take nothing; `one_copy` says whether each shard has a single copy.
    """

    name: str
    promise: str
    start: Callable[[Sequence[ShardSpec], str, Path, bool], AbstractContextManager[Any]]
    serving: Callable[[Any], Mapping[str, int]]
    survives: tuple[Kind, ...] = (Kind.KILL_WORKER,)
    together: int = 0
    whole: Callable[[Any], bool] = _always
    transports: Sequence[str] = ("auto", "tcp", "ipc")
    linkable: bool = True
    rollback_s: float | None = None
    one_copy: bool = True

    @property
    def movable(self) -> bool:
        """Whether it can be seen what the shards hold after a move: not of what was taken back."""
        return self.rollback_s is None


def _serving(hosts: SingleCopies) -> Mapping[str, int]:
    return {f"shard {number}": pid for number, pid in enumerate(hosts.pids)}


def _memory(
    specs: Sequence[ShardSpec], host: str, folder: Path, curve: bool
) -> AbstractContextManager[Any]:
    restart.QUICK_S = 0.0  # as below
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)  # where `_saved` looks for saves
    return process_shards(specs, host=host, secure=curve, rollback_s=ROLLBACK_S)


def _saved(hosts: SingleCopies) -> bool:
    """Whether each shard has saved something: one that dies before it has is the job's end."""
    hosts.check()
    found = Path(tempfile.gettempdir()).glob("downpour-*/shard-*/save")
    return len([*found]) == hosts.cluster.map.shards


MEMORY = Level(
    "memory",
    f"a shard's death takes back {ROLLBACK_S:g} s of that shard alone; nothing else is lost, and"
    " nothing is doubled",
    _memory,
    _serving,
    survives=(Kind.KILL_WORKER, Kind.KILL_SHARD),
    together=_ALL,
    whole=_saved,
    rollback_s=ROLLBACK_S,
)


def _logged(durability: Durability, promise: str) -> Level:
    """A level at which shards keep logs, and one whose process died is started again from its."""

    def start(
        specs: Sequence[ShardSpec], host: str, folder: Path, curve: bool
    ) -> AbstractContextManager[Any]:
        # A shard that dies again and again is given up. Here its deaths are ours.
        restart.QUICK_S = 0.0
        logs = folder / "logs"
        return process_shards(specs, host=host, secure=curve, durability=durability, logs=logs)

    def whole(hosts: SingleCopies) -> bool:
        hosts.check()
        return True

    survives = (Kind.KILL_WORKER, Kind.KILL_SHARD)
    return Level(str(durability), promise, start, _serving, survives, _ALL, whole)


def _replicated(
    specs: Sequence[ShardSpec], host: str, _: Path, curve: bool
) -> AbstractContextManager[Any]:
    return process_replicas(specs, host=host, silence_s=_SILENCE_S, secure=curve)


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
    whole = hosts.redundant and len(parts) == 1 + 2 * hosts.cluster.map.shards
    # Until a coordinator that was started again has answered, another death would be the second.
    return whole and hosts._heard_at > hosts._began_at


PROCESS = _logged(
    Durability.PROCESS,
    "nothing that was acknowledged is lost or doubled by kill -9 of any process, or of all",
)
LOGGED = _logged(
    Durability.LOGGED,
    "nothing that was acknowledged is lost or doubled by kill -9 of all, nor by a power failure",
)
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
    one_copy=False,
)
LEVELS = {level.name: level for level in (MEMORY, PROCESS, LOGGED, REPLICATED)}


def leave_out_numba(folder: Path) -> None:
    """Have processes that import from where this one does find no numba.

    It takes four fifths of a shard's start. The plain loops in its place do for small tables.
    """
    sys.path.insert(0, without_numba(folder))
