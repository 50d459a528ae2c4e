"""Where a job's shards live, and what every such place does alike.

Ray actors (ray_launcher.py) are spread over a cluster; plain processes (processes.py) run on this
machine and need nothing but the base install. Either is a context manager that starts one shard a
spec, gives `LaunchedShards`, and leaves nothing behind. A home's own libraries are loaded when it
is chosen.
"""

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from cupy_kernels.backends import GPU, HOST, Backend
from cupy_kernels.device import gpu
from ps.cluster import Access, Cluster
from ps.compatibility import build_id
from ps.durability import Durability
from ps.job_spec import check_specs
from ps.replication.coordinator_server import SILENCE_S
from ps.replication.heartbeat import BEAT_S
from ps.security.authorization import Admission, issue
from ps.security.key_file import load_or_create_keys
from ps.server.server import ShardServer
from ps.transport.addresses import on_this_host
from ps.transport.local_sockets import Transport
from ps.wal.autosave import Autosaves
from ps.wal.writer import WriteAheadLog
from shards import arguments
from shards.errors import BadInput, WrongBuild
from shards.rules import Rule
from shards.spec import ShardSpec

START_S = 120.0  # On a busy machine importing Ray alone may take a minute.
_RECOVERED_BYTES_S = 10e6  # of state, with its log; a machine with nothing else to do: 130e6
_LAST_PORT = 65535
_BEATS = 4  # that a copy must have missed, at least, to count as dead


class Placement(StrEnum):
    """Where shards live: in Ray actors, or in processes of this machine."""

    RAY = "ray"
    PROCESSES = "processes"


class ShardDevice(StrEnum):
    """What holds and updates the weights: the host's memory and cores, or a GPU."""

    CPU = "cpu"
    GPU = "gpu"


class LaunchedShards(Protocol):
    """What hosts a job's shards, and the cluster that they form.

    `restart_enabled` may be set: whether a shard that takes back what it had acknowledged may
    follow one that has died. Where it is not, such a death is the shard's end.
    """

    restart_enabled: bool

    @property
    def cluster(self) -> Cluster:
        """Where the shards are, for workers and operators."""
        ...

    @property
    def degraded_reason(self) -> str:
        """Why a death that should be survived would not be, in words; empty where nothing is so."""
        ...

    def check(self) -> None:
        """Raise GiveUp naming a shard that has died or failed."""
        ...

    def lost_updates(self) -> list[str]:
        """What deaths have cost since this was last asked, in words."""
        ...

    def delete_logs(self) -> None:
        """Nobody will go on from the logs: those where only the shards are go with these."""
        ...


def start_shards(
    home: Placement,
    specs: Sequence[ShardSpec],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    transport: Transport = Transport.AUTO,
    device: ShardDevice = ShardDevice.CPU,
    secure: bool | None = None,
    durability: Durability = Durability.MEMORY,
    logs: Path | None = None,
    logs_apart: bool = False,
    rollback_s: float = 0.0,
    silence_s: float = SILENCE_S,
) -> AbstractContextManager[LaunchedShards]:
    """Start one shard a spec at `home`; see `ray_shards`, `process_shards`, `replicated_shards`."""
    check_rollback(rollback_s, durability)
    if durability is Durability.REPLICATED:
        check_replicable(port, transport, device)
        return _start_replicated(home, specs, host, silence_s, secure)
    match home:
        case Placement.RAY:
            from ps.launch.ray_launcher import ray_shards

            return ray_shards(
                specs,
                host=host,
                port=port,
                transport=transport,
                device=device,
                secure=secure,
                durability=durability,
                logs=logs,
                logs_apart=logs_apart,
                rollback_s=rollback_s,
            )
        case Placement.PROCESSES:
            from ps.launch.processes import process_shards

            return process_shards(
                specs,
                host=host,
                port=port,
                transport=transport,
                device=device,
                secure=secure,
                durability=durability,
                logs=logs,
                rollback_s=rollback_s,
            )


def _start_replicated(
    home: Placement, specs: Sequence[ShardSpec], host: str, silence_s: float, secure: bool | None
) -> AbstractContextManager[LaunchedShards]:
    match home:
        case Placement.RAY:
            from ps.launch.ray_launcher import replicated_ray_shards

            return replicated_ray_shards(specs, host=host, silence_s=silence_s, secure=secure)
        case Placement.PROCESSES:
            from ps.launch.replicated_processes import replicated_shards

            return replicated_shards(specs, host=host, silence_s=silence_s, secure=secure)


