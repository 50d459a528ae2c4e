"""Trains a small network on MNIST with a loop in JAX, in Spark tasks."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

import worker
import worker.jax

MNIST = Path(__file__).parents[1] / "demo" / "mnist"


def rows(part: str, count: int) -> list[tuple[bytes, int]]:
    """The first images of `train` or `t10k`, 784 bytes each, and their labels."""
    images = gzip.decompress((MNIST / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((MNIST / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
    return [(images[784 * row : 784 * (row + 1)], labels[row]) for row in range(count)]


def inputs(images: Iterable[bytes]) -> NDArray[np.float32]:
    pixels = np.frombuffer(b"".join(images), np.uint8)
    return pixels.reshape(-1, 784).astype(np.float32) / np.float32(255)


def net() -> list[dict[str, jax.Array]]:
    first, second = jax.random.split(jax.random.key(1))
    return [
        {"w": jax.random.normal(first, (784, 64)) * 0.05, "b": jnp.zeros(64)},
        {"w": jax.random.normal(second, (64, 10)) * 0.1, "b": jnp.zeros(10)},
    ]


def scores(params: Any, x: Any) -> jax.Array:
    hidden = jax.nn.relu(x @ params[0]["w"] + params[0]["b"])
    return hidden @ params[1]["w"] + params[1]["b"]


def loss(params: Any, x: Any, label: Any) -> jax.Array:
    chances = jax.nn.log_softmax(scores(params, x))
    return -jnp.take_along_axis(chances, label[:, None], 1).mean()


def train(args: dict[str, int], ctx: worker.Context) -> None:
    opt = worker.jax.wrap(net(), None, ctx)
    gradient = jax.jit(jax.value_and_grad(loss))
    for batch in ctx.batches(args["size"], epochs=args["epochs"]):
        value, grads = gradient(opt.params, inputs(batch["image"]), batch["label"])
        opt.step(grads, loss=value)


def accuracy(params: Any, test: list[tuple[bytes, int]]) -> float:
    images, labels = zip(*test, strict=True)
    classes = np.asarray(scores(params, inputs(images))).argmax(1)
    return float((classes == np.array(labels)).mean())


def fit(spark: Any, strategy: str = "downpour", count: int = 12_000) -> worker.RunResult:
    df = spark.createDataFrame(rows("train", count), "image binary, label long").repartition(2)
    return worker.run(
        df,
        train,
        {"size": 32, "epochs": 3},
        params=worker.jax.params(net(), rate=0.5),
        strategy=strategy,
        shards_in="processes",
    )
