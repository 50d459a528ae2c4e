"""The task of the programs of this folder, and their record of how far they are.

Each runs in an environment of its own, where this project may not be installed, so only NumPy is
imported here.
"""

import argparse
import gzip
import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

MNIST = Path(__file__).parents[4] / "deploy" / "demo" / "mnist"


class Task(NamedTuple):
    """What a program is asked to do; see `read_task`."""

    workers: int
    batch: int
    rate: float
    momentum: float
    seed: int
    target: float
    slow: float
    between: int
    record: str


def read_task() -> Task:
    """The options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples of a worker's step")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.985, help="share of the test images")
    parser.add_argument("--slow", type=float, default=1.0, help="how much slower worker 0 is")
    parser.add_argument(
        "--between", type=int, default=12_800, help="samples of all workers from test to test"
    )
    parser.add_argument("--record", required=True, help="the file for times and accuracies")
    given, _ = parser.parse_known_args()  # launchers add options of their own
    return Task(**vars(given))


def read_arrays(part: str) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The images of `train` or `t10k`, (n, 28, 28) from 0 to 1, and their classes."""
    images = gzip.decompress((MNIST / f"{part}-images-idx3-ubyte.gz").read_bytes())[16:]
    labels = gzip.decompress((MNIST / f"{part}-labels-idx1-ubyte.gz").read_bytes())[8:]
    pixels = np.frombuffer(images, np.uint8).astype(np.float32) / np.float32(255)
    return pixels.reshape(-1, 28, 28), np.frombuffer(labels, np.uint8).astype(np.int64)


def write_line(task: Task, accuracy: float | None, at: float | None = None) -> None:
    """Add a line to the record: a test's, or that of the first step, which has no accuracy.

    `at` is its time, if that is not now.
    """
    line = {"time": time.time() if at is None else at, "accuracy": accuracy}
    with Path(task.record).open("a") as file:
        file.write(json.dumps(line) + "\n")


def note_process(task: Task, rank: int) -> None:
    """Write down the present process as that of a worker, for the benchmark, which may kill it."""
    Path(f"{task.record}.{rank}.pid").write_text(str(os.getpid()))
