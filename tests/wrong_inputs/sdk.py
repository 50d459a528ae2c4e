"""Wrong arguments of the SDK: each parameter of each public function with each value it is not.

What a parameter may be is said once, in TARGETS; a test holds that against the signatures, so a new
parameter cannot be forgotten.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    contextmanager,
)
from pathlib import Path
from typing import Any, NamedTuple, Unpack, get_args, get_origin

import numpy as np
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

import ps
import worker
from ps.client import Client
from ps.job import WorkerOptions
from ps.job_spec import expect_compression, make_cluster, reshard_specs, shard_specs
from ps.launch.threads import local_shards
from ps.resharding import reshard
from ps.start_job import OwnJob, StartOptions
from shards.spec import TableSpec
from shards.tables import Layout, cut_evenly
from tests.support import tiny_job
from tests.wrong_inputs.rows import Row
from tests.wrong_inputs.values import TABLE_SIZE, VALUES, Other
from worker.job.option_fields import list_options
from worker.job.options import LinkOptions, ShardRuntime, SnapshotPolicy
from worker.job.runner import run_job
from worker.job.training_job import Job
from worker.spark import DataFrame
from worker.strategies import Downpour
from worker.training.device_selection import parse_device
from worker.training.training_loop import Plan


class Frame(DataFrame):
    """A DataFrame as far as arguments are looked at: no Spark has to be started for it."""

    columns = ["image", "label"]  # noqa: RUF012  # as pyspark has it
    schema = StructType([StructField("image", BinaryType()), StructField("label", LongType())])

    def __new__(cls) -> "Frame":
        return object.__new__(cls)

    def __init__(self) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)  # pyspark's raises another error, outside of a session

    def select(self, *_: Any) -> "Frame":
        return self

    def head(self, *_: Any) -> Any:
        return (bytes(64),)


class Target(NamedTuple):
    """A public function: how it is called with one argument replaced, and what each is to be.

    A parameter of kind "kind?" may also be None; one of kind "" takes anything. `names` is how an
    error calls a parameter, where that is not its own name.
    """

    of: Callable[..., Any]
    call: Callable[..., Any]
    kinds: Mapping[str, str]
    names: Mapping[str, str] = {}


class Env(NamedTuple):
    """What the calls of all targets share: two shards in this process, and a client of theirs."""

    folder: Path
    table: ps.DenseTable
    specs: list[Any]
    cluster: ps.Cluster
    compressed: ps.Worker
    console: ps.AdminClient
    job: ps.Job
    own: OwnJob
    worker: ps.Worker
    reader: ps.Reader
    rows: ps.Worker
    row_reader: ps.Reader
    solver: Path


@contextmanager
def environment(folder: Path) -> Iterator[Env]:
    """Shards, clients and a console, all idle; every lazy thread and file is there on entry."""
    table = ps.DenseTable("wrong", [ps.TensorSpec("w", TABLE_SIZE)])  # type: ignore[arg-type]
    specs = shard_specs(table, shards=2)
    (folder / "job").mkdir()
    solver = tiny_job.write_job(folder / "job")
    with ExitStack() as stack:
        cluster = stack.enter_context(local_shards(specs))
        console = stack.enter_context(ps.AdminClient(cluster))
        job = ps.connect(cluster)
        own = stack.enter_context(
            ps.local(ps.Tables(net=ps.Dense.zeros({"w": 3}), user=ps.Sparse(3)), shards=2)
        )
        rows_of_own = stack.enter_context(own.worker("rows"))
        row_reader = stack.enter_context(own.reader())
        me = stack.enter_context(job.worker("of the job"))
        compressed = stack.enter_context(job.worker("packed", compression="int8"))
        reader = stack.enter_context(job.reader())
        console.read()
        reader.pull()
        for one in (me, compressed):
            with one.step() as step:
                step.pull()
        with rows_of_own.step(gather={"user": [1]}) as step:
            step.rows("user")
        row_reader.gather("user", [1])
        yield Env(
            folder,
            table,
            specs,
            cluster,
            compressed,
            console,
            job,
            own,
            me,
            reader,
            rows_of_own,
            row_reader,
            solver,
        )


def rows(env: Env) -> Iterator[Row]:
    """Every parameter with every value that it cannot be."""
    for name, target in targets(env).items():
        for parameter, kind in target.kinds.items():
            values = [v for k in kind.rstrip("?").split("|") if k for v in VALUES[k]]
            for value in values:
                if value is None and kind.endswith("?"):
                    continue
                yield _row(name, target, parameter, value)


def _row(name: str, target: Target, parameter: str, value: Any) -> Row:
    def act() -> Any:
        result = target.call(**{parameter: value})
        if isinstance(result, AbstractContextManager) and not isinstance(
            result, Client | ps.AdminClient
        ):
            with result:
                pass
        return result

    shown = f"{value.dtype}{value.shape}" if isinstance(value, np.ndarray) else f"{value!r:.40}"
    shown = "Other()" if isinstance(value, Other) else shown
    return Row("SDK", f"{name}({parameter}={shown})", act, target.names.get(parameter, parameter))


def _with(function: Callable[..., Any], **base: Any) -> Callable[..., Any]:
    """A call of `function` with `base`, of which some arguments may be replaced."""
    return lambda **wrong: function(**{**base, **wrong})


async def _entered(context: AbstractAsyncContextManager[Any]) -> None:
    """Enter and leave an asynchronous context manager."""
    async with context:
        pass


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A call with the only argument given by its place."""
    return lambda **wrong: function(*wrong.values())


