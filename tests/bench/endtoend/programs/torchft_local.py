"""torchft's LocalSGD: a lighthouse, and a manager for each worker, over gloo.

Workers take steps of their own, and average their weights with all that are alive.
"""

import time
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.utils.data import DataLoader, DistributedSampler
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import LocalSGD

from tests.bench.endtoend.programs.task import Task, read_task
from tests.bench.endtoend.programs.torch_nets import Record, Worker, make_net, read_training_set

_SYNC_EVERY = 25
_TIMEOUT = timedelta(seconds=30)


def serve(task: Task) -> None:
    """Be the lighthouse, which lists the living members, until this process is ended."""
    port = task.hosts[0].rpartition(":")[2]
    _lighthouse = LighthouseServer(bind=f"0.0.0.0:{port}", min_replicas=1, join_timeout_ms=10_000)
    time.sleep(1e9)


def train(task: Task) -> None:
    """Be a worker."""
    torch.set_num_threads(1)
    model = make_net(task)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=task.momentum)

    def save() -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    def restore(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    host = task.hosts[2 + task.member].rpartition(":")[0]
    store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=_TIMEOUT),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=restore,
        state_dict=save,
        replica_id=f"worker{task.member}",
        store_addr=host,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=f"http://{task.hosts[0]}",
        timeout=_TIMEOUT,
        quorum_timeout=_TIMEOUT,
    )
    rows = read_training_set(task)
    sampler = DistributedSampler(rows, task.workers, task.member, seed=task.seed)
    record, me = Record(task, task.workers * task.batch), Worker(task, task.member)
    with LocalSGD(manager, model, optimizer, sync_every=_SYNC_EVERY):
        for epoch in range(1000):
            sampler.set_epoch(epoch)
            for images, labels in DataLoader(rows, task.batch, sampler=sampler):
                optimizer.zero_grad()
                me.gradient(model, images, labels)
                optimizer.step()
                if task.member == 0:
                    record.take_step(model)


def main() -> None:
    task = read_task()
    if task.role == "server":
        serve(task)
    elif task.role == "worker":  # nobody leads
        train(task)


if __name__ == "__main__":
    main()
