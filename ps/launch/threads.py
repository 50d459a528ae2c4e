"""Runs shards in threads of this process, for experiments, notebooks and tests.

The shard and the server loop are the same as on a cluster; Ray is not needed. Nothing supervises
these shards: they cannot die without this process, and a failure of one is raised on leaving.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from ps.admin_client import AdminClient
from ps.cluster import Cluster
from ps.job_spec import make_cluster
from ps.launch.launch_plan import LaunchPlan, ShardDevice, place_of
from ps.process_owner import OwnerStack
from ps.server.server import ShardServer
from ps.transport.transports import Transport, transport_named
from shards import argument_checks
from shards.spec import ShardSpec


@contextmanager
def local_shards(
    specs: Sequence[ShardSpec],
    weights: NDArray[np.float32] | None = None,
    *,
    transport: Transport | str = Transport.AUTO,
    device: ShardDevice | str = ShardDevice.CPU,
    secure: bool = False,
) -> Iterator[Cluster]:
    """Serve `specs` on loopback while the context lasts.

    `weights`, float32 of shape (layout.size,), are installed first (default: zeros). Workers are
    offered `transport` as well as TCP (transports.py). `device` holds the weights. `secure`
    makes TCP use CURVE, as it does beyond loopback.
    """
    plan = LaunchPlan(specs=specs, secure=secure)
    offered = transport_named(transport)
    if weights is not None:
        layout = specs[0].layout
        weights = argument_checks.array(
            f"weights of {', '.join(layout.names)}", weights, layout.size
        )
    backend = place_of(argument_checks.choice("device", device, ShardDevice))
    access, admission = plan.issue_keys()
    with OwnerStack() as stack:
        servers = [
            stack.enter_context(
                ShardServer(spec, boot=1, transport=offered, backend=backend, admission=admission)
            )
            for spec in specs
        ]
        cluster = make_cluster(specs, [server.endpoint for server in servers], access)
        with AdminClient(cluster) as admin:
            admin.install(cluster.layout.empty() if weights is None else weights)
        yield cluster