def _plan() -> Plan:
    return Plan(steps=1, seed=1, strategy=Downpour(), schedule=ps.Fixed(base_rate=0.1))


def _model() -> Any:
    raise AssertionError("nothing is to be built of a wrong job")


def _job() -> Job:
    return Job(
        model=_model,
        plan=_plan(),
        rule=ps.SGD(),
        schedule=ps.Fixed(base_rate=0.1),
        decay=ps.Decay(),
        batch_size=1,
        workers=1,
    )


_OPTIONS = {
    "staleness": "staleness",
    "rate_factor": "above 0?",
    "on_stale": "stale",
    "skip_images": "0..",
    "strategy": "strategy",
    "n_push": "1..?",
    "n_fetch": "1..?",
    "warm_steps": "0..?",
    "prefetch": "flag",
    "shuffle": "flag",
    "seed": "whole?",
    "max_iter": "1..?",
    "device": "device?",
    "precision": "choice",
    "shards": "1..",
    "shards_in": "choice",
    "shard_device": "choice",
    "bind": "name",
    "port": "port",
    "advertise": "advertised?",
    "coordinator_port": "port",
    "copy_ports": "ports?",
    "plaintext": "flag",
    "lease_s": "seconds",
    "durability": "choice",
    "silence_s": "seconds",
    "rollback_s": "0 seconds",
    "transport": "choice",
    "link": "link",
    "compress": "compression",
    "compress_pull": "pull",
    "snapshot_every": "every",
    "snapshot_aligned": "flag",
    "snapshot_keep": "1..?",
    "snapshot_keep_for": "time",
}
_CONNECTION = {
    "retry_s": "seconds",
    "in_flight": "1..?",
    "compression": "compression|compressions",
    "keep": "path?",
    "link": "link",
    "allocate": "function",
    "transport": "choice",
    "stripes": "stripes?",
}
_CONNECTION_NAMES = {"compression": "compression|topk|threshold|table"}
_OPTION_NAMES = {
    "compress": "compress|topk|threshold",
    "compress_pull": "compress_pull|compressed pull",
}


def targets(env: Env) -> dict[str, Target]:
    """Each public function and class, by its name."""
    return {
        **_values(),
        **_jobs(env),
        **_started_jobs(env),
        **_workers(env),
        **_hosts(env),
        **_connections(env),
        **_training(env),
    }


