"""Elephas: a Keras model on the partitions of an RDD; `--mode` is `synchronous` or `asynchronous`.

An asynchronous fit is tested while it runs, by the weights of its parameter server; a synchronous
one where it ends, so each is one epoch, from the weights of the one before.
"""

import argparse
import time
from threading import Thread
from typing import Any

import numpy as np
from elephas.spark_model import AsynchronousSparkModel, SparkModel
from elephas.utils.rdd_utils import to_simple_rdd
from pyspark import SparkConf, SparkContext
from tensorflow import keras

from tests.bench.endtoend.programs.keras_nets import make_net, predict, read_samples
from tests.bench.endtoend.programs.quick_spark import QUICK_SPARK, choose_master
from tests.bench.endtoend.programs.task import (
    Task,
    measure,
    note_process,
    read_task,
    write_line,
)

_EPOCHS = 100
_PAUSE_S = 0.5


def note_worker(task: Task, rank: int, rows: Any) -> Any:
    """Pass the rows of a partition on, and note the process that works on it."""
    note_process(task, rank)
    if rank == 0:
        write_line(task, None)
    return rows


def test(task: Task, net: keras.Model, samples: Any) -> bool:
    """Test the net; returns whether the target is reached."""
    accuracy = measure(task, predict(net, samples))
    write_line(task, accuracy)
    return accuracy >= task.target


def watch(task: Task, client: Any, samples: Any) -> None:
    """Test the weights of the parameter server when they have changed, until the target."""
    net = make_net(task, samples.shape[1:])
    before: list[Any] = []
    while True:
        time.sleep(_PAUSE_S)
        try:
            weights = client.get_parameters()
        except OSError:  # the server is not up yet
            continue
        if before and all(map(np.array_equal, weights, before)):
            continue
        before = weights
        net.set_weights(weights)
        if test(task, net, samples):
            return


def main() -> None:
    task = read_task()
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="asynchronous")
    mode = parser.parse_known_args()[0].mode
    settings = SparkConf().setMaster(choose_master(task)).setAll(list(QUICK_SPARK.items()))
    context = SparkContext(conf=settings)
    rdd = to_simple_rdd(context, read_samples(task, "train"), task.read("train_y"))
    rdd = rdd.repartition(task.workers)
    rdd = rdd.mapPartitionsWithIndex(lambda rank, rows: note_worker(task, rank, rows))
    samples = read_samples(task, "test")
    net = make_net(task, samples.shape[1:])
    optimizer = keras.optimizers.SGD(task.rate, momentum=task.momentum)
    net.compile(optimizer, "sparse_categorical_crossentropy", ["accuracy"])
    fit = {"batch_size": task.batch, "verbose": 0, "validation_split": 0.0}
    if mode == "asynchronous":
        model = AsynchronousSparkModel(net, frequency="epoch")
        Thread(target=watch, args=(task, model.client, samples), daemon=True).start()
        model.fit(rdd, epochs=_EPOCHS, **fit)
        return
    for _ in range(_EPOCHS):
        model = SparkModel(net)
        model.fit(rdd, epochs=1, **fit)
        if test(task, model.master_network, samples):
            return


if __name__ == "__main__":
    main()
