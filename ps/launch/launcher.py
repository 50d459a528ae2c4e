"""Chooses where a job's shards run, and holds what all places have in common.

Ray actors (ray_launcher.py) are spread over a cluster; plain processes (processes.py) run on this
machine and need nothing but the base install. Both are context managers that start one shard a
spec, yield `LaunchedShards`, and leave nothing behind. The libraries of a placement are imported
only when it is chosen.
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
_RECOVERED_BYTES_S = 10e6  # of state, with its WAL; an idle machine reaches 130e6
_LAST_PORT = 65535
_BEATS = 4  # least number of missed beats after which a copy counts as dead


class Placement(StrEnum):
    """Where shards run: in Ray actors, or in processes of this machine."""

    RAY = "ray"
    PROCESSES = "processes"


class ShardDevice(StrEnum):
    """What holds and updates the weights: the host's memory and cores, or a GPU."""

    CPU = "cpu"
    GPU = "gpu"


class LaunchedShards(Protocol):
    """A job's running shards, and the cluster that they form.

    `restart_enabled` may be set: whether a shard may be restarted if that loses acknowledged
    updates. While it is off, such a death is final.
    """

    restart_enabled: bool

    @property
    def cluster(self) -> Cluster:
        """The description of the cluster, for workers and operators."""
        ...

    @property
    def degraded_reason(self) -> str:
        """Why the job might not survive a death that it should survive, in words; else empty."""
        ...

    def check(self) -> None:
        """Raise GiveUp naming a shard that has died or failed."""
        ...

    def lost_updates(self) -> list[str]:
        """The updates that deaths have cost since the last call, in words."""
        ...

    def delete_logs(self) -> None:
        """Delete the WALs on the shards' own machines when the shards end; they are not needed."""
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
    """Start one shard a spec in `home`; see `ray_shards`, `process_shards`, `replicated_shards`."""
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
    """Raise BadInput if the specs, `host`, `port` or `secure` are invalid."""
    check_specs(specs)
    arguments.name("host", host)
    most = _LAST_PORT + 1 - len(specs)
    if not 0 <= arguments.whole("port", port) <= most:
        raise BadInput(f"port: expected 0 to {most} for {len(specs)} shards, got {port}")
    if secure is not None:
        arguments.flag("secure", secure)


def check_replicable(port: int, transport: Transport, device: ShardDevice) -> None:
    """Raise BadInput naming an option that replicated shards do not support."""
    for what, fits, expected, got in (
        ("port", port == 0, "0, wherever is free", port),
        ("transport", transport in (Transport.AUTO, Transport.TCP), "auto or tcp", transport),
        ("shard device", device is ShardDevice.CPU, "cpu", device),
    ):
        if not fits:
            raise BadInput(f"durability replicated: {what}: expected {expected}, got {got}")


def check_rollback(rollback_s: float, durability: Durability, what: str = "rollback_s") -> None:
    """Raise BadInput if `rollback_s` is invalid, or positive with a durability but `memory`."""
    rollback_s = arguments.seconds(what, rollback_s, zero=True)
    if rollback_s and durability is not Durability.MEMORY:
        raise BadInput(f"{what} {rollback_s:g}: expected durability memory, got {durability}")


def check_silence(silence_s: float, lease_s: float, what: str = "silence_s") -> None:
    """Raise BadInput if `silence_s` is too short to mean death, or not shorter than a lease.

    Living copies are silent between two beats, and a beat may be late. A primary that may be
    suspended for longer than a lease would find all its workers' leases expired when it resumes.
    """
    least = _BEATS * BEAT_S
    silence_s = arguments.seconds(what, silence_s)
    if not least <= silence_s < lease_s:
        raise BadInput(
            f"{what}: expected at least {least:g} s, in which a copy sends {_BEATS} beats,"
            f" and less than the lease of a worker, {lease_s:g} s, got {silence_s:g}"
        )


def keys_for(
    specs: Sequence[ShardSpec], host: str, secure: bool | None
) -> tuple[Access | None, Admission | None]:
    """The keys for a job on `host`, and the admission for its shards; None if anybody may enter.

    `secure` None is the recommended default: keys wherever other hosts can reach the job.
    """
    wanted = not on_this_host(host) if secure is None else secure
    return issue(specs[0].workers) if wanted else (None, None)


def bind_address(host: str, port: int, shard: int) -> str:
    """The address that shard `shard` binds: `port + shard` on `host`; port 0 picks a free one."""
    return f"tcp://{host}:{port + shard if port else '*'}"


def bind_again(bind: str, endpoint: str) -> str:
    """The address for a restarted process to bind: the host of `bind`, the port of `endpoint`."""
    return f"{bind.rpartition(':')[0]}:{endpoint.rpartition(':')[2]}"


def place_of(device: ShardDevice) -> Backend:
    """The backend for a shard's arrays on this machine; raises BadInput if no GPU answers."""
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
    """Make a server for `spec`, not started yet; its boot number is the time in microseconds.

    With a `log_folder` it recovers from the WAL there; with a folder for `saves` it recovers from
    the last autosave, and makes one every `rollback_s` seconds. A restarted shard proves its
    identity by the same key as the process before it.
    """
    boot, place = time.time_ns() // 1000, place_of(device)
    reach = bind, transport, place, admission
    log = WriteAheadLog(log_folder, durability) if log_folder is not None else None
    saved = Autosaves(saves, rollback_s) if saves is not None else None
    kept = log_folder or saves
    keys = load_or_create_keys(kept) if kept is not None and admission is not None else None
    plaintext = admission is None
    return ShardServer(spec, boot, *reach, plaintext=plaintext, keys=keys, log=log, saves=saved)


def recovery_s(values: int, rules: Sequence[Rule]) -> float:
    """How many seconds a restart from the WAL may take, for a shard of `values` under `rules`.

    The shard reads a few times the size of its state (docs/explanation/durability.md).
    """
    return (
        START_S
        + 4 * values * (1 + max(len(rule.slot_names) for rule in rules)) / _RECOVERED_BYTES_S
    )


def check_build(name: str, build: str) -> None:
    """Raise WrongBuild, naming process `name`, if `build` is not the build of this process."""
    if build != build_id():
        raise WrongBuild(f"{name}: expected build {build_id()} where it runs, got {build}")
