"""Ray Train: DistributedDataParallel in Ray actors, from the last snapshot after a death."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from deploy.examples.gpt_torch import RATE, loss_of
from tests.bench.endtoend.programs.gpt import PERIOD, Learner, LossRecord, make_gpt
from tests.bench.endtoend.programs.ray_train import run_workers
from tests.bench.endtoend.programs.task import Task, read_task


def train(config: dict[str, Task]) -> None:
    """Be a worker; the first one saves, and tests the model, as often as others exchange."""
    task, rank = config["task"], dist.get_rank()
    model, record, snapshot = make_gpt(), LossRecord(task), Path(f"{task.record}.snapshot")
    optimizer, steps = AdamW(model.parameters(), lr=RATE), 0
    if snapshot.exists():
        state = torch.load(snapshot, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps = state["steps"]
    parallel = DistributedDataParallel(model)
    for batch in Learner(task, rank).draw_batches():
        loss_of(parallel, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if rank == 0 and steps % PERIOD == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "steps": steps}, unfinished := snapshot.with_suffix(".new"))
            unfinished.rename(snapshot)
            record.test(model, steps * task.workers)


if __name__ == "__main__":
    run_workers(train, read_task())
