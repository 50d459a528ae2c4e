"""Caffe's networks on real digits: the siamese net, the autoencoder, LRCN, and fine-tuning.

Each trains in one process with its own solver until the goal is reached or its iterations are over.
The data is the demo's MNIST.

    python -m tests.bench.learning [siamese autoencoder lrcn fine_tuning]

siamese      pairs of digits: equal ones come together, others are a margin of 1 apart
autoencoder  784-1000-500-250-30 and back: the cross-entropy of the pixels
lrcn         deploy/examples/lrcn: an LSTM that spells the name of a digit from its image
fine_tuning  LeNet learns 0 to 4; then with a new last layer, found by name, 5 to 9
"""

import argparse
import gzip
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from cupy_kernels.types import AnyArray
from tests.bench.report import Goal, goals
from tests.support import caffe_nets
from tests.support.serial_solver import SerialSolver
from worker.caffe.model import CaffeModel
from worker.caffe.python_nets import Net, load_net, load_solver
from worker.caffe.solver import Solver
from worker.caffe.weights import Copied, into_arena
from worker.training.model import Batch

DEPLOY = Path(__file__).parents[2] / "deploy"
MNIST = DEPLOY / "demo" / "mnist"
LENET = DEPLOY / "demo" / "lenet_solver.prototxt"
LRCN = DEPLOY / "examples" / "lrcn_solver.prototxt"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
LETTERS = "_" + "".join(sorted(set("".join(NAMES))))  # _ begins and ends a word
TIME = max(map(len, NAMES)) + 1
WINDOW = 20  # iterations over which a loss is averaged

Bytes = NDArray[np.uint8]


class Digits(NamedTuple):
    """Images (n, 1, 28, 28) as bytes, and labels (n,)."""

    images: Bytes
    labels: NDArray[np.int64]

    def among(self, low: int, high: int) -> "Digits":
        """Those of the digits from `low` to below `high`, with labels from 0."""
        kept = (self.labels >= low) & (self.labels < high)
        return Digits(self.images[kept], self.labels[kept] - low)

    def batches(self, size: int) -> Iterator["Digits"]:
        """Batches in order, again and again."""
        start = 0
        while True:
            rows = np.arange(start, start + size) % len(self.labels)
            yield Digits(self.images[rows], self.labels[rows])
            start += size


def digits(part: str) -> Digits:
    """The demo's MNIST; `part` is train or t10k."""

    def read(name: str, header: int) -> Bytes:
        content = gzip.decompress((MNIST / f"{part}-{name}-ubyte.gz").read_bytes())
        return np.frombuffer(content, np.uint8, offset=header)

    images = read("images-idx3", 16).reshape(-1, 1, 28, 28)
    return Digits(images, read("labels-idx1", 8).astype(np.int64))


class Learned(NamedTuple):
    """The mean losses of the first and the last `WINDOW` iterations, and their number."""

    first: float
    last: float
    iterations: int


def train(solver: SerialSolver, batches: Iterator[Batch], iterations: int) -> Learned:
    losses = [solver.step(next(batches)) for _ in range(iterations)]
    return Learned(float(np.mean(losses[:WINDOW])), float(np.mean(losses[-WINDOW:])), iterations)


def adam(net: Net, rate: float) -> Solver:
    """The demo's solver with another net, and Adam."""
    from msgspec.structs import replace

    from shards.rules import Adam, Decay
    from shards.schedules import Fixed

    solver = load_solver(LENET, net)
    return replace(solver, rule=Adam(), schedule=Fixed(base_rate=rate), decay=Decay())


def siamese(iterations: int) -> Learned:
    """Pairs of digits next to each other in the data, half of them of one class."""

    def pairs() -> Iterator[Batch]:
        rng = np.random.default_rng(1)
        data = digits("train")
        by_class = [np.flatnonzero(data.labels == digit) for digit in range(10)]
        while True:
            left = rng.integers(0, len(data.labels), 64)
            same = np.array([rng.choice(by_class[data.labels[row]]) for row in left])
            right = np.where(np.arange(64) < 32, same, rng.integers(0, len(data.labels), 64))
            pixels = np.concatenate([data.images[left], data.images[right]], axis=1)
            yield {
                "pair": pixels.astype(np.float32) / 256,
                "sim": (data.labels[left] == data.labels[right]).astype(np.int64),
            }

    return train(SerialSolver(adam(caffe_nets.siamese(64), 1e-3)), pairs(), iterations)


def autoencoder(iterations: int) -> Learned:
    """The cross-entropy of a whole image, in nats."""

    def images() -> Iterator[Batch]:
        for batch in digits("train").batches(64):
            yield {"data": batch.images.astype(np.float32) / 256}

    return train(SerialSolver(adam(caffe_nets.autoencoder(64), 1e-3)), images(), iterations)


