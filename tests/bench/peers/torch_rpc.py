"""torch.distributed.rpc: a server applies a pushed gradient and returns the weights, one call.

With the option `tcp`, TensorPipe is held to sockets; otherwise it picks shared memory and
cross-memory attach on one host by itself.
"""

import os
import socket
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import torch
from torch.distributed import rpc

from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, Update

_LOCK = threading.Lock()
_WEIGHTS: list[torch.Tensor] = []


def push_pull(gradient: torch.Tensor) -> torch.Tensor:
    """Runs on a server."""
    with _LOCK:
        _WEIGHTS[0].sub_(gradient, alpha=contract.RATE)
    return _WEIGHTS[0]


def _join(wanted: Setting, name: str, rank: int) -> None:
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{os.environ['PEER_PORT']}",
        rpc_timeout=120,
        **({"_transports": ["uv"], "_channels": ["basic"]} if wanted.option == "tcp" else {}),
    )
    rpc.init_rpc(
        name,
        rank=rank,
        world_size=wanted.shards + wanted.workers,
        rpc_backend_options=options,
    )


def serve(wanted: Setting, shard: int, door: Connection) -> None:
    part = wanted.parts()[shard]
    _WEIGHTS.append(torch.zeros(part.stop - part.start))
    door.send(f"server{shard}")
    _join(wanted, f"server{shard}", shard)
    door.recv()
    os._exit(0)  # a graceful shutdown waits for all, and the benchmark has what it wants


def connect(
    wanted: Setting, number: int, addresses: list[str]
) -> tuple[Update, Callable[[], None]]:
    _join(wanted, f"worker{number}", wanted.shards + number)
    whole = torch.from_numpy(contract.gradient(wanted.floats))
    parts = [whole[part] for part in wanted.parts()]

    def update() -> None:
        asked = [
            rpc.rpc_async(to, push_pull, args=(part,))
            for to, part in zip(addresses, parts, strict=True)
        ]
        for one in asked:
            one.wait()

    return update, lambda: None


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ["PEER_PORT"] = str(free.getsockname()[1])
    contract.run_fleet(serve, connect)
