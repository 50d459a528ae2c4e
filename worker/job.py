"""A training job as a value: all its settings, without the data."""

from collections.abc import Callable

import msgspec
from msgspec import structs

from ps import Compression
from ps.durability import Durability
from ps.launch.launch_plan import ShardDevice
from ps.launch.launcher import Placement
from ps.replication.coordinator_server import SILENCE_S
from ps.session.compression import compression_of
from ps.snapshots.catalog import EVERYTHING, Retention
from ps.transport.addresses import on_this_host
from ps.transport.link_model import LinkModel, link_of
from ps.transport.local_sockets import Transport
from ps.wal.autosave import ROLLBACK_S
from shards import arguments
from shards.rules import SGD, Decay, Rule, decay_of, rule_of
from shards.schedules import Fixed, Schedule, schedule_of
from worker.device_selection import ANY, DeviceRequest
from worker.model import Model
from worker.training_loop import Plan

DEFAULT_SEED = 1
"""The seed of a job for which none is given."""


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a training job; they do not depend on the data.

    Training: `model` builds the network, in this process and in every task. `plan` is the plan of
    each worker. `workers` is the number of partitions to train on. `shape` is the shape of one row
    of `data` (None: worker/arrow_images.py reads it from the columns). `bound` is the staleness
    bound in steps (None: no bound). Each worker computes on a `device` (worker/device_selection.py)
    and behind an emulated `link`, if one is given, to try it out. `transport` carries the data.
    Every `display` iterations (0: never) the loss is logged, as the mean of the last `average_loss`
    iterations (None: one). An iteration is one step of every worker.

    Snapshots: one is taken every `snapshot_every` iterations and every `snapshot_every_s` seconds
    (0: never), and at the end. Without `snapshot_at_end` a job that completes takes no last one.
    `keep` says which ones are kept; with `snapshot_aligned` the shards are quiesced for each.

    Shards: they run at `shards_in`, hold their weights on `shard_device`, and listen on `bind` and
    `port` (ps/launch/launch_plan.py). If other hosts can reach them, they use CURVE and admit only
    this job's workers, unless `plaintext`. With `logs_apart` each node has its own folder for the
    shards' logs. A copy of a replicated shard that is silent for `silence_s` counts as dead. At
    durability `memory` a shard that dies loses at most the updates of the last `rollback_s`
    seconds; with 0 its death ends the job.
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
    keep: Retention = EVERYTHING
    shards_in: Placement = Placement.RAY
    shard_device: ShardDevice = ShardDevice.CPU
    bind: str = "127.0.0.1"
    port: int = 0
    plaintext: bool = False
    link: LinkModel | None = None
    transport: Transport = Transport.AUTO
    compression: Compression = Compression()
    device: DeviceRequest = ANY
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
        """Whether the shards admit only this job's workers."""
        return not self.plaintext and not on_this_host(self.bind)

    @property
    def keeps_residuals(self) -> bool:
        """Whether workers keep a residual of the gradients that they push."""
        return self.compression.push is not None

    @property
    def rule_name(self) -> str:
        """The kind of the update rule, as snapshots store it."""
        return str(self.rule.__struct_config__.tag)


def settled(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job as its strategy has it run, and notices of what that changes.

    A strategy may bring an update rule of its own. One that pushes differences of weights moves the
    schedule and the weight decay of `job` to the workers. Raises BadInput for options that diverge
    with the job's number of workers.
    """
    strategy = job.plan.strategy.for_workers(job.workers)
    half = strategy.server(job.workers)
    notices = strategy.notices(job.workers, job.rule)
    plan = structs.replace(job.plan, strategy=strategy)
    if half.rate is None:
        return structs.replace(job, plan=plan, rule=half.rule or job.rule), notices
    return structs.replace(
        job,
        plan=structs.replace(plan, decay=job.decay),
        rule=half.rule or SGD(),
        schedule=Fixed(base_rate=half.rate),
        decay=Decay(),
    ), notices


def _checked(job: Job) -> dict[str, object]:
    """The checked fields, by name; names and numbers are converted to the types of the job."""
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
        "keep": arguments.instance("keep", job.keep, Retention, "a Retention"),
        "bind": arguments.name("bind", job.bind),
        "port": arguments.whole("port", job.port, 0, 65535),
        "link": link_of(job.link),
        "compression": compression_of("compression", job.compression),
        "device": arguments.instance(
            "device", job.device, DeviceRequest, "what parse_device returns"
        ),
        "shards_in": arguments.choice("shards_in", job.shards_in, Placement),
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
