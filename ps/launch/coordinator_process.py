"""Runs the coordinator as a process: `python -m ps.launch.coordinator_process`."""

import sys
from pathlib import Path

from ps.launch.child_main import run_server
from ps.launch.child_protocol import CoordinatorLaunch
from ps.replication.coordinator_server import CoordinatorServer
from ps.transport.addresses import public_endpoint


def make(order: CoordinatorLaunch, address: str) -> tuple[CoordinatorServer, str]:
    """Make the coordinator's server, not started yet, and its public endpoint."""
    server = CoordinatorServer(
        order.job,
        order.shards,
        Path(order.record),
        bind=order.bind,
        silence_s=order.silence_s,
        admission=order.admission,
        plaintext=order.admission is None,
    )
    return server, public_endpoint(server.endpoint, address)


if __name__ == "__main__":
    sys.exit(run_server(CoordinatorLaunch, make))
