"""ps-lite, by its best-known user: MXNet's key-value store, `dist_async`, SGD at the servers.

MXNet cuts an array of more than a million floats evenly over the servers, by itself. Its wheel
wants an older NumPy than this project, so it lives in an environment of its own
(`make bench B=peers`).
"""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection

from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, Update, setting


def serve(wanted: Setting, shard: int, door: Connection) -> None:
    door.send(f"server{shard}")
    os.environ["DMLC_ROLE"] = "server"
    import mxnet  # noqa: F401  # with that role, importing it is serving

    door.recv()


def connect(
    wanted: Setting, number: int, addresses: list[str]
) -> tuple[Update, Callable[[], None]]:
    os.environ["DMLC_ROLE"] = "worker"
    import mxnet

    store = mxnet.kv.create("dist_async")
    store.set_optimizer(mxnet.optimizer.SGD(learning_rate=contract.RATE, wd=0.0))
    weights = mxnet.nd.zeros(wanted.floats)
    store.init(0, weights)
    gradient = mxnet.nd.array(contract.gradient(wanted.floats))
    gradient.wait_to_read()

    def update() -> None:
        # On a CPU the store pulls into what was pushed, too, so these gradients come to be the
        # weights: other numbers, the same work.
        store.push(0, gradient)
        store.pull(0, out=weights)
        weights.wait_to_read()

    return update, lambda: None


if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(port),
        "DMLC_NUM_SERVER": str(setting().shards),
        "DMLC_NUM_WORKER": str(setting().workers),
        "DMLC_NODE_HOST": "127.0.0.1",
    }
    scheduler = {**os.environ, "DMLC_ROLE": "scheduler"}
    with subprocess.Popen([sys.executable, "-c", "import mxnet"], env=scheduler) as process:
        contract.run_fleet(serve, connect)
        process.kill()
