"""Everything about a training job but its data, as a value."""

from collections.abc import Callable

import msgspec
from msgspec import structs

from ps import Compression
from ps.durability import Durability
from ps.hosts.hosting import Home, ShardDevice
from ps.logs.saves import ROLLBACK_S
from ps.protocol.compression import compression_of
from ps.replicas.coordinator_server import SILENCE_S
from ps.storage.shelf import EVERYTHING, Keep
from ps.wire.link_model import LinkModel, link_of
from ps.wire.reach import on_this_host
from ps.wire.transport import Transport
from shards import arguments
from shards.rules import Decay, Rule, decay_of, rule_of
from shards.schedules import Schedule, schedule_of
from worker.model import Model
from worker.placement import ANY, Wanted
from worker.replica import Plan

DEFAULT_SEED = 1
"""The seed of a job that nothing gives one."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A training job, whatever its data.

    `model` builds the network, in this process and in every task; `plan` is each worker's;
    `workers` is the number of partitions the data is trained in; `shape` is that of one row of
    `data` (None: as the columns say, worker/columns.py); `bound` is the staleness bound in
    steps (None: none). A snapshot is taken every `snapshot_every` iterations, an iteration being
    one step of every worker, and every `snapshot_every_s` seconds (0: not by that), and at the end;
    without `snapshot_at_end` a job that ends by itself takes no last one. `keep` says which stay,
    `snapshot_aligned` that the shards stand still for one. The shards live at `shards_in`, hold
    their weights on `shard_device`, and listen on `bind` and `port` (ps/hosts/hosting.py): where
    others than this host can reach them, they speak CURVE and let in this job's workers alone,
    unless `plaintext`. If their logs are `logs_apart`, each node has a folder to itself for them.
    Each worker is put behind a `link` of this kind, to try one out, and computes on a `device` as
    `worker.placement` says. `transport` carries the data. A copy of a replicated shard that is
    silent for `silence_s` counts as dead. At durability `memory` a shard that dies takes back what
    it applied in the last `rollback_s`; with 0 its death ends the job. Every `display` iterations
    (0: never) the loss is logged, as the mean of the last `average_loss` iterations (None: one).
    """

    model: Callable[[], Model]
    plan: Plan
    rule: Rule
    schedule: Schedule
    decay: Decay
    batch_size: int
    workers: int
    shape: tuple[int, ...] | None = None
    shards: int = 1
    bound: int | None = 0
    shuffle: bool = True
    lease_s: float = 10.0
    snapshot_every: int = 0
    snapshot_every_s: float = 0.0
    snapshot_aligned: bool = False
    keep: Keep = EVERYTHING
    shards_in: Home = Home.RAY
    shard_device: ShardDevice = ShardDevice.CPU
    bind: str = "127.0.0.1"
    port: int = 0
    plaintext: bool = False
    link: LinkModel | None = None
    transport: Transport = Transport.AUTO
    compression: Compression = Compression()
    device: Wanted = ANY
    durability: Durability = Durability.MEMORY
    silence_s: float = SILENCE_S
    rollback_s: float = ROLLBACK_S
    logs_apart: bool = False
    snapshot_at_end: bool = True
    display: int = 0
    average_loss: int | None = None

    def __post_init__(self) -> None:
        for field, value in _checked(self).items():
            structs.force_setattr(self, field, value)

    @property
    def guarded(self) -> bool:
        """Whether the shards let in this job's workers alone."""
        return not self.plaintext and not on_this_host(self.bind)

    @property
    def keeps_residuals(self) -> bool:
        """Whether workers keep something back of what they push."""
        return self.compression.push is not None

    @property
    def rule_name(self) -> str:
        """The kind of its rule, as snapshots tell it."""
        return str(self.rule.__struct_config__.tag)


def _checked(job: Job) -> dict[str, object]:
    """Every field that may be wrong, or come as a name or a number, as the job is to hold it."""
    function = arguments.function("model", job.model, "a function that returns a model")
    return {
        "model": function,
        "plan": arguments.instance("plan", job.plan, Plan, "a Plan"),
        "rule": rule_of("rule", job.rule),
        "schedule": schedule_of("schedule", job.schedule),
        "decay": decay_of("decay", job.decay),
        "bound": arguments.bound("bound", job.bound),
        "lease_s": arguments.seconds("lease_s", job.lease_s),
        "silence_s": arguments.seconds("silence_s", job.silence_s),
        "rollback_s": arguments.seconds("rollback_s", job.rollback_s, zero=True),
        "snapshot_every_s": arguments.number(
            "snapshot_every_s", job.snapshot_every_s, least=0, expected="0 s or more, and finite"
        ),
        "keep": arguments.instance("keep", job.keep, Keep, "a Keep"),
        "bind": arguments.name("bind", job.bind),
        "port": arguments.whole("port", job.port, 0, 65535),
        "link": link_of(job.link),
        "compression": compression_of("compression", job.compression),
        "device": arguments.instance("device", job.device, Wanted, "what parse_device returns"),
        "shards_in": arguments.choice("shards_in", job.shards_in, Home),
        "shard_device": arguments.choice("shard_device", job.shard_device, ShardDevice),
        "transport": arguments.choice("transport", job.transport, Transport),
        "durability": arguments.choice("durability", job.durability, Durability),
        **{
            name: arguments.whole(name, getattr(job, name), least)
            for name, least in (
                ("batch_size", 1),
                ("workers", 1),
                ("shards", 1),
                ("snapshot_every", 0),
                ("display", 0),
            )
        },
        "average_loss": (
            None
            if job.average_loss is None
            else arguments.whole("average_loss", job.average_loss, 1)
        ),
        "shape": _shape(job.shape),
        **{
            name: arguments.flag(name, getattr(job, name))
            for name in (
                "shuffle",
                "snapshot_aligned",
                "snapshot_at_end",
                "plaintext",
                "logs_apart",
            )
        },
    }


def _shape(value: object) -> tuple[int, ...] | None:
    """The shape of a row, or None for what the data says."""
    if value is None:
        return None
    if not isinstance(value, tuple | list):
        raise arguments.wrong("shape", "a tuple of whole numbers, or None", value)
    return tuple(arguments.whole("shape", extent, 1) for extent in value)
