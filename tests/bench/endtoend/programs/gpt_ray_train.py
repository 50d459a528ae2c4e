"""Ray Train: DistributedDataParallel in Ray actors, from the last checkpoint after a death.

A death is handled as Ray Train's documentation shows: all workers report, the first one with a
checkpoint, and a group that starts again continues from the last one.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import ray.train
import torch
from ray.train.torch import prepare_model
from torch.optim import AdamW

from deploy.examples.gpt_torch import RATE, loss_of
from tests.bench.endtoend.programs.gpt import Learner, LossRecord, make_gpt
from tests.bench.endtoend.programs.ray_train import run_workers
from tests.bench.endtoend.programs.task import Task, read_task

SAVE_EVERY = 4
"""Steps between checkpoints: by Young's formula for half a second each and a death a minute."""


def train(config: dict[str, Task]) -> None:
    """Be a worker; the first one tests the model whenever it has saved it."""
    task, rank = config["task"], ray.train.get_context().get_world_rank()
    model, record = make_gpt(), LossRecord(task)
    optimizer, steps = AdamW(model.parameters(), lr=RATE), 0
    if (checkpoint := ray.train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as folder:
            state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        steps = state["steps"]
    parallel = prepare_model(model)
    for batch in Learner(task, rank).draw_batches():
        loss_of(parallel, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
        if steps % SAVE_EVERY:
            continue
        if rank:
            ray.train.report({})
            continue
        with TemporaryDirectory() as folder:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "steps": steps}, Path(folder, "state.pt"))
            ray.train.report({}, checkpoint=ray.train.Checkpoint.from_directory(folder))
        record.test(model, steps * task.workers)


if __name__ == "__main__":
    run_workers(train, read_task())
