"""Ray Train: DistributedDataParallel in Ray actors."""

from collections.abc import Callable
from pathlib import Path

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from tests.bench.endtoend.programs.ddp import train
from tests.bench.endtoend.programs.task import Task, read_task


def train_here(config: dict[str, Task]) -> None:
    train(config["task"], Path(f"{config['task'].record}.snapshot"))


def run_workers(train: Callable[[dict[str, Task]], None], task: Task) -> None:
    """Run `train({"task": task})` in each worker, all of them again when one has died."""
    here = {} if task.cluster else {"num_cpus": task.workers + 1}
    environment = {"working_dir": str(Path(__file__).parent)}
    ray.init(address=task.cluster or None, runtime_env=environment, **here)
    TorchTrainer(
        train,
        train_loop_config={"task": task},
        scaling_config=ScalingConfig(num_workers=task.workers),
        run_config=RunConfig(
            storage_path=f"{task.record}.ray", failure_config=FailureConfig(max_failures=100)
        ),
    ).fit()


if __name__ == "__main__":
    run_workers(train_here, read_task())
