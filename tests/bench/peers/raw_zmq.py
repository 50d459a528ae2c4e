"""The bound for ZeroMQ: the same bytes both ways in 1 MB frames, zero-copy, applied by nobody."""

from collections.abc import Callable
from multiprocessing.connection import Connection

import numpy as np
import zmq

from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, Update

PIECE = 1 << 20


def pieces(size: int) -> list[memoryview]:
    """An array of `size` floats, as frames."""
    view = np.ones(size, np.float32).data.cast("B")
    return [view[start : start + PIECE] for start in range(0, len(view), PIECE)]


def serve(wanted: Setting, shard: int, door: Connection) -> None:
    part = wanted.parts()[shard]
    answer = pieces(part.stop - part.start)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.LINGER, 0)
        door.send(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        poller = zmq.Poller()
        poller.register(router, zmq.POLLIN)
        poller.register(door.fileno(), zmq.POLLIN)
        while router in (ready := dict(poller.poll())) or not ready:
            sender, *_ = router.recv_multipart(copy=False)
            router.send_multipart([sender, *answer], copy=False)


def connect(
    wanted: Setting, number: int, addresses: list[str]
) -> tuple[Update, Callable[[], None]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = [context.socket(zmq.DEALER) for _ in addresses]
    for one, address in zip(sockets, addresses, strict=True):
        one.setsockopt(zmq.LINGER, 0)
        one.connect(address)
    sent = [pieces(part.stop - part.start) for part in wanted.parts()]

    def update() -> None:
        for one, frames in zip(sockets, sent, strict=True):
            one.send_multipart(frames, copy=False)
        for one in sockets:
            one.recv_multipart(copy=False)

    return update, lambda: None


if __name__ == "__main__":
    contract.run_fleet(serve, connect)
