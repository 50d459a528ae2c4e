"""A job small enough to be killed every few seconds: MNIST's digits by softmax regression.

Written against the SDK alone, as anybody's model might be. What a step computes follows from the
worker's name and the step, so a life that takes over computes the very step that came next.
"""

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ps import Client, Cluster, DenseTable, TensorSpec

Floats = NDArray[np.float32]

BATCH, PIXELS, DIGITS = 32, 784, 10
TABLE = DenseTable(
    "softmax", (TensorSpec("weight", (PIXELS, DIGITS)), TensorSpec("bias", (DIGITS,)))
)
IMAGES, LABELS = "images.npy", "labels.npy"
PATIENCE_S = 120.0


def loss_and_gradient(
    arena: Floats, images: Floats, labels: NDArray[np.uint8]
) -> tuple[float, float, Floats]:
    """Mean loss, accuracy and gradient at the weights in `arena`; images (n, 784), labels (n,)."""
    at = TABLE.views(arena)
    scores = images @ at["weight"] + at["bias"]
    accuracy = float((scores.argmax(1) == labels).mean())
    scores -= scores.max(1, keepdims=True)
    shares = np.exp(scores)
    shares /= shares.sum(1, keepdims=True)
    rows = np.arange(len(labels))
    loss = -float(np.log(np.maximum(shares[rows, labels], 1e-30)).mean())
    shares[rows, labels] -= 1.0
    gradient = TABLE.empty()
    own = TABLE.views(gradient)
    own["weight"][:] = images.T @ shares / len(labels)
    own["bias"][:] = shares.mean(0)
    return loss, accuracy, gradient


def work(
    name: str, incarnation: int, folder: Path, steps: int, rest_s: float, cluster: Cluster
) -> None:
    """One life of a worker: from the last step that was applied to the last of all."""
    images, labels = (np.load(folder / file, mmap_mode="r") for file in (IMAGES, LABELS))
    with Client(
        cluster, worker=name, incarnation=incarnation, retry_s=0.1, patience_s=PATIENCE_S
    ) as client:
        while client.step < steps:
            dice = np.random.default_rng([int(name[1:]), client.step])
            batch = np.sort(dice.integers(0, len(labels), BATCH))
            pixels = images[batch].astype(np.float32) / 255
            loss, _, gradient = loss_and_gradient(client.pull().weights, pixels, labels[batch])
            client.push(gradient, samples=BATCH, loss=loss)
            time.sleep(rest_s)
