"""The plan of a launch: which shards to start, where they listen, and what they keep; with checks.

Every placement (launcher.py) starts a job's shards from such a plan.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TypedDict

import msgspec
from msgspec import structs

from cupy_kernels.backends import GPU, HOST, Backend
from cupy_kernels.cupy_device import gpu
from ps import path_checks
from ps.cluster import Access
from ps.durability import Durability
from ps.job_spec import check_specs
from ps.replication.coordinator_server import SILENCE_S
from ps.replication.heartbeat import BEAT_S
from ps.security.authorization import Admission, issue
from ps.transport.addresses import LAST_PORT, numeric, on_this_host
from ps.transport.advertised_address import Advertised, network_id, parse_advertised
from ps.transport.transports import Transport, transport_named
from ps.wal.autosave import ROLLBACK_S
from shards import argument_checks
from shards.errors import BadInput
from shards.messages import LONGEST_TEXT
from shards.rules import Rule
from shards.spec import ShardSpec

START_S = 120.0  # On a busy machine importing Ray alone may take a minute.
_RECOVERED_BYTES_S = 10e6  # of state per second of replay, at least; idle machines reach 130e6
_PORTS_A_SHARD = 6  # of two copies and a replacement, for clients and for each other
_BEATS = 4  # least number of missed beats after which a copy counts as dead


class ShardDevice(StrEnum):
    """The device that holds and updates the weights: the host's memory and cores, or a GPU."""

    CPU = "cpu"
    GPU = "gpu"


