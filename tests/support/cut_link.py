"""A client with packets that vanish under a push, `python -m tests.support.cut_link`; needs
root.

It prints whether a push was acknowledged over another connection than it began on, and fails if any
was not applied exactly once.
"""

import time

import numpy as np
import psutil

from ps.client import Client
from ps.launch.threads import local_shards
from tests.chaos.namespaces import Ports, move_into_own
from tests.support.eventually import eventually
from tests.support.one_shard import SIZE, client_of, shards_of_one

_CUT_S, _TRIES = 2.2, 5
_CONNECTIONS = 2  # a client's: its own, and the idle one of its lease


def connections(port: int) -> set[int]:
    """The local ports of this process's established connections to a port."""
    return {
        one.laddr.port
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_ESTABLISHED and one.raddr.port == port
    }


def another(client: Client, ports: Ports, port: int) -> bool:
    """Cut the link under a push; whether a new connection has replaced it when the push is applied.

    The system retransmits after about 0.2 s, 0.4 s more, 0.8 s, 1.6 s: it may be the quicker one.
    """
    eventually(lambda: len(connections(port)) == _CONNECTIONS, because="both connections stand")
    before = connections(port)
    with ports.cut([port]):
        client.push(np.ones(SIZE, np.float32))
        time.sleep(_CUT_S)
    client.flush()
    while len(after := connections(port)) != _CONNECTIONS:
        client.pull()  # a dial may be hung up at this moment
    return after != before


def main() -> None:
    move_into_own()
    ports = Ports()
    with local_shards(shards_of_one()) as cluster, client_of(cluster) as client:
        client.pull()
        port = int(cluster.endpoints[0].rpartition(":")[2])
        if any(another(client, ports, port) for _ in range(_TRIES)):
            print("another connection")
        assert client.pull().weights.tolist() == [-float(client.seq)] * SIZE


if __name__ == "__main__":
    main()