def _values() -> dict[str, Target]:
    rate = {"base_rate": 0.1}
    number, count = "number", "1.."
    fields = {
        ps.Fixed: ({"base_rate": "0.. number"}, rate),
        ps.Step: (
            {"base_rate": "0.. number", "gamma": number, "step_size": count},
            rate | {"gamma": 0.5, "step_size": 3},
        ),
        ps.Exp: ({"base_rate": "0.. number", "gamma": number}, rate | {"gamma": 0.5}),
        ps.Inv: (
            {"base_rate": "0.. number", "gamma": "0.. number", "power": number},
            rate | {"gamma": 0.5, "power": 1.0},
        ),
        ps.MultiStep: (
            {"base_rate": "0.. number", "gamma": number, "steps": "steps"},
            rate | {"gamma": 0.5, "steps": [1]},
        ),
        ps.Poly: (
            {"base_rate": "0.. number", "power": "0.. number", "max_iteration": count},
            rate | {"power": 1.0, "max_iteration": 5},
        ),
        ps.Sigmoid: (
            {"base_rate": "0.. number", "gamma": number, "step_size": "whole"},
            rate | {"gamma": 0.5, "step_size": 3},
        ),
        ps.SGD: ({}, {}),
        ps.Momentum: ({"momentum": "0..1"}, {}),
        ps.Nesterov: ({"momentum": "0..1"}, {}),
        ps.Adagrad: ({"delta": "above 0"}, {}),
        ps.RMSProp: ({"decay_rate": "0..1", "delta": "above 0"}, {}),
        ps.AdaDelta: ({"momentum": "0..1", "delta": "above 0"}, {}),
        ps.Adam: ({"beta1": "0..1", "beta2": "0..1", "delta": "above 0"}, {}),
        ps.Decay: ({"weight": number, "kind": "choice"}, {}),
        ps.Guard: ({"max_norm": "above 0?", "quarantine_after": count}, {}),
        ps.TensorSpec: (
            {
                "name": "name",
                "shape": "shape",
                "lr_mult": number,
                "decay_mult": number,
                "buffer": "flag",
            },
            {"name": "w", "shape": 3},
        ),
        ps.DenseTable: (
            {"name": "name", "tensors": "tensors"},
            {"name": "t", "tensors": [ps.TensorSpec("w", 3)]},  # type: ignore[arg-type]
        ),
        ps.AdamW: (
            {"beta1": "0..1", "beta2": "0..1", "delta": "above 0", "weight_decay": "0..1"},
            {},
        ),
        ps.FTRL: ({"beta": "above 0", "l1": "0.. number", "l2": "0.. number"}, {}),
        ps.MomentumLookAhead: ({"momentum": "0..1"}, {}),
        ps.HeLoCo: ({"momentum": "0..1"} | _heloco(), {}),
        ps.DelayedNesterov: ({"momentum": "0..1", "n": count}, {}),
        ps.DelayCompensation: ({"strength": "0.. number", "versions": count}, {}),
        ps.AdaptiveDelayCompensation: (
            {"strength": "0.. number", "mean": "0..1", "versions": count, "delta": "above 0"},
            {},
        ),
        ps.Each: ({}, {}),
        ps.Round: ({"backups": "0.."}, {}),
        ps.Buffer: ({"size": count}, {"size": 1}),
        ps.Retention: ({"count": "1..?", "seconds": "seconds?"}, {}),
        **_strategies(),
    }
    made = {
        kind.__name__: Target(kind, _with(kind, **base), kinds)
        for kind, (kinds, base) in fields.items()
    }
    table = ps.DenseTable("wrong", [ps.TensorSpec("w", TABLE_SIZE)])  # type: ignore[arg-type]
    layout = Layout((table,))
    return made | {
        # Some sizes are only refused when the table is made.
        "TensorSpec": made["TensorSpec"]._replace(
            call=lambda **wrong: ps.DenseTable(
                "t",
                [ps.TensorSpec(**{"name": "w", "shape": 3, **wrong})],  # type: ignore[arg-type]
            ),
            names={"shape": "shape|tensor w|at most [0-9]+ floats"},
        ),
        "Guard": made["Guard"]._replace(names={"max_norm": "guard"}),
        "DenseTable.views": Target(
            table.views, _with(table.views), {"arena": "views"}, {"arena": "table wrong.*arena"}
        ),
        "cut_evenly": Target(
            cut_evenly,
            _with(cut_evenly, layout=layout),
            {"layout": "", "shards": "1..", "epoch": ""},
        ),
        "Compression": Target(
            ps.Compression,
            _with(ps.Compression),
            {"push": "object?", "pull": "choice", "pull_share": "number", "zstd": "flag"},
            {"push": "compression", "pull": "compressed pull"},
        ),
        "Compression.parse": Target(
            ps.Compression.parse,
            _with(ps.Compression.parse),
            {"push": "compression", "pull": "pull"},
            {"push": "compression|topk|threshold", "pull": "compressed pull"},
        ),
        "parse_link": Target(
            ps.parse_link, _with(ps.parse_link), {"text": "link"}, {"text": "link"}
        ),
        "parse_device": Target(
            parse_device, _with(parse_device), {"text": "device"}, {"text": "device"}
        ),
    }


