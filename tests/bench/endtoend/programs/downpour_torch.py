"""This project: a PyTorch loop in Spark tasks, by `worker.run`."""

import argparse
import os
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from pyspark.sql import SparkSession

import deploy
import worker
import worker.torch
from tests.bench.endtoend.programs.quick_spark import QUICK_SPARK, choose_master
from tests.bench.endtoend.programs.task import Task, read_task
from tests.bench.endtoend.programs.torch_nets import Record, Worker, make_net


def train(task: Task, ctx: worker.Context) -> None:
    torch.set_num_threads(1)
    model = make_net(task)
    opt = worker.torch.wrap(model, None, ctx)
    tested = task.read("test_x")
    me = Worker(task, ctx.rank)
    for batch in ctx.batches(task.batch, epochs=1000):
        x = np.frombuffer(bytearray(b"".join(batch["x"])), tested.dtype).reshape(
            -1, *tested.shape[1:]
        )
        loss = me.gradient(model, torch.from_numpy(x), torch.from_numpy(batch["y"]))
        opt.step(loss=loss)
        opt.zero_grad()


def main() -> None:
    task = read_task()
    parser = argparse.ArgumentParser()
    parser.add_argument("--tau", type=int, default=4, help="steps between two exchanges")
    parser.add_argument("--staleness", default="usual")
    options, _ = parser.parse_known_args()
    os.environ |= deploy.spark_environment()
    settings = QUICK_SPARK | deploy.spark_settings("torch", "worker.torch")
    spark = SparkSession.builder.master(choose_master(task)).config(map=settings).getOrCreate()
    x = pa.array(map(bytes, task.read("train_x")), pa.binary())
    df = spark.createDataFrame(pa.table({"x": x, "y": task.read("train_y")}))
    model, record = make_net(task), Record(task, task.workers * task.batch)

    def measure(params: Any) -> dict[str, float]:
        worker.torch.load(model, params)
        return {"reached": float(record.test(model))}

    worker.run(
        df,
        train,
        task,
        workers=task.workers,
        seed=task.seed,
        params=worker.torch.params(model, rate=task.rate),
        strategy=f"eamsgd:tau={options.tau},momentum={task.momentum}",
        staleness=options.staleness,
        evaluate=worker.Evaluate(
            measure,
            every=task.between // (task.workers * task.batch),
            until=lambda figures: figures["reached"] > 0,
        ),
        shards_in="processes",
        bind="0.0.0.0" if task.cluster else "127.0.0.1",
        plaintext=bool(task.cluster),  # as everything is that other programs send
        # Places share their files, and a Unix socket would lead past the line.
        transport="tcp" if task.cluster else "auto",
    )


if __name__ == "__main__":
    main()
