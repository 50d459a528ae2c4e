"""Spark's TorchDistributor: DistributedDataParallel in a barrier stage."""

from pyspark.ml.torch.distributor import TorchDistributor
from pyspark.sql import SparkSession

from tests.bench.endtoend.programs.ddp import train
from tests.bench.endtoend.programs.quick_spark import QUICK_SPARK, choose_master
from tests.bench.endtoend.programs.task import Task, read_task


def train_here(task: Task) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    train(task, None)
    dist.destroy_process_group()


def main() -> None:
    task = read_task()
    SparkSession.builder.master(choose_master(task)).config(map=QUICK_SPARK).getOrCreate()
    TorchDistributor(num_processes=task.workers, local_mode=False, use_gpu=False).run(
        train_here, task
    )


if __name__ == "__main__":
    main()
