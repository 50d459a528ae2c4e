"""Wrong arguments of the SDK: each parameter of each public function with each value it is not.

What a parameter may be is said once, in TARGETS; a test holds that against the signatures, so a new
parameter cannot be forgotten.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from math import inf, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pyspark.sql.types import BinaryType, LongType, StructField, StructType

import ps
import worker
from ps.launch.ray_launcher import ray_shards, replicated_ray_shards
from shards.tables import cut_evenly
from tests.support import tiny_job
from tests.wrong_inputs.rows import Row
from worker.device_selection import parse_device
from worker.job import Job
from worker.job_runner import run_job
from worker.option_fields import declared
from worker.options import LinkOptions, ShardRuntime, SnapshotPolicy
from worker.spark import DataFrame
from worker.strategies import BSP, Downpour
from worker.training_loop import Plan


class Frame(DataFrame):
    """A DataFrame as far as arguments are looked at: no Spark has to be started for it."""

    columns = ["image", "label"]  # noqa: RUF012  # as pyspark has it
    schema = StructType([StructField("image", BinaryType()), StructField("label", LongType())])

    def __new__(cls) -> "Frame":
        return object.__new__(cls)

    def __init__(self) -> None:
        pass

    def select(self, *_: Any) -> "Frame":
        return self

    def head(self, *_: Any) -> Any:
        return (bytes(64),)


class Other:
    """Something that nobody expects."""


_ANY: tuple[Any, ...] = (Other(), {}, Other)
_NUMBERS: tuple[Any, ...] = ("3", "", nan, inf, -inf, [], b"1", 1j, np.zeros(3))
_WHOLE: tuple[Any, ...] = (*_ANY, *_NUMBERS, None, 1.5, True, 10**30, -(10**30), np.float32(1))
_TIME: tuple[Any, ...] = (*_ANY, "1", nan, -inf, -1, 1e300, 10**400, [], b"1", True, None)
_REAL: tuple[Any, ...] = (*_ANY, *_NUMBERS, None, True, 1e300, 10**400)
_TEXT: tuple[Any, ...] = (*_ANY, None, 3, 1.5, [], b"w", True)
_TABLE_SIZE = 1024

VALUES: Mapping[str, tuple[Any, ...]] = {
    "whole": _WHOLE,
    "0..": (*_WHOLE, -1),
    "1..": (*_WHOLE, -1, 0),
    "bound": (*tuple(v for v in _WHOLE if v is not None and v is not inf), -1, 4.5, "many"),
    "staleness": (*_ANY, "", "many", nan, -inf, [], b"1", 1j, -1, 4.5, True, 10**30),
    "seconds": (*_TIME, 0, inf),
    "0 seconds": (*_TIME, inf),
    "every": (*_ANY, "", "5x", "-1s", "nan", nan, -1, 1.5, 10**30, [], b"1", True),
    "time": (*_ANY, "", "5", "5x", "-1s", 5, nan, [], b"1s", True),
    "patience": (*_TIME, 0),
    "number": _REAL,
    "0.. number": (*_REAL, -1),
    "0..1": (*_REAL, -1, 1, 2),
    "above 0": (*_REAL, -1, 0),
    "loss": (*_ANY, "3", [], None, True, 1j),
    "name": (*_TEXT, "", "a\nb", "\0", "w" * 200),
    "text": (*_TEXT, "", "nope", "a\nb"),
    "choice": (*_TEXT, "", "nope", "a\nb", "x" * 5000),
    "path": (*_TEXT, "", "a\0b"),
    "flag": (*_ANY, None, 0, 1, "yes", [], nan),
    "function": (*_ANY[:2], None, 3, "f", []),
    "object": (*_ANY, None, 3, 1.5, "nope", [], b"", True, nan),
    "rule": (*_ANY, None, 3, "nope", "", [], True, ps.Adam, ps.Fixed(base_rate=0.1)),
    "schedule": (*_ANY, None, "fast", nan, inf, -1, [], True, 1e300, ps.Fixed, ps.SGD()),
    "decay": (*_ANY, None, "L2", nan, inf, [], True, 1e300),
    "strategy": (*_ANY, None, 3, "nope", "", [], True, BSP),
    "speeds": (Other(), Other, None, 3, "w0", [], {"w0": 0}, {"w0": "fast"}, {"w0": nan}),
    "ticks": (*(v for v in _WHOLE if v is not None), -1, 0, 2),
    "shape": (
        *_ANY[:1],
        Other,
        None,
        0,
        -1,
        1.5,
        nan,
        inf,
        "a",
        b"a",
        (0,),
        (3, -1),
        (1.5,),
        10**30,
        (10**9, 10**9),
        True,
        (2, "a"),
        np.zeros(2),
    ),
    "data": (*_ANY, 3, 1.5, [], b"", True, nan, "", "nope", "a\0b"),
    "row shape": (*_ANY, 3, "a", (0,), (3, -1), (1.5,), ("a",), True, nan),
    "tensors": (*_ANY, None, 3, "w", ["w"], [("w", (3,))], ps.TensorSpec("w", (3,))),
    "array": (
        *_ANY,
        None,
        3.0,
        "w",
        b"w",
        [],
        [1.0],
        ["a"] * _TABLE_SIZE,
        [None] * 3,
        np.zeros(3, np.float32),
        np.zeros(_TABLE_SIZE),
        np.zeros((2, 512), np.float32),
        np.zeros(_TABLE_SIZE, np.int32),
        np.zeros(_TABLE_SIZE, np.complex64),
        [[1.0], [1.0, 2.0]],
        np.full(_TABLE_SIZE, "a"),
        np.float32(1),
    ),
    "views": (*_ANY, None, 3.0, "w", [], [0.0] * _TABLE_SIZE, np.zeros(3, np.float32)),
    "weights": (np.full(_TABLE_SIZE, nan, np.float32), np.full(_TABLE_SIZE, inf, np.float32)),
    "strided": (np.zeros(2 * _TABLE_SIZE, np.float32)[::2],),
    "cluster": (*_ANY, None, 3, "", "missing.json", Path(), [], b"{}", "a\0b", True),
    "specs": (*_ANY, None, 3, "specs", [], (), [None], ["a", "b"]),
    "endpoints": (*_ANY, None, 3, "tcp://127.0.0.1:1", [], [None], ["a", "b", "c"]),
    "compression": (
        *_ANY,
        3,
        "",
        "nope",
        "int9",
        "topk",
        "topk:0",
        "topk:nan",
        "topk:2",
        "topk:x",
        "threshold:-1",
        "threshold:inf",
        "int8,fast",
        [],
        b"int8",
        True,
    ),
    "pull": (*_ANY, None, 3, "", "nope", "1bit", "topk", "topk:0", "topk:nan", "topk:x", [], b""),
    "link": (
        *_ANY,
        3,
        "nope",
        "rtt",
        "rtt=",
        "rtt=1",
        "rtt=-1ms",
        "rate=0bit",
        "loss=100%",
        [],
        "outage=3s/2s",
        "window=1B",
        "shape=round",
        "seed=x",
    ),
    "port": (*_WHOLE, -1, 65536, 10**6),
    "stripes": (*_WHOLE[:-6], 0, -1, 17, 10**9),
    "read versions": (*_ANY, 3, "ab", [], [1.5, 0], [-1, 0], [0], [0, 0, 0], ["a", "b"], [None]),
    "device": (*_TEXT, "", "tpu", "gpu:", "gpu:-1", "gpu:x", "cpu:0", "a\nb"),
    "steps": (*_ANY, None, 3, "a", [1.5], ["a"], [3, 1]),
    "ending": ("w.h5", "w", "w.caffemodel.gz"),
}
"""By what a parameter is to be: values that it cannot be."""


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
    client: ps.Client
    compressed: ps.Client
    console: ps.AdminClient
    solver: Path


@contextmanager
def environment(folder: Path) -> Iterator[Env]:
    """Shards, clients and a console, all idle; every lazy thread and file is there on entry."""
    table = ps.DenseTable("wrong", [ps.TensorSpec("w", _TABLE_SIZE)])  # type: ignore[arg-type]
    specs = ps.shard_specs(table, shards=2)
    (folder / "job").mkdir()
    solver = tiny_job.write_job(folder / "job")
    with ExitStack() as stack:
        cluster = stack.enter_context(ps.local_shards(specs))
        client = stack.enter_context(ps.Client(cluster, worker="own"))
        compressed = stack.enter_context(ps.Client(cluster, worker="packed", compression="int8"))
        console = stack.enter_context(ps.AdminClient(cluster))
        for one in (client, compressed):
            one.pull()
            one.push(one.new_gradient())
            one.flush()
        console.read()
        yield Env(folder, table, specs, cluster, client, compressed, console, solver)


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
            result, ps.Client | ps.AdminClient
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
_DILOCO = {
    "h": "1..",
    "outer_lr": "above 0",
    "momentum": "0..1",
    "inner_lr": "above 0?",
    "weight_decay": "0..1",
}
_OPTION_NAMES = {
    "compress": "compress|topk|threshold",
    "compress_pull": "compress_pull|compressed pull",
}


def targets(env: Env) -> dict[str, Target]:
    """Each public function and class, by its name."""
    return {
        **_values(),
        **_jobs(env),
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
            {"name": "name", "shape": "shape", "lr_mult": number, "decay_mult": number},
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
        ps.DelayedNesterov: ({"momentum": "0..1", "n": count}, {}),
        ps.DelayCompensation: ({"strength": "0.. number", "versions": count}, {}),
        ps.AdaptiveDelayCompensation: (
            {"strength": "0.. number", "mean": "0..1", "versions": count, "delta": "above 0"},
            {},
        ),
        ps.Round: ({"backups": "0.."}, {}),
        ps.Buffer: ({"size": count}, {"size": 2}),
        Downpour: (
            {"scale": "above 0?", "n_push": count, "n_fetch": count, "warm_steps": "0.."},
            {},
        ),
        BSP: ({"b": "0.."}, {}),
        worker.ASP: ({"scale": "above 0?"}, {}),
        worker.SSP: ({"scale": "above 0?"}, {}),
        worker.StaleRate: ({}, {}),
        worker.Softsync: ({"n": count}, {}),
        worker.DynSGD: ({"window": count}, {}),
        worker.ADAG: ({"window": count}, {}),
        worker.DCASGD: (
            {"scale": "above 0?", "adaptive": "flag", "strength": "above 0?", "mean": "0..1"},
            {},
        ),
        worker.EASGD: ({"alpha": "above 0?", "tau": count}, {}),
        worker.EAMSGD: ({"alpha": "above 0?", "tau": count, "momentum": "0..1"}, {}),
        worker.SparkNet: ({"tau": count, "momentum": "0..1"}, {}),
        worker.LocalSGD: ({"h": count}, {}),
        worker.DiLoCo: (_DILOCO, {}),
        worker.AsyncDiLoCo: (_DILOCO | {"n": "1..?", "speeds": "speeds"}, {}),
        worker.FedBuff: ({"k": count, "outer_lr": "above 0", "window": count}, {}),
    }
    made = {
        kind.__name__: Target(kind, _with(kind, **base), kinds)  # type: ignore[arg-type]
        for kind, (kinds, base) in fields.items()
    }
    table = ps.DenseTable("wrong", [ps.TensorSpec("w", _TABLE_SIZE)])  # type: ignore[arg-type]
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
            cut_evenly, _with(cut_evenly, table=table), {"table": "", "shards": "1..", "epoch": ""}
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


def _jobs(env: Env) -> dict[str, Target]:
    return {
        "shard_specs": Target(
            ps.shard_specs,
            _with(ps.shard_specs, table=env.table),
            {
                "table": "object",
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
            ps.expect_compression,
            _with(ps.expect_compression, specs=env.specs, compression="int8"),
            {"specs": "specs", "compression": "compression"},
            {"compression": "compression|topk|threshold"},
        ),
        "successors": Target(
            ps.resharded_specs,
            _with(ps.resharded_specs, specs=env.specs, shards=1),
            {"specs": "specs", "shards": "1.."},
        ),
        "describe": Target(
            ps.make_cluster,
            _with(ps.make_cluster, specs=env.specs, endpoints=["a", "b"]),
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
    shared = {
        "specs": "specs",
        "host": "name",
        "port": "port",
        "transport": "choice",
        "device": "choice",
        "secure": "flag?",
        "durability": "choice",
        "logs": "path?",
        "rollback_s": "0 seconds",
    }
    copies = {"specs": "specs", "host": "name", "silence_s": "seconds", "secure": "flag?"}
    return {
        "local_shards": Target(
            ps.local_shards,
            _with(ps.local_shards, specs=env.specs),
            {
                "specs": "specs",
                "weights": "array|weights?",
                "transport": "choice",
                "device": "choice",
                "secure": "flag?",
            },
            {"weights": "weights"},
        ),
        "process_shards": Target(
            ps.process_shards, _with(ps.process_shards, specs=env.specs), shared
        ),
        "ray_shards": Target(
            ray_shards, _with(ray_shards, specs=env.specs), shared | {"logs_apart": "flag"}
        ),
        "replicated_shards": Target(
            ps.replicated_shards, _with(ps.replicated_shards, specs=env.specs), copies
        ),
        "replicated_ray_shards": Target(
            replicated_ray_shards, _with(replicated_ray_shards, specs=env.specs), copies
        ),
    }


def _connections(env: Env) -> dict[str, Target]:
    client, console = env.client, env.console
    state = console.export()[0]
    gradient = np.zeros(_TABLE_SIZE, np.float32)
    return {
        "Client": Target(
            ps.Client,
            _with(ps.Client, cluster=env.cluster, worker="w"),
            {
                "cluster": "cluster",
                "worker": "name",
                "incarnation": "0..",
                "retry_s": "seconds",
                "patience_s": "patience",
                "in_flight": "1..?",
                "compression": "compression",
                "keep": "path?",
                "link": "link",
                "allocate": "function",
                "transport": "choice",
                "stripes": "stripes?",
            },
            {"compression": "compression|topk|threshold"},
        ),
        "Client.pull": Target(client.pull, _with(client.pull), {"clock": "0..?", "copy": "flag"}),
        "Client.prefetch": Target(client.prefetch, _with(client.prefetch), {"clock": "0.."}),
        "Client.push": Target(
            client.push,
            _with(client.push, gradient=gradient),
            {
                "gradient": "array|strided",
                "read_versions": "read versions",
                "steps": "1..",
                "samples": "0..",
                "loss": "loss",
                "ticks": "ticks",
                "prefetch": "0..?",
            },
            {"gradient": "push to table wrong", "read_versions": "read.versions"},
        ),
        "Client.new_gradient": Target(
            client.new_gradient, _with(client.new_gradient), {"zeroed": ""}
        ),
        "Client.save": Target(env.compressed.save, _with(env.compressed.save), {"path": "path"}),
        "Client.restore": Target(
            env.compressed.restore, _with(env.compressed.restore), {"path": "path"}
        ),
        "Client.restore_residual": Target(
            env.compressed.restore_residual,
            _with(env.compressed.restore_residual, state=None, arrays={}),
            {"state": "object", "arrays": ""},
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
            {"shard": "whole", "state": "object", "goes_on": "flag"},
        ),
        "Console.export": Target(console.export, _with(console.export), {"going_on": "flag"}),
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
            ps.reshard,
            _with(ps.reshard, old=console, new=console),
            {"old": "object", "new": "object"},
        ),
    }


def _training(env: Env) -> dict[str, Target]:
    frame = Frame()
    trained = worker.Trained(None, np.zeros(3, np.float32), None)  # type: ignore[arg-type]
    given: dict[str, Any] = {"solver": env.solver, "workers": 1, "shards_in": "processes"}
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
                "decay": "decay",
                "prefetch": "flag",
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
                "shuffle": "flag",
                "device": "object",
                "runtime": "object",
                "links": "object",
                "snapshots": "object",
                "snapshot_at_end": "flag",
                "logs_apart": "flag",
                "display": "0..",
                "average_loss": "1..?",
                "shape": "row shape",
            },
        ),
        **{
            kind.__name__: Target(
                kind,
                _with(kind),
                {name: _OPTIONS[name] for name in declared(kind)},
                _OPTION_NAMES,
            )
            for kind in (ShardRuntime, LinkOptions, SnapshotPolicy)
        },
        "run_job": Target(
            run_job,
            _with(run_job, df=frame, job=_job()),
            {
                "df": "object",
                "job": "object",
                "weights": "",
                "resume": "path?",
                "snapshots": "path?",
                "snapshot_requested": "object?",
                "next_reshard": "function",
                "logs": "path?",
                "evaluation": "",
                "even": "flag",
                "observer": "",
            },
        ),
        "train": Target(
            worker.train,
            lambda df=frame, **wrong: worker.train(df, **{**given, **wrong}),
            {
                "df": "object",
                "solver": "path",
                "workers": "1..?",
                "test_data": "data?",
                "weights": "path?",
                "resume": "path?",
                "snapshots": "path?",
                "logs": "path?",
                "observer": "",
                **_OPTIONS,
            },
            {**_OPTION_NAMES, "test_data": "test_data|data nope"},
        ),
        "Trained.save": Target(
            trained.save, _with(trained.save), {"path": "path|ending"}, {"path": "path|safetensors"}
        ),
    }


def unlisted(env: Env) -> list[str]:
    """Parameters of a target that TARGETS does not say anything of, and the other way round."""
    apart = []
    for name, target in targets(env).items():
        parameters = set(inspect.signature(target.of).parameters) - {"self"}
        apart += [f"{name}: {one}" for one in sorted(parameters ^ set(target.kinds))]
    return apart
