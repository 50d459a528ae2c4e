"""This project: shards in processes, the client as a worker uses it, no staleness bound."""

from collections.abc import Callable
from multiprocessing.connection import Connection

import msgspec

from ps import Cluster
from ps.admin_client import AdminClient
from ps.client import Client
from ps.job_spec import make_cluster, shard_specs
from ps.server.server import ShardServer
from ps.transport.transports import Transport
from shards.rules import SGD
from shards.schedules import Fixed
from shards.spec import ShardSpec
from shards.tables import DenseTable, TensorSpec
from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, Update


def specs_of(wanted: Setting) -> list[ShardSpec]:
    """The shards' specs; every process makes the same, but for the job's secret name."""
    return [
        msgspec.structs.replace(spec, job="bench")
        for spec in shard_specs(
            DenseTable("weights", (TensorSpec("all", (wanted.floats,)),)),
            shards=wanted.shards,
            workers=wanted.workers,
            rule=SGD(),
            schedule=Fixed(base_rate=contract.RATE),
            lease_s=60.0,
        )
    ]


def serve(wanted: Setting, shard: int, door: Connection) -> None:
    with ShardServer(specs_of(wanted)[shard], boot=1) as server:
        door.send(server.endpoint)
        door.recv()


def connect(
    wanted: Setting, number: int, addresses: list[str]
) -> tuple[Update, Callable[[], None]]:
    cluster = make_cluster(specs_of(wanted), addresses)
    if number == 0:
        _install(cluster)
    # Workers start together, and worker 0 installs the weights: the others ask until then.
    client = Client(
        cluster,
        worker=f"w{number}",
        patience_s=60.0,
        transport=Transport(wanted.option or Transport.AUTO),
    )
    gradient = client.new_gradient(zeroed=False)
    gradient[:] = contract.RATE

    client.pull()

    def update() -> None:
        client.push(gradient, prefetch=client.clock + 1)
        client.pull()

    return update, client.abort


def _install(cluster: Cluster) -> None:
    with AdminClient(cluster) as console:
        console.install(cluster.layout.empty())


if __name__ == "__main__":
    contract.run_fleet(serve, connect)
