"""Spark's TorchDistributor: DistributedDataParallel in a barrier stage."""

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

from tests.bench.endtoend.programs.ddp import train
from tests.bench.endtoend.programs.quick_spark import QUICK_SPARK
from tests.bench.endtoend.programs.task import Task, read_task


def train_here(task: Task) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train(task, None)
    dist.destroy_process_group()


def main() -> None:
    task = read_task()
    master = task.cluster or f"local[{task.workers}]"
    SparkSession.builder.master(master).config(map=QUICK_SPARK).getOrCreate()
    TorchDistributor(num_processes=task.workers, local_mode=False, use_gpu=False).run(
        train_here, task
    )


if __name__ == "__main__":
    main()
