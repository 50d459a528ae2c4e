"""Runs a copy of a shard as a process: `python -m ps.launch.copy_process`."""

import sys

from ps.launch.child_main import run_server
from ps.launch.child_protocol import CopyLaunch
from ps.replication.replica_server import ReplicaServer


def make(order: CopyLaunch, address: str) -> tuple[ReplicaServer, str]:
    """Make the copy's server, not started yet, and its endpoint for clients."""
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
    sys.exit(run_server(CopyLaunch, make))
