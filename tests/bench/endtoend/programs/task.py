"""The task of the programs of this folder, and their record of how far they are.

Each runs in an environment of its own, where this project may not be installed, so only NumPy is
imported here.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class Task(NamedTuple):
    """What a program is asked to do; see `read_task`."""

    work: str
    data: str
    workers: int
    batch: int
    rate: float
    momentum: float
    seed: int
    target: float
    slow: float
    between: int
    record: str
    cluster: str
    hosts: list[str]
    role: str
    member: int

    def read(self, name: str) -> NDArray[Any]:
        """An array of the data: train_x, train_y, test_x, test_y, shift or scale."""
        with np.load(self.data) as arrays:
            return np.asarray(arrays[name])


def read_task() -> Task:
    """The options of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", default="lenet", help="lenet, cifar or adult")
    parser.add_argument("--data", required=True, help="the file with the arrays")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples of a worker's step")
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--target", type=float, default=0.985, help="accuracy, or the AUC of adult")
    parser.add_argument("--slow", type=float, default=1.0, help="how much slower worker 0 is")
    parser.add_argument(
        "--between", type=int, default=12_800, help="samples of all workers from test to test"
    )
    parser.add_argument("--record", required=True, help="the file for times and accuracies")
    parser.add_argument("--cluster", default="", help="a running Spark or Ray; else one is started")
    parser.add_argument("--hosts", nargs="*", default=[], help="HOST:PORT, the server's first")
    parser.add_argument("--role", default="", help="server, worker or chief, if each is a process")
    parser.add_argument("--member", type=int, default=0, help="the number within the role")
    given, _ = parser.parse_known_args()  # launchers add options of their own
    return Task(**vars(given))


def measure_area(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    """The area under the ROC curve: the share of pairs in the right order."""
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = (np.cumsum(counts) - (counts - 1) / 2)[places]
    positive = labels == 1
    right = ranks[positive].sum() - positive.sum() * (positive.sum() + 1) / 2
    return float(right / (positive.sum() * (~positive).sum()))


def measure(task: Task, outputs: NDArray[Any]) -> float:
    """The accuracy of a net's outputs (n, classes) for the test samples, or the AUC of adult."""
    labels = task.read("test_y")
    if task.work == "adult":
        return measure_area(outputs[:, 1] - outputs[:, 0], labels)
    return float((outputs.argmax(1) == labels).mean())


def write_line(task: Task, accuracy: float | None, at: float | None = None) -> None:
    """Add a line to the record: a test's, or that of the first step, which has no accuracy.

    `at` is its time, if that is not now.
    """
    line = {"time": time.time() if at is None else at, "accuracy": accuracy}
    with Path(task.record).open("a") as file:
        file.write(json.dumps(line) + "\n")


def write_loss(task: Task, loss: float, tokens: int, at: float) -> None:
    """Add a line to the record: the loss after this number of tokens, with its time."""
    line = {"time": at, "accuracy": None, "loss": loss, "tokens": tokens}
    with Path(task.record).open("a") as file:
        file.write(json.dumps(line) + "\n")


@contextmanager
def slow_down(times: float) -> Iterator[None]:
    """Take this many times as long, by a rest, for what this thread computes in the context.

    Its CPU time counts. A backward pass that exchanges gradients also waits for other workers,
    which a slow machine would not do for longer.
    """
    began = time.thread_time()
    yield
    time.sleep((time.thread_time() - began) * (times - 1))


def note_process(task: Task, rank: int) -> None:
    """Write down the present process as that of a worker, for the benchmark, which may kill it."""
    Path(f"{task.record}.{rank}.pid").write_text(str(os.getpid()))
