"""PyTorch's DistributedDataParallel over gloo, started and restarted by torchrun.

It continues from its last snapshot after a death, as PyTorch's tutorial on fault tolerance shows.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from tests.bench.endtoend.programs.task import Task, read_task
from tests.bench.endtoend.programs.torch_nets import Record, Worker, make_net, read_training_set


def train(task: Task, snapshot: Path | None) -> None:
    """Train in one process of a group that has been made."""
    rank, workers = dist.get_rank(), dist.get_world_size()
    model = make_net(task)
    if snapshot is not None and snapshot.exists():
        model.load_state_dict(torch.load(snapshot, weights_only=True))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=task.rate, momentum=task.momentum)
    rows = read_training_set(task)
    sampler = DistributedSampler(rows, seed=task.seed)
    record, me = Record(task, workers * task.batch), Worker(task, rank)
    done = torch.zeros(1)
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for step, (images, labels) in enumerate(DataLoader(rows, task.batch, sampler=sampler)):
            optimizer.zero_grad()
            me.gradient(parallel, images, labels)
            optimizer.step()
            if rank == 0:
                done += record.take_step(model)
            if step % 50 == 49:
                dist.broadcast(done, 0)
                if rank == 0 and snapshot is not None:
                    torch.save(model.state_dict(), snapshot)
                if done:
                    return


def main() -> None:
    task = read_task()
    dist.init_process_group("gloo")
    train(task, Path(f"{task.record}.snapshot"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
