"""One shard, and a client that repeats nothing because of a timeout."""

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from shards.schedules import Fixed
from shards.spec import ShardSpec

SIZE = 256
NEVER_S = 1000.0  # a client that repeats by the clock alone is still waiting when the test gives up


def shards_of_one() -> list[ShardSpec]:
    table = ps.DenseTable("net", (ps.TensorSpec("w", (SIZE,)),))
    return shard_specs(table, schedule=Fixed(base_rate=1.0), lease_s=NEVER_S)


def client_of(cluster: ps.Cluster) -> Client:
    """A client that never repeats anything because of a timeout."""
    return Client(cluster, worker="w", transport="tcp", retry_s=NEVER_S, patience_s=3 * NEVER_S)
