"""The bound for sockets: the same work over bare TCP, no messages, no checks, no guarantees.

A push is the gradient's bytes; the server receives into an array, applies the fused update into the
other of two buffers, and answers with the weights' bytes.
"""

import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np

from shards.rules import SGD, Decay
from shards.tables import RateRun
from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, Update


def fill(connection: socket.socket, view: memoryview) -> bool:
    """Receive into all of `view`; False at the end of the stream."""
    while len(view):
        got = connection.recv_into(view)
        if not got:
            return False
        view = view[got:]
    return True


def serve(wanted: Setting, shard: int, door: Connection) -> None:
    part = wanted.parts()[shard]
    size = part.stop - part.start
    weights = [np.zeros(size, np.float32)]
    rule, whole, lock = SGD(), (RateRun(0, size, 1.0, 1.0),), threading.Lock()
    rule.prepare()

    def attend(connection: socket.socket) -> None:
        gradient, spare = np.empty(size, np.float32), np.empty(size, np.float32)
        while fill(connection, gradient.data.cast("B")):
            with lock:
                rule.apply(
                    weights[0],
                    gradient,
                    (),
                    spare,
                    whole,
                    rate=contract.RATE,
                    decay=Decay(),
                    count=1,
                )
                weights[0], spare = spare, weights[0]
                connection.sendall(weights[0].data.cast("B"))

    listener = socket.create_server(("127.0.0.1", 0))
    door.send(f"127.0.0.1:{listener.getsockname()[1]}")
    for _ in range(wanted.workers):
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=attend, args=(connection,), daemon=True).start()
    door.recv()


def connect(
    wanted: Setting, number: int, addresses: list[str]
) -> tuple[Update, Callable[[], None]]:
    connections = []
    for address in addresses:
        host, port = address.split(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections.append(connection)
    gradient, weights = contract.gradient(wanted.floats), np.empty(wanted.floats, np.float32)
    pairs = list(zip(connections, wanted.parts(), strict=True))

    def update() -> None:
        for connection, part in pairs:
            connection.sendall(gradient[part].data.cast("B"))
        for connection, part in pairs:
            fill(connection, weights[part].data.cast("B"))

    return update, lambda: None


if __name__ == "__main__":
    contract.run_fleet(serve, connect)