class LaunchOptions(TypedDict, total=False):
    """Options of how a job's shards run, all optional: see `LaunchPlan`, which checks them."""

    host: str
    port: int
    advertise: str | None
    coordinator_port: int
    copy_ports: str | None
    transport: Transport | str
    device: ShardDevice | str
    secure: bool | None
    durability: Durability | str
    logs: str | Path | None
    logs_apart: bool
    rollback_s: float | None
    silence_s: float


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One shard for each of the `specs`; raises BadInput naming an invalid field.

    - `host`, `port`: shard i listens on `port + i` of `host`; port 0 picks free ones.
    - `advertise`: the address that clients are given, HOST or HOST:PORT, with PORT for shard 0;
      None: chosen by each shard's host (advertised_address.py), best one that reaches `peer`.
    - `coordinator_port`, `copy_ports`: of replicated shards; 0 and None pick free ones. A range
      such as 7500-7599 has at least 6 ports for each shard.
    - `transport`: offered to workers on the shard's host, as well as TCP.
    - `device`: what holds the weights.
    - `secure`: use CURVE and admit only holders of keys; None: if other hosts can reach `host`.
    - `durability`, `logs`: what survives a death, and the folder for the shards' WALs. With
      `logs_apart` each node has a folder of its own at that path.
    - `rollback_s`: at durability `memory`, seconds between a shard's autosaves; 0: none. None is
      the default there, ROLLBACK_S.
    - `silence_s`: seconds of silence after which a copy of a replicated shard counts as dead.
    """

    specs: Sequence[ShardSpec]
    host: str = "127.0.0.1"
    port: int = 0
    advertise: str | None = None
    peer: str | None = None
    coordinator_port: int = 0
    copy_ports: str | None = None
    transport: Transport = Transport.AUTO
    device: ShardDevice = ShardDevice.CPU
    secure: bool | None = None
    durability: Durability = Durability.MEMORY
    logs: Path | None = None
    logs_apart: bool = False
    rollback_s: float | None = None
    silence_s: float = SILENCE_S

    def __post_init__(self) -> None:
        check_specs(self.specs)
        for field, value in (
            ("transport", transport_named(self.transport)),
            ("device", argument_checks.choice("device", self.device, ShardDevice)),
            ("durability", argument_checks.choice("durability", self.durability, Durability)),
            ("logs", None if self.logs is None else path_checks.path("logs", self.logs)),
        ):
            structs.force_setattr(self, field, value)
        structs.force_setattr(
            self, "host", numeric("host", argument_checks.name("host", self.host))
        )
        most = LAST_PORT + 1 - len(self.specs)
        if not 0 <= argument_checks.whole("port", self.port) <= most:
            count = len(self.specs)
            raise BadInput("port", expected=f"0 to {most} for {count} shards", got=self.port)
        argument_checks.whole("coordinator_port", self.coordinator_port, 0, LAST_PORT)
        self._check_addresses()
        if self.secure is not None:
            argument_checks.flag("secure", self.secure)
        argument_checks.flag("logs_apart", self.logs_apart)
        argument_checks.seconds("silence_s", self.silence_s)
        if self.rollback_s is not None:
            check_rollback(self.rollback_s, self.durability)
        if self.durability is Durability.REPLICATED:
            check_replicable(self.port, self.transport, self.device)
            check_silence(self.silence_s, self.specs[0].lease_s)

    @property
    def autosave_s(self) -> float:
        """Seconds between a shard's autosaves; 0 if it makes none."""
        if self.durability is not Durability.MEMORY:
            return 0.0
        return ROLLBACK_S if self.rollback_s is None else self.rollback_s

    def bind(self, shard: int) -> str:
        """The address that the shard binds."""
        return f"tcp://{self.host}:{self.port + shard if self.port else '*'}"

    @property
    def coordinator_bind(self) -> str:
        """The address that the coordinator of replicated shards binds."""
        return f"tcp://{self.host}:{self.coordinator_port or '*'}"

    @property
    def copy_bind(self) -> str:
        """The address that each copy of a replicated shard binds twice, perhaps with a range."""
        return f"tcp://{self.host}:{self.copy_ports or '*'}"

    def advertised(self, shard: int = 0) -> Advertised:
        """The launcher's part in the choice of the address that the shard's clients are given."""
        host, port = (
            parse_advertised("advertise", self.advertise) if self.advertise else (None,) * 2
        )
        return Advertised(host, port + shard if port else None, self.peer, network_id())

    def _check_addresses(self) -> None:
        if self.advertise is not None:
            _, port = parse_advertised("advertise", self.advertise)
            if port and not self.port:
                expected = "port, too, as the ports that shards listen on"
                raise BadInput(f"advertise {self.advertise}", expected=expected, got="none")
        if self.copy_ports is not None:
            first, last = parse_port_range("copy_ports", self.copy_ports)
            check_copy_ports("copy_ports", last + 1 - first, len(self.specs))

    def issue_keys(self) -> tuple[Access | None, Admission | None]:
        """New keys for the job, and the admission for its shards; None if anybody may enter."""
        secure = not on_this_host(self.host) if self.secure is None else self.secure
        return issue(self.specs[0].workers) if secure else (None, None)


def remedy(logs: object, rollback_s: float | None) -> str:
    """Advice for users of the SDK when a shard has died for good."""
    if logs is not None:
        return f"the job has ended: continue it with resume={str(logs)!r}"
    if rollback_s == 0:
        return (
            "the job has ended: with rollback_s=10 such a shard continues from an autosave, with"
            ' durability="process" without a loss'
        )
    return "the job has ended: continue from a snapshot, if there is one, with resume=..."


def join_advice(cause: str, advice: str) -> str:
    """The cause of a shard's death with the advice, as one answer of a shard can hold them."""
    # The cause is cut, because the length of an answer is limited, and the advice must be in it.
    return f"{cause[: LONGEST_TEXT - len(advice) - 2]}; {advice}"


def plan_of(specs: Sequence[ShardSpec], options: LaunchOptions) -> LaunchPlan:
    """The plan with these options; raises BadInput for one that does not exist."""
    argument_checks.check_names("options", options, LaunchOptions.__annotations__)
    plan = LaunchPlan(specs=specs, **options)  # type: ignore[arg-type]  # it converts them
    check_log_folder(plan.logs, plan.durability)
    return plan