def _strategies() -> dict[Any, Any]:
    """The options of each strategy, none of which has to be given."""
    count, above, share = "1..", "above 0", "0..1"
    windows = {"h": count, "outer_lr": above, "momentum": share, "inner_lr": "above 0?"}
    diloco = windows | {"weight_decay": share}
    fragments = diloco | {
        "speeds": "speeds",
        "overlap": "0..",
        "alpha": "0..1 closed",
        "average": "average",
    }
    options: dict[Any, dict[str, str]] = {
        worker.Downpour: {"n_push": count, "n_fetch": count, "warm_steps": "0.."},
        worker.BSP: {"b": "0.."},
        worker.SSP: {},
        worker.ASP: {},
        worker.StaleRate: {},
        worker.Softsync: {"n": count},
        worker.DynSGD: {"window": count},
        worker.ADAG: {"window": count},
        worker.DCASGD: {"adaptive": "flag", "strength": "above 0?", "mean": share},
        worker.EASGD: {"alpha": "above 0?", "tau": count},
        worker.EAMSGD: {"alpha": "above 0?", "tau": count, "momentum": share},
        worker.SparkNet: {"tau": count, "momentum": share},
        worker.LocalSGD: {"h": count},
        worker.DiLoCo: diloco | {"b": "0.."},
        worker.AsyncDiLoCo: diloco | {"n": "1..?", "speeds": "speeds"},
        worker.MLA: diloco | {"speeds": "speeds", "scale": "above 0?"},
        worker.AsyncHeLoCo: diloco | {"speeds": "speeds", "scale": "above 0?"} | _heloco(),
        worker.StreamingDiLoCo: fragments,
        worker.DecoupledDiLoCo: fragments | {"k": count, "grace": "0..1 closed"},
        worker.FedBuff: {"k": count, "outer_lr": above, "window": count},
    }
    for kind in (worker.Downpour, worker.SSP, worker.ASP, worker.DCASGD, worker.ADAG):
        options[kind]["scale"] = "above 0?"
    return {kind: (fields, {}) for kind, fields in options.items()}


def _heloco() -> dict[str, str]:
    """The constants of the correction of HeLoCo."""
    shares, numbers = ("c_ok", "beta_max"), ("k_s", "k_d", "kappa")
    return dict.fromkeys(shares, "0..1 closed") | dict.fromkeys(numbers, "0.. number")


