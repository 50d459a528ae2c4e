"""Trains a small CNN on MNIST with a PyTorch loop in Spark tasks."""

import gzip
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn import BatchNorm2d, Conv2d, Flatten, Linear, MaxPool2d, ReLU, Sequential
from torch.nn.functional import cross_entropy

import worker
import worker.torch

MNIST = Path(__file__).parents[1] / "demo" / "mnist"


def rows(part: str, count: int) -> list[tuple[bytes, int]]:
    """The first images of `train` or `t10k`, 784 bytes each, and their labels."""
    images = gzip.decompress((MNIST / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((MNIST / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
    return [(images[784 * row : 784 * (row + 1)], labels[row]) for row in range(count)]


def net() -> Sequential:
    torch.manual_seed(1)
    first = (Conv2d(1, 8, 5, 2), BatchNorm2d(8), ReLU(), MaxPool2d(2))
    return Sequential(*first, Flatten(), Linear(288, 10))


def inputs(images: Iterable[bytes]) -> torch.Tensor:
    pixels = torch.frombuffer(bytearray(b"".join(images)), dtype=torch.uint8)
    return pixels.view(-1, 1, 28, 28) / 255


def train(args: dict[str, int], ctx: worker.Context) -> None:
    model = net()
    opt = worker.torch.wrap(model, None, ctx)
    for batch in ctx.batches(args["size"], epochs=args["epochs"]):
        scores = model(inputs(batch["image"]))
        loss = cross_entropy(scores, torch.from_numpy(batch["label"]))
        loss.backward()
        opt.step(loss=loss)
        opt.zero_grad()


def accuracy(model: torch.nn.Module, test: list[tuple[bytes, int]]) -> float:
    images, labels = zip(*test, strict=True)
    model.eval()
    with torch.no_grad():
        classes = model(inputs(images)).argmax(1)
    return float((classes == torch.tensor(labels)).float().mean())


def fit(spark: Any, strategy: str = "downpour", count: int = 12_000) -> worker.RunResult:
    df = spark.createDataFrame(rows("train", count), "image binary, label long").repartition(2)
    return worker.run(
        df,
        train,
        {"size": 32, "epochs": 3},
        params=worker.torch.params(net(), rate=0.1),
        strategy=strategy,
        shards_in="processes",
    )