def parse_port_range(label: str, text: object) -> tuple[int, int]:
    """The first and the last port of a range such as 7500-7599; raises BadInput naming `label`."""
    given = argument_checks.text(label, text, "a range of ports, as 7500-7599")
    first, dash, last = given.partition("-")
    are_numbers = dash and first.isdecimal() and last.isdecimal() and len(given) <= 11
    if are_numbers and 0 < int(first) <= int(last) <= LAST_PORT:
        return int(first), int(last)
    raise BadInput(label, expected="a range of ports, as 7500-7599", got=f"{given[:80]!r}")


def check_copy_ports(label: str, ports: int, shards: int) -> None:
    """Raise BadInput if there are too few ports for the copies of replicated shards."""
    least = _PORTS_A_SHARD * shards
    if ports < least:
        expected = f"at least {least} ports, {_PORTS_A_SHARD} for each of {shards} shards"
        raise BadInput(label, expected=expected, got=ports)


def check_replicable(port: int, transport: Transport, device: ShardDevice) -> None:
    """Raise BadInput naming an option that replicated shards do not support."""
    for option, fits, expected, got in (
        ("port", port == 0, "0, for free ports", port),
        ("transport", transport in (Transport.AUTO, Transport.TCP), "auto or tcp", transport),
        ("shard device", device is ShardDevice.CPU, "cpu", device),
    ):
        if not fits:
            raise BadInput(f"durability replicated: {option}", expected=expected, got=got)


def check_rollback(rollback_s: float, durability: Durability, option: str = "rollback_s") -> None:
    """Raise BadInput if `rollback_s` is invalid, or positive with a durability but `memory`."""
    rollback_s = argument_checks.seconds(option, rollback_s, zero=True)
    if rollback_s and durability is not Durability.MEMORY:
        raise BadInput(f"{option} {rollback_s:g}", expected="durability memory", got=durability)


def check_log_folder(logs: str | Path | None, durability: Durability, option: str = "logs") -> None:
    """Raise BadInput for a folder of logs with a durability that keeps none.

    Its user would expect to resume from them.
    """
    if logs is not None and not durability.keeps_log:
        raise BadInput(
            option,
            expected="a folder for logs only with durability process or logged",
            got=f"durability {durability}",
        )


def check_silence(silence_s: float, lease_s: float, option: str = "silence_s") -> None:
    """Raise BadInput if `silence_s` is too short to mean death, or not shorter than a lease.

    Living copies are silent between two beats, and a beat may be late. A primary that may be
    suspended for longer than a lease would find all its workers' leases expired when it resumes.
    """
    least = _BEATS * BEAT_S
    silence_s = argument_checks.seconds(option, silence_s)
    if not least <= silence_s < lease_s:
        raise BadInput(
            option,
            expected=(
                f"at least {least:g} s, in which a copy sends {_BEATS} beats, "
                f"and less than the lease of a worker, {lease_s:g} s"
            ),
            got=f"{silence_s:g}",
        )


def bind_again(bind: str, endpoint: str) -> str:
    """The address for a restarted process to bind: the host of `bind`, and its port.

    If that was any free one, it is the port of `endpoint`. A NAT may change the port of an endpoint
    that is advertised, but then the bound one is fixed.
    """
    host, _, port = bind.rpartition(":")
    return bind if port.isdecimal() else f"{host}:{endpoint.rpartition(':')[2]}"


def place_of(device: ShardDevice) -> Backend:
    """The backend for a shard's arrays on this machine; raises BadInput if no GPU answers."""
    if device is ShardDevice.GPU and gpu() is None:
        raise BadInput(
            "shard device gpu",
            expected="a GPU that answers",
            got="none here, or no CuPy (the extra `gpu`)",
        )
    return GPU if device is ShardDevice.GPU else HOST


def recovery_s(values: int, rules: Sequence[Rule]) -> float:
    """The seconds that a restart from the WAL may take, for a shard of `values` under `rules`.

    The shard reads a few times the size of its state (docs/explanation/durability.md).
    """
    arrays = 1 + max(len(rule.slot_names) for rule in rules)
    return START_S + 4 * values * arrays / _RECOVERED_BYTES_S
