"""A copy of a shard in a process: `python -m ps.copy_process`, which replicated_host.py starts."""

import sys

from ps.child_process import live
from ps.pipe import CopyOrder
from ps.replica_server import ReplicaServer


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