def _jobs(env: Env) -> dict[str, Target]:
    return {
        "shard_specs": Target(
            shard_specs,
            _with(shard_specs, tables=env.table),
            {
                "tables": "table specs",
                "shards": "1..",
                "rule": "rule?",
                "schedule": "schedule?",
                "decay": "decay?",
                "bound": "bound",
                "workers": "1..",
                "merge": "choice",
                "lease_s": "seconds",
                "warm_steps": "0..",
                "guard": "object?",
                "name": "name",
            },
        ),
        "expect_compression": Target(
            expect_compression,
            _with(expect_compression, specs=env.specs, compression="int8"),
            {"specs": "specs", "compression": "compression|compressions"},
            {"compression": "compression|topk|threshold|table"},
        ),
        "successors": Target(
            reshard_specs,
            _with(reshard_specs, specs=env.specs, shards=1),
            {"specs": "specs", "shards": "1.."},
        ),
        "describe": Target(
            make_cluster,
            _with(make_cluster, specs=env.specs, endpoints=["a", "b"]),
            {"specs": "specs", "endpoints": "endpoints", "access": ""},
        ),
        "Cluster.load": Target(
            ps.Cluster.load,
            _with(ps.Cluster.load),
            {"path": "path"},
        ),
        "Cluster.save": Target(
            env.cluster.save,
            _with(env.cluster.save),
            {"path": "path"},
        ),
    }


def _hosts(env: Env) -> dict[str, Target]:
    return {
        "local_shards": Target(
            local_shards,
            _with(local_shards, specs=env.specs),
            {
                "specs": "specs",
                "weights": "array|weights?",
                "transport": "choice",
                "device": "choice",
                "secure": "flag?",
            },
            {"weights": "weights"},
        ),
    }


def _started_jobs(env: Env) -> dict[str, Target]:
    dense, job = ps.Dense.zeros({"w": TABLE_SIZE}), env.job
    started = {
        "tables": "params",
        "shards": "1..",
        "staleness": "bound",
        "workers": "1..",
        "start": "values?",
        "resume": "path?",
        "server": "object?",
        "strategy": "",
        "name": "name",
        "host": "host",
        "port": "port",
        "advertise": "advertised?",
        "coordinator_port": "port",
        "copy_ports": "ports?",
        "transport": "choice",
        "device": "choice",
        "secure": "flag?",
        "durability": "choice",
        "logs": "path?",
        "logs_apart": "flag",
        "rollback_s": "0 seconds?",
        "silence_s": "seconds",
        "lease_s": "seconds",
        "warm_steps": "0..",
        "on_stale": "stale",
    }
    settings = {
        "rule": "rule",
        "rate": "schedule",
        "decay": "decay",
        "guard": "object?",
        "compression": "compression",
        "multipliers": "multipliers?",
        "buffers": "buffers",
    }
    structure = "params|tensor|TensorSpec|DenseTable"
    return {
        "Dense.like": Target(
            ps.Dense,
            lambda **wrong: ps.Dense.like(**{"params": {"w": [1.0]}, **wrong}).table("t"),
            {"params": "params", **settings},
            {
                "params": structure,
                "compression": "compression|topk|threshold",
                "multipliers": "multipliers|TensorSpec w",
            },
        ),
        "Dense.zeros": Target(
            ps.Dense.zeros,
            lambda **wrong: ps.Dense.zeros(**wrong).table("t"),
            {"shapes": "shapes", "settings": ""},
            {"shapes": "shapes|params|TensorSpec|tensor w"},
        ),
        "Sparse": Target(
            ps.Sparse,
            _with(ps.Sparse, dim=3),
            {
                "dim": "1..",
                "rule": "rule",
                "rate": "schedule",
                "decay": "decay",
                "guard": "object?",
                "compression": "compression",
                "init": "object?",
                "seed": "0..",
                "rows": "1..",
                "unknown": "",
            },
            {"compression": "compression|topk|threshold"},
        ),
        "Uniform": Target(ps.Uniform, ps.Uniform, {"scale": "0.. number"}),
        "Normal": Target(ps.Normal, ps.Normal, {"deviation": "0.. number"}),
        "Constant": Target(ps.Constant, ps.Constant, {"value": "number"}),
        "Tables": Target(ps.Tables, _first(ps.Tables), {"tables": "tables", "named": ""}),
        "TableSpec": Target(
            TableSpec,
            _with(TableSpec, table=env.table),
            {
                "table": "object",
                "rule": "rule",
                "schedule": "schedule",
                "decay": "decay",
                "guard": "object",
                "pushed": "choice",
                "pulled": "choice",
            },
        ),
        "start": Target(
            ps.start,
            _with(ps.start, tables=ps.Tables(wrong=dense)),
            started | {"on": "choice"},
            {
                "tables": structure,
                "start": "start|table wrong",
                "host": "host|port",
                "shards": "shards|table",
            },
        ),
        "local": Target(
            ps.local,
            _with(ps.local, tables=ps.Tables(wrong=dense)),
            {"tables": "params", "options": ""},
            {"tables": structure},
        ),
        "connect": Target(
            ps.connect,
            _with(ps.connect, where=env.cluster),
            {"where": "cluster", "token": "text?", "tables": "params?", "patience_s": "seconds"},
            {"where": "connect|cluster", "tables": f"tables|{structure}"},
        ),
        "aio.connect": Target(
            ps.aio.connect,
            lambda **wrong: asyncio.run(
                _entered(ps.aio.connect(**{"where": env.cluster, **wrong}))
            ),
            {"where": "cluster", "token": "text?", "tables": "params?", "patience_s": "seconds"},
            {"where": "connect|cluster", "tables": f"tables|{structure}"},
        ),
        "reader": Target(
            ps.reader,
            _with(ps.reader, job=job),
            {"job": "cluster", "patience_s": "patience"},
            {"job": "cluster"},
        ),
        "aio.reader": Target(
            ps.aio.reader,
            _with(ps.aio.reader, job=job),
            {"job": "cluster", "patience_s": "patience"},
            {"job": "cluster"},
        ),
        "Job.worker": Target(
            job.worker,
            _with(job.worker, name="w"),
            {
                "name": "name",
                "incarnation": "0..",
                "prefetch": "0..",
                "patience_s": "patience",
                **_CONNECTION,
            },
            {"name": "worker", **_CONNECTION_NAMES},
        ),
        "Job.save": Target(job.save, _with(job.save), {"path": "path"}),
        "Job.reshard": Target(env.own.reshard, _with(env.own.reshard), {"shards": "1.."}),
    }


