"""One shard in a process of its own: `python -m ps.hosts.shard_process`."""

import sys
import tempfile
from pathlib import Path

from ps.hosts.child_process import live
from ps.hosts.hosting import serve
from ps.hosts.pipe import Order
from ps.serving.server import Server
from ps.wire.reach import told_as


def make(order: Order, address: str) -> tuple[Server, str]:
    """The shard's server, and where it is reached on a host with that address."""
    folder = Path(order.log_folder) if order.log_folder is not None else None
    saves = Path(tempfile.gettempdir()) / order.saves if order.saves is not None else None
    told = order.bind, order.transport, order.device, order.admission
    server = serve(order.spec, *told, order.durability, folder, saves, order.rollback_s)
    return server, told_as(server.endpoint, address)


if __name__ == "__main__":
    sys.exit(live(Order, make))
