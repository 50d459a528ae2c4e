"""Pickle over TCP, one thread a connection and one lock: as dist-keras and its kind do it."""

import pickle
import socket
import socketserver
import struct
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, Update


def send(connection: socket.socket, value: Any) -> None:
    data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)
    connection.sendall(struct.pack("!Q", len(data)) + data)


def receive(connection: socket.socket) -> Any:
    (length,) = struct.unpack("!Q", exactly(connection, 8))
    return pickle.loads(exactly(connection, length))  # noqa: S301  # that is the contender


def exactly(connection: socket.socket, length: int) -> bytes:
    """Gathers chunks, as the systems compared with do."""
    chunks = []
    while length:
        chunk = connection.recv(min(length, 1 << 20))
        if not chunk:
            raise EOFError
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)


def serve(wanted: Setting, shard: int, door: Connection) -> None:
    part = wanted.parts()[shard]
    weights, lock = np.zeros(part.stop - part.start, np.float32), threading.Lock()

    class Connected(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                while True:
                    action, gradient = receive(self.request)
                    with lock:
                        if action == "push":
                            np.subtract(weights, np.float32(contract.RATE) * gradient, out=weights)
                        else:
                            send(self.request, weights)
            except EOFError:
                pass

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Connected) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        door.send(f"127.0.0.1:{server.server_address[1]}")
        door.recv()
        server.shutdown()


def connect(
    wanted: Setting, number: int, addresses: list[str]
) -> tuple[Update, Callable[[], None]]:
    connections = []
    for address in addresses:
        host, port = address.split(":")
        connection = socket.create_connection((host, int(port)))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections.append(connection)
    gradient, parts = contract.gradient(wanted.floats), wanted.parts()

    def update() -> None:
        for connection in connections:
            send(connection, ("pull", None))
        for connection in connections:
            receive(connection)
        for connection, part in zip(connections, parts, strict=True):
            send(connection, ("push", gradient[part]))

    return update, lambda: None


if __name__ == "__main__":
    contract.run_fleet(serve, connect)
