"""Elephas: a Keras model on the partitions of an RDD; `--mode` is `synchronous` or `asynchronous`.

Elephas tests only where its fit ends, so each fit is an epoch, from the weights of the one before.
"""

import argparse

import numpy as np
from elephas.spark_model import SparkModel
from elephas.utils.rdd_utils import to_simple_rdd
from pyspark import SparkConf, SparkContext
from tensorflow import keras

from tests.bench.endtoend.programs.task import Task, read_arrays, read_task, write_line

_TESTED_AT_ONCE = 500


def make_lenet(task: Task) -> keras.Model:
    """LeNet with channels last, as TensorFlow's convolutions on CPUs need them."""
    keras.utils.set_random_seed(task.seed)
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(20, 5),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(50, 5),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(500, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.SGD(task.rate, momentum=task.momentum)
    model.compile(optimizer, "sparse_categorical_crossentropy", ["accuracy"])
    return model


def main() -> None:
    task = read_task()
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="asynchronous")
    mode = parser.parse_known_args()[0].mode
    context = SparkContext(conf=SparkConf().setMaster(f"local[{task.workers}]"))
    images, labels = read_arrays("train")
    tested, classes = read_arrays("t10k")
    rdd = to_simple_rdd(context, images[..., np.newaxis], labels).repartition(task.workers)
    model = SparkModel(make_lenet(task), mode=mode, frequency="epoch", num_workers=task.workers)
    write_line(task, None)
    for _ in range(100):
        model.fit(rdd, epochs=1, batch_size=task.batch, verbose=0, validation_split=0.0)
        scores = model.master_network.predict(tested[..., np.newaxis], _TESTED_AT_ONCE, verbose=0)
        accuracy = float((scores.argmax(1) == classes).mean())
        write_line(task, accuracy)
        if accuracy >= task.target:
            break


if __name__ == "__main__":
    main()
