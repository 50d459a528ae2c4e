"""The coordinator: `python -m ps.hosts.coordinator_process`, which replicated_host.py starts."""

import sys
from pathlib import Path

from ps.hosts.child_process import live
from ps.hosts.pipe import CoordinatorOrder
from ps.replicas.coordinator_server import CoordinatorServer
from ps.wire.reach import told_as


def make(order: CoordinatorOrder, address: str) -> tuple[CoordinatorServer, str]:
    """The coordinator's server, and where it is bound."""
    server = CoordinatorServer(
        order.job,
        order.shards,
        Path(order.record),
        bind=order.bind,
        silence_s=order.silence_s,
        admission=order.admission,
        plaintext=order.admission is None,
    )
    return server, told_as(server.endpoint, address)


if __name__ == "__main__":
    sys.exit(live(CoordinatorOrder, make))
