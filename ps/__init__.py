"""The parameter servers, and the SDK to speak to them.

    import ps

    specs = ps.shard_specs(table, shards=2, bound=4)
    with ps.local_shards(specs) as cluster, ps.Client(cluster, worker="w0") as shards:
        replica = shards.pull()
        shards.push(gradient_at(replica.weights))

Rules, schedules and errors are here, too. Importing this loads neither Ray nor PySpark nor CuPy:
shards in Ray need `ps.hosts.ray_host`, which is imported separately.
"""

from ps.build import build_id
from ps.client import Client
from ps.cluster import Cluster
from ps.console import Console, ShardState
from ps.durability import Durability
from ps.hosts.hosting import ShardDevice
from ps.hosts.local import local_shards
from ps.hosts.process_host import process_shards
from ps.hosts.replicated_host import replicated_shards
from ps.job import describe, shard_specs, successors
from ps.protocol.compression import Compression
from ps.protocol.events import NotReady, Unreachable
from ps.resharding import move
from ps.sharing.arenas import Replica
from ps.wire.link_model import parse_link
from shards.errors import (
    BadInput,
    BadMessage,
    DownpourError,
    Fenced,
    Gap,
    GiveUp,
    Moved,
    Resynchronise,
    Retry,
    WrongBuild,
)
from shards.guard import Guard
from shards.rules import SGD, AdaDelta, Adagrad, Adam, Decay, DecayKind, Momentum, Nesterov, RMSProp
from shards.schedules import Exp, Fixed, Inv, MultiStep, Poly, Sigmoid, Step
from shards.spec import Merge
from shards.tables import DenseTable, TensorSpec

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "AdaDelta",
    "Adagrad",
    "Adam",
    "BadInput",
    "BadMessage",
    "Client",
    "Cluster",
    "Compression",
    "Console",
    "Decay",
    "DecayKind",
    "DenseTable",
    "DownpourError",
    "Durability",
    "Exp",
    "Fenced",
    "Fixed",
    "Gap",
    "GiveUp",
    "Guard",
    "Inv",
    "Merge",
    "Momentum",
    "Moved",
    "MultiStep",
    "Nesterov",
    "NotReady",
    "Poly",
    "RMSProp",
    "Replica",
    "Resynchronise",
    "Retry",
    "ShardDevice",
    "ShardState",
    "Sigmoid",
    "Step",
    "TensorSpec",
    "Unreachable",
    "WrongBuild",
    "__version__",
    "build_id",
    "describe",
    "local_shards",
    "move",
    "parse_link",
    "process_shards",
    "replicated_shards",
    "shard_specs",
    "successors",
]
