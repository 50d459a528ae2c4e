"""The parameter servers, and the SDK to speak to them.

    import ps

    specs = ps.shard_specs(table, shards=2, bound=4)
    with ps.local_shards(specs) as cluster, ps.Client(cluster, worker="w0") as shards:
        replica = shards.pull()
        shards.push(gradient_at(replica.weights))

Importing this loads neither Ray nor PySpark nor CuPy: `ps.hosts.ray_host` is imported by who needs
it.
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
from shards.tables import DenseTable, TensorSpec

__all__ = [
    "Client",
    "Cluster",
    "Compression",
    "Console",
    "DenseTable",
    "Durability",
    "NotReady",
    "Replica",
    "ShardDevice",
    "ShardState",
    "TensorSpec",
    "Unreachable",
    "build_id",
    "describe",
    "local_shards",
    "move",
    "process_shards",
    "replicated_shards",
    "shard_specs",
    "successors",
]