def _workers(env: Env) -> dict[str, Target]:
    me = env.worker
    gradient = {"w": np.zeros(TABLE_SIZE, np.float32)}

    def step(call: str, by: ps.Worker = me, **base: Any) -> Callable[..., Any]:
        def act(**wrong: Any) -> Any:
            with by.step(gather=None if by is me else {"user": [1]}) as step:
                return getattr(step, call)(**{**base, **wrong})

        return act

    def result(**wrong: Any) -> Any:
        with me.step() as step:
            step.pull()
        return step.ack.result(**wrong)

    table = {"table": "table name?"}
    return {
        "Worker.step": Target(
            env.rows.step,
            _with(env.rows.step),
            {"samples": "0..", "gather": "gathers?"},
            {"gather": "gather|table"},
        ),
        "Worker.prefetch": Target(
            env.rows.prefetch,
            _with(env.rows.prefetch, gather={"user": [1]}),
            {"gather": "gathers"},
            {"gather": "gather"},
        ),
        "WorkerStep.rows": Target(
            ps.WorkerStep.rows,
            step("rows", env.rows, table="user"),
            {"table": "table name", "timeout_s": "0 seconds"},
        ),
        "WorkerStep.scatter": Target(
            ps.WorkerStep.scatter,
            step("scatter", env.rows, table="user", gradient=np.zeros((1, 3), np.float32)),
            {"table": "table name", "gradient": "row gradient"},
            {"gradient": "rows of table user"},
        ),
        "Reader.gather": Target(
            env.row_reader.gather,
            _with(env.row_reader.gather, table="user", ids=[1]),
            {"table": "table name", "ids": "ids", "missing": "choice", "consistent": "flag"},
            {"ids": "gather"},
        ),
        "Worker.pull": Target(me.pull, _with(me.pull), {"timeout_s": "0 seconds"}),
        "Worker.save": Target(env.compressed.save, _with(env.compressed.save), {"path": "path"}),
        "Worker.restore": Target(
            env.compressed.restore, _with(env.compressed.restore), {"saved": "path"}
        ),
        "WorkerStep.pull": Target(
            ps.WorkerStep.pull, step("pull"), table | {"timeout_s": "0 seconds"}
        ),
        "WorkerStep.gradients": Target(ps.WorkerStep.gradients, step("gradients"), table),
        "WorkerStep.push": Target(
            ps.WorkerStep.push,
            step("push", table="wrong", gradient=gradient),
            table | {"gradient": "value"},
            {"gradient": "table wrong"},
        ),
        "AckFuture.result": Target(ps.AckFuture.result, result, {"timeout_s": "0 seconds"}),
        "Reader.pull": Target(
            env.reader.pull, _with(env.reader.pull), table | {"consistent": "flag"}
        ),
    }