def spelled(labels: NDArray[np.int64]) -> dict[str, AnyArray]:
    """What the LSTM reads and should write, (TIME, batch): letters one step apart, then nothing."""
    words, target = np.zeros((2, TIME, len(labels)), np.int64)
    target[:] = -1
    for row, label in enumerate(labels):
        places = [LETTERS.index(letter) for letter in NAMES[label]]
        words[1 : len(places) + 1, row] = places[: TIME - 1]
        target[: len(places) + 1, row] = [*places, 0]
    cont = np.ones((TIME, len(labels)), np.float32)
    cont[0] = 0
    return {"words": words, "cont": cont, "target": target}


def captions(data: Digits, size: int) -> Iterator[Batch]:
    """Batches for LRCN: images, and their names in letters."""
    for batch in data.batches(size):
        yield {"data": batch.images.astype(np.float32) / 256} | spelled(batch.labels)


def lrcn(iterations: int) -> tuple[Learned, float]:
    """The losses, and the share of letters that are right in the test images."""
    solver = SerialSolver(load_solver(LRCN))
    size = solver.model.net.blobs["data"][0]
    learned = train(solver, captions(digits("train"), size), iterations)
    test = CaffeModel(solver.solver.tests[0].net)
    batches = captions(digits("t10k"), test.net.blobs["data"][0])
    shares = [test.outputs(solver.weights, next(batches))["accuracy"] for _ in range(10)]
    return learned, float(np.mean(shares))


def lenet_for_five(last: str) -> Solver:
    """The demo's solver and LeNet with five classes; `last` is the name of the last layer."""
    net = load_net(LENET.with_name("lenet_train_test.prototxt"))
    layers = net.layers
    for layer in layers:
        if layer.name == "ip2":
            layer.name, layer.inner_product_param.num_output = last, 5
    return load_solver(LENET, Net(net.name, layers)).with_data_shape((1, 28, 28))


class FineTuned(NamedTuple):
    """What was copied, and the accuracy on 5 to 9 with the copied weights and without."""

    copied: Copied
    accuracy: float
    scratch: float


def fine_tuning(first: int, second: int) -> FineTuned:
    """`first` iterations on 0 to 4, then `second` on 5 to 9 with a new last layer."""
    low, high = (digits("train").among(*ends) for ends in ((0, 5), (5, 10)))
    before = SerialSolver(lenet_for_five("ip2"))
    train(before, images_of(low), first)
    after = SerialSolver(lenet_for_five("ip2_high"), seed=2)
    scratch = SerialSolver(after.solver, seed=2)
    copied = into_arena(before.table.views(before.weights), after.model.net, after.weights, "0-4")
    for solver in (after, scratch):
        train(solver, images_of(high), second)
    return FineTuned(copied, accuracy(after), accuracy(scratch))


def images_of(data: Digits) -> Iterator[Batch]:
    for batch in data.batches(64):
        yield {"data": batch.images, "label": batch.labels}


def accuracy(solver: SerialSolver) -> float:
    """The share of the test images of 5 to 9 that are right."""
    test = digits("t10k").among(5, 10)
    model = CaffeModel(solver.solver.tests[0].net)
    figures = model.outputs(solver.weights, {"data": test.images, "label": test.labels})
    return figures["accuracy"]


def rows_of(name: str) -> list[Goal]:
    """The goals of one task."""
    match name:
        case "siamese":
            learned = siamese(300)
            print(learned)
            return [Goal("siamese, loss after 300 iterations", learned.last, 0.06)]
        case "autoencoder":
            learned = autoencoder(300)
            print(learned)
            return [Goal("autoencoder, loss after 300 iterations", learned.last, 190.0)]
        case "lrcn":
            learned, share = lrcn(300)
            print(learned)
            return [
                Goal("LRCN, loss after 300 iterations", learned.last, 0.15),
                Goal("LRCN, letters right", share, 0.95, at_least=True),
            ]
        case _:
            tuned = fine_tuning(300, 300)
            print(tuned)
            name = "fine-tuning, accuracy on 5-9 after 300 iterations"
            return [Goal(name, tuned.accuracy, 0.97, at_least=True)]


TASKS = ("siamese", "autoencoder", "lrcn", "fine_tuning")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=TASKS, metavar="TASK")
    found = []
    for name in parser.parse_args().tasks:
        started = time.monotonic()
        with threadpool_limits(1):
            found += rows_of(name)
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    goals(found)


if __name__ == "__main__":
    main()