def check_place(
    specs: Sequence[ShardSpec], host: str, port: int = 0, secure: bool | None = None
) -> None:
    """Raise BadInput where these shards cannot be told to listen there."""
    check_specs(specs)
    arguments.name("host", host)
    most = _LAST_PORT + 1 - len(specs)
    if not 0 <= arguments.whole("port", port) <= most:
        raise BadInput(f"port: expected 0 to {most} for {len(specs)} shards, got {port}")
    if secure is not None:
        arguments.flag("secure", secure)


def check_replicable(port: int, transport: Transport, device: ShardDevice) -> None:
    """Raise BadInput naming what replicated shards cannot have."""
    for what, fits, expected, got in (
        ("port", port == 0, "0, wherever is free", port),
        ("transport", transport in (Transport.AUTO, Transport.TCP), "auto or tcp", transport),
        ("shard device", device is ShardDevice.CPU, "cpu", device),
    ):
        if not fits:
            raise BadInput(f"durability replicated: {what}: expected {expected}, got {got}")


def check_rollback(rollback_s: float, durability: Durability, what: str = "rollback_s") -> None:
    """Raise BadInput for a time that none can be, or where no death takes anything back."""
    rollback_s = arguments.seconds(what, rollback_s, zero=True)
    if rollback_s and durability is not Durability.MEMORY:
        raise BadInput(f"{what} {rollback_s:g}: expected durability memory, got {durability}")


def check_silence(silence_s: float, lease_s: float, what: str = "silence_s") -> None:
    """Raise BadInput for a silence that is no sign of death, or comes to an end after a lease's.

    Living copies are silent between two beats, and a beat may be late. A primary that may stand
    still for longer than a lease wakes as one that has heard of none of its workers for so long.
    """
    least = _BEATS * BEAT_S
    silence_s = arguments.seconds(what, silence_s)
    if not least <= silence_s < lease_s:
        raise BadInput(
            f"{what}: expected at least {least:g} s, in which a copy says {_BEATS} times that it"
            f" lives, and less than the lease of a worker, {lease_s:g} s, got {silence_s:g}"
        )


def keys_for(
    specs: Sequence[ShardSpec], host: str, secure: bool | None
) -> tuple[Access | None, Admission | None]:
    """What lets into a job on `host`, and what its shards are told of it; nothing if anybody may.

    `secure` None is what everybody should have: keys wherever others than this host reach it.
    """
    wanted = not on_this_host(host) if secure is None else secure
    return issue(specs[0].workers) if wanted else (None, None)


def bind_address(host: str, port: int, shard: int) -> str:
    """What shard `shard` listens on: ports count up from `port`, 0 picks a free one."""
    return f"tcp://{host}:{port + shard if port else '*'}"


def bind_again(bind: str, endpoint: str) -> str:
    """What to listen on for another life of who was bound to `bind`, and told `endpoint`."""
    return f"{bind.rpartition(':')[0]}:{endpoint.rpartition(':')[2]}"


def place_of(device: ShardDevice) -> Backend:
    """Where a shard's arrays live on this machine; raises BadInput where no GPU answers."""
    if device is ShardDevice.GPU and gpu() is None:
        raise BadInput(
            "shard device gpu: expected a GPU that answers, got none here, or no CuPy (the extra"
            " `gpu`)"
        )
    return GPU if device is ShardDevice.GPU else HOST


def serve(
    spec: ShardSpec,
    bind: str,
    transport: Transport,
    device: ShardDevice,
    admission: Admission | None,
    durability: Durability = Durability.MEMORY,
    log_folder: Path | None = None,
    saves: Path | None = None,
    rollback_s: float = 0.0,
) -> ShardServer:
    """A server for `spec`, not started yet; its life is numbered by the time of its birth.

    With a `log_folder` it goes on from the log that lies there, with a folder for `saves` from the
    last of those, one each `rollback_s`; and it proves to be the shard by the same key as its
    former life.
    """
    boot, place = time.time_ns() // 1000, place_of(device)
    told = bind, transport, place, admission
    log = WriteAheadLog(log_folder, durability) if log_folder is not None else None
    saved = Autosaves(saves, rollback_s) if saves is not None else None
    kept = log_folder or saves
    keys = load_or_create_keys(kept) if kept is not None and admission is not None else None
    plaintext = admission is None
    return ShardServer(spec, boot, *told, plaintext=plaintext, keys=keys, log=log, saves=saved)


def recovery_s(values: int, rule: Rule) -> float:
    """How long a shard of so many values under `rule` may be silent, to be started again from its
    log: it reads a few times its state (docs/explanation/durability.md)."""
    return START_S + 4 * values * (1 + len(rule.slot_names)) / _RECOVERED_BYTES_S


def check_build(name: str, build: str) -> None:
    """Raise WrongBuild when what has that name runs other code than this process."""
    if build != build_id():
        raise WrongBuild(f"{name}: expected build {build_id()} where it runs, got {build}")
