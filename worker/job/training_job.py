"""A training job as a value: all its settings, without the data."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import structs

from ps.job_spec import expect_compression, shard_specs
from ps.session.compression import Compression
from ps.transport.addresses import on_this_host
from shards import argument_checks
from shards.aggregation import StaleLimit
from shards.errors import BadInput
from shards.live_settings import check_factor
from shards.rules import Decay, Rule, decay_of, rule_of
from shards.schedules import Schedule, schedule_of
from shards.spec import ShardSpec, TableSpec, list_rules
from shards.tables import DenseTable
from worker.data.columns import ColumnSpec
from worker.data.read_options import MAX_SKIPPED
from worker.job.options import LinkOptions, ShardRuntime, SnapshotPolicy
from worker.training.context import FunctionTask
from worker.training.device_selection import ANY, DeviceRequest
from worker.training.model import Model, check_model
from worker.training.training_loop import Plan


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of a training job; they do not depend on the data.

    Training: `model` builds the network, in every task and, unless the caller has done so and gives
    it as `driver_model`, in this process. `plan` is the plan of
    each worker. `workers` is the number of partitions to train on. `columns` are those that the
    model reads (worker/data/columns.py); empty: images `data`, in the shape that the rows state,
    and labels `label`. `bound` is the staleness bound in steps (None: no bound), `stale` a limit on
    the staleness of single pushes (None: none). `rate_factor` multiplies the rates of all schedules
    (None: 1, and a job that is resumed continues with the factor and the bound that an operator had
    set). Each worker computes on a `device` (worker/training/device_selection.py). Every `display`
    iterations (0: never) the loss is logged, as the mean of the last `average_loss` iterations
    (None: one). An iteration is one step of every worker. A worker leaves out up to `skip_images`
    images that cannot be decoded. Each worker runs a `function`, if there is one, in place of the
    loop over its batches; it may train several `tables`, each with a rule, schedule and decay of
    its own.

    `runtime`, `links` and `snapshots` are the options of the shards, of the network and of the
    snapshots (worker/job/options.py). With `logs_apart` each node has its own folder for the
    shards' logs. Without `snapshot_at_end` a job that completes takes no last snapshot.
    """

    model: Callable[[], Model]
    plan: Plan
    rule: Rule
    schedule: Schedule
    decay: Decay
    batch_size: int
    workers: int
    columns: tuple[ColumnSpec, ...] = ()
    bound: int | None = 0
    rate_factor: float | None = None
    stale: StaleLimit | None = None
    shuffle: bool = True
    skip_images: int = MAX_SKIPPED
    device: DeviceRequest = ANY
    runtime: ShardRuntime = ShardRuntime()
    links: LinkOptions = LinkOptions()
    snapshots: SnapshotPolicy = SnapshotPolicy()
    snapshot_at_end: bool = True
    logs_apart: bool = False
    display: int = 0
    average_loss: int | None = None
    function: FunctionTask | None = None
    tables: tuple[TableSpec, ...] = ()
    driver_model: Model | None = None

    def __post_init__(self) -> None:
        for field, value in _check_fields(self).items():
            structs.force_setattr(self, field, value)

    @property
    def on_loopback(self) -> bool:
        """True if only processes of the shards' own host can reach them."""
        return on_this_host(self.runtime.bind) and self.runtime.advertise is None

    @property
    def compression(self) -> Compression | dict[str, Compression]:
        """The compression of pushes and pulls, as the options or else the tables describe it."""
        chosen = self.links.build_compression()
        if self.function is None or chosen != Compression():
            return chosen
        return {name: table.compression for name, table in self.function.tables.items()}

    @property
    def keeps_own_state(self) -> bool:
        """True if workers keep values between pushes: a residual, or a state of their strategy."""
        chosen = self.compression
        every = [chosen] if isinstance(chosen, Compression) else list(chosen.values())
        if self.function is not None and isinstance(chosen, dict):  # rows leave no residual
            every = [chosen[name] for name in self.function.tables.dense]
        return bool(self.plan.strategy.keeps) or any(
            compression.push is not None for compression in every
        )

    @property
    def saves_worker_states(self) -> bool:
        """True if snapshots have states of workers; a function's loop may have an optimiser."""
        may_optimize = self.function is not None and self.plan.strategy.takes_optimizer
        return self.keeps_own_state or may_optimize

    def specs(self, tables: Sequence[TableSpec]) -> list[ShardSpec]:
        """The specs of the job's shards, with a new id for the job."""
        strategy = self.plan.strategy
        half = strategy.for_shards(self.workers, prefetch=self.plan.prefetch)
        specs = shard_specs(
            tables,
            shards=self.runtime.shards,
            bound=self.bound,
            workers=self.workers,
            merge=structs.replace(half, stale=self.stale, rate_factor=self.rate_factor or 1.0),
            lease_s=self.runtime.lease_s,
            warm_steps=strategy.warm_up,
        )
        return expect_compression(specs, self.compression)

    def tables_of(self, table: DenseTable) -> tuple[TableSpec, ...]:
        """The job's tables: those of its function, or else `table`, the model's."""
        return self.tables or (TableSpec(table, self.rule, self.schedule, self.decay),)

    @property
    def rule_names(self) -> tuple[str, ...]:
        """The kind of each table's update rule, as snapshots store it."""
        return list_rules(self.tables) or (str(self.rule.__struct_config__.tag),)


