"""The SDK: keep parameters on shards, and train them with any number of workers.

    import ps

    with ps.start(params, on="processes", shards=2, staleness=4) as job:
        with job.worker("w0") as me, me.step() as step:
            step.push(gradients(step.pull()))
        trained = job.read()

`ps.start` and `ps.local` start shards, `ps.connect` finds those of another process, `ps.reader`
serves reads, and `ps.aio` is the same for coroutines. Update rules, schedules, decay, the guard of
gradients, snapshots and errors are here, too. `ps.AdminClient` is for operators: it installs and
exports whole states. Importing this package loads neither Ray nor PySpark nor CuPy.
"""

from ps import aio, errors
from ps.admin_client import AdminClient, ShardState
from ps.build_id import build_id
from ps.cluster import Cluster
from ps.durability import Durability
from ps.job import Job, connect, reader
from ps.launch.launch_plan import ShardDevice
from ps.reader import Reader
from ps.session.admin_plans import UnconfirmedHandOver
from ps.session.compression import Compression
from ps.session.events import NotReady, Unreachable
from ps.shared_memory.client_buffers import PulledWeights
from ps.snapshots.catalog import Retention, SnapshotCatalog
from ps.snapshots.manifest import load_snapshot, save_snapshot
from ps.snapshots.residual_writer import saved_residual
from ps.start_job import On, local, start
from ps.tables import Dense, Sparse, Tables
from ps.transport.link_model import parse_link
from ps.worker import AckFuture, PushAck, Worker, WorkerStep
from shards.aggregation import Buffer, Each, Round
from shards.errors import (
    BadInput,
    BadMessage,
    Denied,
    DownpourError,
    Fenced,
    Full,
    Gap,
    GiveUp,
    Mismatch,
    Moved,
    NoServer,
    Resynchronise,
    Retry,
    WrongBuild,
)
from shards.first_values import Constant, Normal, Uniform, Zeros
from shards.gradient_guard import Guard
from shards.rules import (
    FTRL,
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
    HeLoCo,
    Momentum,
    MomentumLookAhead,
    Nesterov,
    RMSProp,
    RowAdagrad,
    UpdateRule,
)
from shards.schedules import Exp, Fixed, Inv, MultiStep, Poly, Sigmoid, Step
from shards.tables import DenseTable, TensorSpec

__version__ = "0.1.0"

__all__ = [
    "FTRL",
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
    "Cluster",
    "Compression",
    "Constant",
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
    "Full",
    "Gap",
    "GiveUp",
    "Guard",
    "HeLoCo",
    "Inv",
    "Job",
    "Mismatch",
    "Momentum",
    "MomentumLookAhead",
    "Moved",
    "MultiStep",
    "Nesterov",
    "NoServer",
    "Normal",
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
    "RowAdagrad",
    "ShardDevice",
    "ShardState",
    "Sigmoid",
    "SnapshotCatalog",
    "Sparse",
    "Step",
    "Tables",
    "TensorSpec",
    "UnconfirmedHandOver",
    "Uniform",
    "Unreachable",
    "UpdateRule",
    "Worker",
    "WorkerStep",
    "WrongBuild",
    "Zeros",
    "__version__",
    "aio",
    "build_id",
    "connect",
    "errors",
    "load_snapshot",
    "local",
    "parse_link",
    "reader",
    "save_snapshot",
    "saved_residual",
    "start",
]


def __dir__() -> list[str]:
    return sorted(__all__)
