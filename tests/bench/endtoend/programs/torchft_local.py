"""torchft's LocalSGD: a lighthouse, and a manager for each worker, over gloo.

Workers take steps of their own, and average their weights with all that are alive.
"""

from typing import Any

import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchft.local_sgd import LocalSGD

from tests.bench.endtoend.programs.task import Task, read_task
from tests.bench.endtoend.programs.torch_nets import Record, Worker, make_net, read_training_set
from tests.bench.endtoend.programs.torchft_group import make_manager, open_store, serve

_SYNC_EVERY = 25


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

    store = open_store(task)
    manager = make_manager(task, store, save, restore)
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