def _connections(env: Env) -> dict[str, Target]:
    console = env.console
    state = console.export()[0]
    return {
        "Client": Target(
            Client,
            _with(Client, cluster=env.cluster, worker="w"),
            {
                "cluster": "cluster",
                "worker": "name",
                "incarnation": "0..",
                "patience_s": "patience",
                **_CONNECTION,
            },
            _CONNECTION_NAMES,
        ),
        "Console": Target(
            ps.AdminClient,
            _with(ps.AdminClient, cluster=env.cluster),
            {"cluster": "cluster", "patience_s": "patience", "check": "function"},
        ),
        "Console.install": Target(
            console.install,
            _with(console.install),
            {"arena": "array|weights"},
            {"arena": "install in table wrong"},
        ),
        "Console.restore": Target(
            console.restore,
            _with(console.restore, shard=0, state=state),
            {"shard": "whole", "state": "object", "keep_workers": "flag"},
        ),
        "Console.export": Target(console.export, _with(console.export), {"then_resume": "flag"}),
        "Console.set": Target(
            console.set,
            _with(console.set),
            {"staleness": "staleness", "rate_factor": "above 0?"},
        ),
        "Console.stand_still": Target(
            console.quiesce, _with(console.quiesce), {"seconds": "0 seconds"}
        ),
        "Console.retire": Target(
            console.hand_over,
            _with(console.hand_over, successors=env.cluster, cut={}),
            {"successors": "cluster", "cut": ""},
            {"successors": "cluster"},
        ),
        "move": Target(
            reshard,
            _with(reshard, old=console, new=console),
            {"old": "object", "new": "object"},
        ),
    }


