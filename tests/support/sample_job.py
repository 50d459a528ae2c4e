"""A small job on shards of one copy each, to run on every placement."""

import numpy as np

import ps
from ps.client import Client
from ps.job_spec import shard_specs
from shards.schedules import Fixed
from shards.spec import ShardSpec

TABLE = ps.DenseTable("net", (ps.TensorSpec("w", (600,)),))


def specs_of(shards: int = 2) -> list[ShardSpec]:
    return shard_specs(TABLE, shards=shards, bound=0, schedule=Fixed(base_rate=1.0))


def train(cluster: ps.Cluster, console: ps.AdminClient) -> None:
    """One worker pushes ones, and the weights hold their sum.

    The two shards listen on every address; each is published under its host's own, since 0.0.0.0
    leads nowhere.
    """
    assert not any("0.0.0.0" in endpoint for endpoint in cluster.endpoints)
    assert all(endpoint.startswith("curve://") for endpoint in cluster.endpoints)
    console.install(TABLE.empty())
    with Client(cluster, worker="w") as client:
        for step in range(20):
            assert client.pull().versions == (step, step)
            client.push(np.ones(TABLE.size, np.float32))
    assert set(console.read()[:600]) == {-20.0}