def apply_strategy(job: Job) -> tuple[Job, tuple[str, ...]]:
    """The job as its strategy has it run, and notices of what that changes.

    A strategy may bring an update rule of its own. One that pushes differences of weights moves the
    schedule and the weight decay of `job` to the workers. Raises BadInput for options that diverge
    with the job's number of workers.
    """
    strategy = job.plan.strategy.for_workers(job.workers)
    strategy.check_fragments(sum(not spec.is_sparse for spec in job.tables) or 1)
    half = strategy.server(job.workers)
    rules = [spec.rule for spec in job.tables] or [job.rule]
    notices = tuple(dict.fromkeys(n for rule in rules for n in strategy.notices(job.workers, rule)))
    plan_fields = {"workers": job.workers, "rate_factor": job.rate_factor or 1.0}
    plan = structs.replace(job.plan, strategy=strategy, **plan_fields)
    if half.deltas:
        plan = structs.replace(plan, decay=job.decay)
    rule, schedule, decay = half.settings(job.rule, job.schedule, job.decay)
    tables = tuple(
        TableSpec(spec.table, *half.settings(spec.rule, spec.schedule, spec.decay), spec.guard)
        for spec in job.tables
    )
    settings = {"rule": rule, "schedule": schedule, "decay": decay, "tables": tables}
    return structs.replace(job, plan=plan, **settings), notices


def _check_driver_model(model: object) -> Model | None:
    """Return the model, or None without one; raises BadInput for an object that is none."""
    try:
        return None if model is None else check_model(model)
    except BadInput as error:
        raise error.within("driver_model") from None


def _check_fields(job: Job) -> dict[str, object]:
    """The checked fields, by name; names and numbers are converted to the types of the job."""
    function = argument_checks.function("model", job.model, "a function that returns a model")
    return {
        "model": function,
        "driver_model": _check_driver_model(job.driver_model),
        "plan": argument_checks.instance("plan", job.plan, Plan, "a Plan"),
        "rule": rule_of("rule", job.rule),
        "schedule": schedule_of("schedule", job.schedule),
        "decay": decay_of("decay", job.decay),
        "bound": argument_checks.staleness_bound("bound", job.bound),
        "rate_factor": (
            None if job.rate_factor is None else check_factor("rate_factor", job.rate_factor)
        ),
        "function": (
            None
            if job.function is None
            else argument_checks.instance(
                "function", job.function, FunctionTask, "what worker.run makes"
            )
        ),
        "device": argument_checks.instance(
            "device", job.device, DeviceRequest, "what parse_device returns"
        ),
        "runtime": argument_checks.instance("runtime", job.runtime, ShardRuntime, "a ShardRuntime"),
        "links": argument_checks.instance("links", job.links, LinkOptions, "a LinkOptions"),
        "snapshots": argument_checks.instance(
            "snapshots", job.snapshots, SnapshotPolicy, "a SnapshotPolicy"
        ),
        **{
            name: argument_checks.whole(name, getattr(job, name), least)
            for name, least in (
                ("batch_size", 1),
                ("workers", 1),
                ("display", 0),
                ("skip_images", 0),
            )
        },
        "average_loss": (
            None
            if job.average_loss is None
            else argument_checks.whole("average_loss", job.average_loss, 1)
        ),
        "columns": tuple(
            argument_checks.instance("columns", column, ColumnSpec, "a ColumnSpec")
            for column in argument_checks.iterable("columns", job.columns, "a tuple of ColumnSpec")
        ),
        **{
            name: argument_checks.flag(name, getattr(job, name))
            for name in ("shuffle", "snapshot_at_end", "logs_apart")
        },
    }
