"""A copy of a shard in a process: `python -m ps.hosts.copy_process`."""

import sys

from ps.hosts.child_process import live
from ps.hosts.pipe import CopyOrder
from ps.replicas.replica_server import ReplicaServer


def make(order: CopyOrder, address: str) -> tuple[ReplicaServer, str]:
    """The copy's server, and where clients would reach it."""
    server = ReplicaServer(
        order.spec,
        order.boot,
        order.coordinator,
        order.bind,
        order.admission,
        plaintext=order.admission is None,
        address=address,
    )
    return server, server.endpoint


if __name__ == "__main__":
    sys.exit(live(CopyOrder, make))