def _training(env: Env) -> dict[str, Target]:
    frame = Frame()
    caffe = worker.Caffe(env.solver)
    trained = worker.Trained(caffe, np.zeros(3, np.float32), None)  # type: ignore[arg-type]
    given: dict[str, Any] = {"model": caffe, "workers": 1, "shards_in": "processes"}
    return {
        "Plan": Target(
            Plan,
            _with(Plan, steps=1, seed=1, strategy="bsp", schedule=0.1),
            {
                "steps": "0..",
                "seed": "whole",
                "strategy": "strategy",
                "schedule": "schedule",
                "iter_size": "1..",
                "clip": "0.. number",
                "prefetch": "flag",
                "decay": "decay",
                "workers": "1..",
                "rate_factor": "above 0",
            },
        ),
        "Job": Target(
            Job,
            _with(
                Job,
                model=_model,
                plan=_plan(),
                rule="sgd",
                schedule=0.1,
                decay=0.0,
                batch_size=1,
                workers=1,
            ),
            {
                "model": "function",
                "plan": "object",
                "rule": "rule",
                "schedule": "schedule",
                "decay": "decay",
                "batch_size": "1..",
                "workers": "1..",
                "bound": "bound",
                "rate_factor": "above 0?",
                "shuffle": "flag",
                "device": "object",
                "runtime": "object",
                "links": "object",
                "snapshots": "object",
                "snapshot_at_end": "flag",
                "logs_apart": "flag",
                "display": "0..",
                "average_loss": "1..?",
                "columns": "iterable",
                "function": "object?",
                "driver_model": "object?",
                "stale": "",
                "tables": "",
                "skip_images": "",
            },
        ),
        **{
            kind.__name__: Target(
                kind,
                _with(kind),
                {name: _OPTIONS[name] for name in list_options(kind)},
                _OPTION_NAMES,
            )
            for kind in (ShardRuntime, LinkOptions, SnapshotPolicy)
        },
        "worker.start": Target(
            worker.start,
            _with(worker.start, tables=ps.Dense.zeros({"w": 3}), on="threads"),
            {
                "tables": "params",
                "strategy": "strategy",
                "workers": "1..",
                "staleness": "",
                "start": "values?",
                "on": "choice",
                "shards": "1..",
                "resume": "path?",
                "name": "name",
                **dict.fromkeys(StartOptions.__annotations__, ""),  # passed on to ps.start
            },
            {"tables": "params|tensor|TensorSpec"},
        ),
        "worker.loop": Target(
            worker.loop,
            _with(worker.loop, job=env.job, name="w", gradient=_model, batches=[], steps=1),
            {
                "job": "object",
                "name": "name",
                "gradient": "function",
                "batches": "iterable",
                "steps": "0..",
                "strategy": "strategy",
                "workers": "1..",
                "incarnation": "0..",
                "seed": "whole",
                "prefetch": "flag",
                "patience_s": "patience",
                **dict.fromkeys(WorkerOptions.__annotations__, ""),  # passed on to Job.worker
            },
            {"name": "worker"},
        ),
        "worker.hashed": Target(
            worker.hashed,
            lambda columns=("a",), **wrong: worker.hashed(list(columns), **wrong),
            {"columns": "", "elements": "flag"},
        ),
        "run_job": Target(
            run_job,
            _with(run_job, df=frame, job=_job()),
            {
                "df": "object",
                "job": "object",
                "weights": "",
                "resume": "path?",
                "snapshots": "path?",
                "control": "object?",
                "logs": "path?",
                "evaluation": "",
                "even": "flag",
                "source": "object?",
                "observer": "",
            },
        ),
        "train": Target(
            worker.train,
            lambda df=frame, **wrong: worker.train(df, **{**given, **wrong}),
            {
                "df": "object",
                "model": "object",
                "workers": "1..?",
                "resume": "path?",
                "snapshots": "path?",
                "logs": "path?",
                "callbacks": "",
                "on_interrupt": "choice",
                "progress": "flag",
                **_OPTIONS,
            },
            _OPTION_NAMES,
        ),
        "Caffe": Target(
            worker.Caffe,
            lambda **wrong: worker.train(
                frame, **given | {"model": worker.Caffe(**{"solver": env.solver} | wrong)}
            ),
            {"solver": "path", "weights": "path?", "test_data": "data?"},
            {"test_data": "test_data|data nope"},
        ),
        "CustomModel": Target(
            worker.CustomModel,
            _with(worker.CustomModel, build=_model, batch_size=1),
            {
                "build": "function",
                "batch_size": "1..",
                "rate": "schedule",
                "rule": "rule",
                "decay": "decay",
            },
        ),
        "Trained.save": Target(
            trained.save, _with(trained.save), {"path": "path|ending"}, {"path": "path|safetensors"}
        ),
    }


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    """The names of parameters; options that are declared in a TypedDict, one by one."""
    for name, one in inspect.signature(function).parameters.items():
        if get_origin(one.annotation) is Unpack:
            yield from get_args(one.annotation)[0].__annotations__
        else:
            yield name


def unlisted(env: Env) -> list[str]:
    """Parameters of a target that TARGETS does not say anything of, and the other way round."""
    apart = []
    for name, target in targets(env).items():
        parameters = set(_parameters(target.of)) - {"self"}
        apart += [f"{name}: {one}" for one in sorted(parameters ^ set(target.kinds))]
    return apart
