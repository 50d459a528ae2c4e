"""The parameter servers, and the SDK to use them.

    import ps

    specs = ps.shard_specs(table, shards=2, bound=4)
    with ps.local_shards(specs) as cluster, ps.Client(cluster, worker="w0") as shards:
        replica = shards.pull()
        shards.push(gradient_at(replica.weights))

Update rules, schedules, snapshots and errors are exported here, too. Importing this package loads
neither Ray nor PySpark nor CuPy; `ray_shards` and `replicated_ray_shards` load Ray when they are
first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ps import aio, errors
from ps.admin_client import AdminClient, ShardState
from ps.client import Client
from ps.cluster import Cluster
from ps.compatibility import build_id
from ps.durability import Durability
from ps.job_spec import expect_compression, make_cluster, resharded_specs, shard_specs
from ps.jobs import Job, On, connect, local, reader, start
from ps.launch.launch_plan import ShardDevice
from ps.launch.processes import process_shards, replicated_shards
from ps.launch.threads import local_shards
from ps.reader import Reader
from ps.resharding import reshard
from ps.server.server import ShardServer
from ps.session.admin_plans import UnconfirmedHandOver
from ps.session.compression import Compression
from ps.session.events import NotReady, Unreachable
from ps.shared_memory.client_buffers import PulledWeights
from ps.snapshots.catalog import Retention, SnapshotCatalog
from ps.snapshots.manifest import load_snapshot, save_snapshot
from ps.snapshots.residual_writer import saved_residual
from ps.tables import Dense, Tables
from ps.transport.link_model import parse_link
from ps.wal.recovery import logged_spec
from ps.worker import AckFuture, PushAck, Worker, WorkerStep
from shards.aggregation import Buffer, Each, Round
from shards.errors import (
    BadInput,
    BadMessage,
    Denied,
    DownpourError,
    Fenced,
    Gap,
    GiveUp,
    Mismatch,
    Moved,
    Resynchronise,
    Retry,
    WrongBuild,
)
from shards.gradient_guard import Guard
from shards.rules import (
    SGD,
    AdaDelta,
    Adagrad,
    Adam,
    AdamW,
    AdaptiveDelayCompensation,
    Decay,
    DecayKind,
    DelayCompensation,
    DelayedNesterov,
    Momentum,
    Nesterov,
    RMSProp,
    UpdateRule,
)
from shards.schedules import Exp, Fixed, Inv, MultiStep, Poly, Sigmoid, Step
from shards.spec import TableSpec
from shards.tables import DenseTable, TensorSpec

if TYPE_CHECKING:
    from ps.launch.ray_launcher import ray_shards, replicated_ray_shards

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AckFuture",
    "AdaDelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdaptiveDelayCompensation",
    "AdminClient",
    "BadInput",
    "BadMessage",
    "Buffer",
    "Client",
    "Cluster",
    "Compression",
    "Decay",
    "DecayKind",
    "DelayCompensation",
    "DelayedNesterov",
    "Denied",
    "Dense",
    "DenseTable",
    "DownpourError",
    "Durability",
    "Each",
    "Exp",
    "Fenced",
    "Fixed",
    "Gap",
    "GiveUp",
    "Guard",
    "Inv",
    "Job",
    "Mismatch",
    "Momentum",
    "Moved",
    "MultiStep",
    "Nesterov",
    "NotReady",
    "On",
    "Poly",
    "PulledWeights",
    "PushAck",
    "RMSProp",
    "Reader",
    "Resynchronise",
    "Retention",
    "Retry",
    "Round",
    "ShardDevice",
    "ShardServer",
    "ShardState",
    "Sigmoid",
    "SnapshotCatalog",
    "Step",
    "TableSpec",
    "Tables",
    "TensorSpec",
    "UnconfirmedHandOver",
    "Unreachable",
    "UpdateRule",
    "Worker",
    "WorkerStep",
    "WrongBuild",
    "__version__",
    "aio",
    "build_id",
    "connect",
    "errors",
    "expect_compression",
    "load_snapshot",
    "local",
    "local_shards",
    "logged_spec",
    "make_cluster",
    "parse_link",
    "process_shards",
    "ray_shards",
    "reader",
    "replicated_ray_shards",
    "replicated_shards",
    "reshard",
    "resharded_specs",
    "save_snapshot",
    "saved_residual",
    "shard_specs",
    "start",
]

_LOADS_RAY = {"ray_shards", "replicated_ray_shards"}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _LOADS_RAY:
        return getattr(import_module("ps.launch.ray_launcher"), name)
    raise AttributeError(f"module ps has no attribute {name}")
