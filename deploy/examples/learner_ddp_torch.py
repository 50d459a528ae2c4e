"""A learner of several processes: DDP averages their gradients, and rank 0 exchanges fragments.

    torchrun --nproc-per-node 2 -m deploy.examples.learner_ddp_torch JOB NAME STEPS

JOB is a file of `job.save`, of a job that `worker.start` began with tables() and HOW.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

import ps
import worker
import worker.torch

HOW: dict[str, Any] = {"strategy": "decoupled_diloco:h=10,overlap=2,momentum=0.5", "workers": 2}
ROWS = 32  # of a rank, in a step


def net() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def tables() -> ps.Tables:
    return worker.torch.fragments(net(), 2)


def train(file: str, name: str, steps: int, incarnation: int = 0) -> None:
    model = net()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    learner: AbstractContextManager[Any] = nullcontext()
    if rank == 0:
        adamw = torch.optim.AdamW(model.parameters(), lr=0.01)
        job = ps.connect(file, tables=tables())
        learner = worker.torch.join(job, name, model, adamw, incarnation=incarnation, **HOW)
    with learner as opt:
        first = torch.tensor(opt.client.step if opt else 0)
        dist.broadcast(first, 0)
        parallel = DistributedDataParallel(model)  # with the weights of rank 0
        for step in range(int(first), steps):
            torch.manual_seed(step * ranks + rank)
            x = torch.randn(ROWS, 3)
            loss = mse_loss(parallel(x)[:, 0], x.sum(1))
            loss.backward()  # the mean gradient of all ranks
            if opt:
                opt.step(loss=loss, samples=ROWS * ranks)
            model.zero_grad()
            for tensor in model.state_dict().values():  # from the shards, by rank 0
                dist.broadcast(tensor, 0)


if __name__ == "__main__":
    # A rank that dies ends the others with an error, after this time at the latest.
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    train(sys.argv[1], sys.argv[2], int(sys.argv[3]), *map(int, sys.argv[4:]))
    dist.destroy_process_group()
