"""Ray's documented parameter-server pattern, sharded: actors hold arrays, workers get and update.

As in Ray's example "parameter server": the gradient travels as an argument through the object
store, the weights come back by `ray.get` as a read-only view of it.
"""

import logging
import time
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from tests.bench.peers import contract
from tests.bench.peers.contract import Setting, setting, take_updates


class ParameterServer:
    def __init__(self, floats: int) -> None:
        self._weights = np.zeros(floats, np.float32)

    def get_weights(self) -> NDArray[np.float32]:
        return self._weights

    def update(self, gradient: NDArray[np.float32]) -> None:
        self._weights -= np.float32(contract.RATE) * gradient


class Worker:
    def __init__(self, wanted: Setting, servers: list[Any]) -> None:
        self._wanted = wanted
        self._servers = servers
        whole = contract.gradient(wanted.floats)
        self._parts = [whole[part] for part in wanted.parts()]

    def update(self) -> None:
        ray.get([server.get_weights.remote() for server in self._servers])
        for server, part in zip(self._servers, self._parts, strict=True):
            server.update.remote(part)

    def warm(self) -> None:
        for _ in range(contract.WARM_UPDATES):
            self.update()

    def run(self, at: float) -> tuple[float, list[float]]:
        time.sleep(max(0.0, at - time.time()))
        return take_updates(self.update, self._wanted.seconds)


def main() -> None:
    wanted = setting()
    ray.init(
        num_cpus=wanted.workers + wanted.shards + 1,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
        object_store_memory=min(6 << 30, (1 << 28) + 16 * wanted.floats * (wanted.workers + 1)),
    )
    server, worker = ray.remote(ParameterServer), ray.remote(Worker)
    servers = [server.remote(part.stop - part.start) for part in wanted.parts()]
    workers = [worker.remote(wanted, servers) for _ in range(wanted.workers)]
    ray.get([one.warm.remote() for one in workers])
    contract.begin()
    spans = ray.get([one.run.remote(time.time() + 0.05) for one in workers])
    contract.end(contract.joined(spans))
    ray.shutdown()


if __name__ == "__main__":
    main()
