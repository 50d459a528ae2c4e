"""Runs one shard as a process: `python -m ps.launch.shard_process`."""

import sys
import tempfile
from pathlib import Path

from ps.launch.child_main import run_server
from ps.launch.child_protocol import ShardLaunch
from ps.launch.launcher import serve
from ps.server.server import ShardServer
from ps.transport.addresses import public_endpoint


def make(order: ShardLaunch, address: str) -> tuple[ShardServer, str]:
    """Make the shard's server, not started yet, and its endpoint on a host with `address`."""
    folder = Path(order.log_folder) if order.log_folder is not None else None
    saves = Path(tempfile.gettempdir()) / order.saves if order.saves is not None else None
    reach = order.bind, order.transport, order.device, order.admission
    server = serve(order.spec, *reach, order.durability, folder, saves, order.rollback_s)
    return server, public_endpoint(server.endpoint, address)


if __name__ == "__main__":
    sys.exit(run_server(ShardLaunch, make))
