"""This project: a PyTorch loop in Spark tasks, by `worker.run`."""

import argparse
import os
from typing import Any

from pyspark.sql import SparkSession

import deploy
import ps
import worker
import worker.torch
from tests.bench.endtoend.programs.mnist import Record, Worker, make_lenet, read_images
from tests.bench.endtoend.programs.task import Task, read_task

STRATEGY = "downpour:scale=1"


def train(task: Task, ctx: worker.Context) -> None:
    import torch

    torch.set_num_threads(1)
    model = make_lenet(task.seed)
    opt = worker.torch.wrap(model, None, ctx)
    me = Worker(task, ctx.rank)
    for batch in ctx.batches(task.batch, epochs=1000):
        pixels = torch.frombuffer(bytearray(b"".join(batch["image"])), dtype=torch.uint8)
        images, labels = pixels.view(-1, 1, 28, 28) / 255, torch.from_numpy(batch["label"])
        loss = me.gradient(model, images, labels)
        opt.step(loss=loss)
        opt.zero_grad()


def main() -> None:
    task = read_task()
    parser = argparse.ArgumentParser()
    parser.add_argument("--strategy", default=STRATEGY)
    strategy = parser.parse_known_args()[0].strategy
    os.environ |= deploy.spark_environment()
    spark = SparkSession.builder.master(f"local[{task.workers},4]").getOrCreate()
    images, labels = read_images("train")
    rows = zip((images * 255).byte().flatten(1).numpy(), labels.tolist(), strict=True)
    df = spark.createDataFrame(((bytes(i), y) for i, y in rows), "image binary, label long")
    model, record = make_lenet(task.seed), Record(task, task.workers * task.batch)

    def measure(params: Any) -> dict[str, float]:
        worker.torch.load(model, params)
        return {"reached": float(record.test(model))}

    worker.run(
        df.repartition(task.workers),
        train,
        task,
        params=worker.torch.params(model, rule=ps.Momentum(task.momentum), rate=task.rate),
        strategy=strategy,
        evaluate=worker.Evaluate(
            measure,
            every=task.between // (task.workers * task.batch),
            until=lambda figures: figures["reached"] > 0,
        ),
        shards_in="processes",
    )


if __name__ == "__main__":
    main()
