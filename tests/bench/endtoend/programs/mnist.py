"""MNIST and LeNet in PyTorch, for the programs of this folder."""

import time

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.bench.endtoend.programs.task import (
    Task,
    note_process,
    read_arrays,
    write_line,
)

_TESTED_AT_ONCE = 500


def read_images(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The images of `train` or `t10k`, (n, 1, 28, 28) from 0 to 1, and their classes."""
    images, labels = read_arrays(part)
    return torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels)


def read_training_set() -> TensorDataset:
    """The 60,000 training images with their classes."""
    return TensorDataset(*read_images("train"))


def make_lenet(seed: int) -> nn.Module:
    """Caffe's LeNet: 431,080 parameters."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


def measure_accuracy(model: nn.Module) -> float:
    """The share of the 10,000 test images that the net classifies correctly."""
    images, labels = read_images("t10k")
    parts = zip(images.split(_TESTED_AT_ONCE), labels.split(_TESTED_AT_ONCE), strict=True)
    with torch.no_grad():
        correct = sum(int((model(part).argmax(1) == right).sum()) for part, right in parts)
    return correct / len(labels)


class Record:
    """Tests of the net, a line of JSON each in the file that the benchmark reads.

    `step_samples` are the samples of one step of all workers.
    """

    def __init__(self, task: Task, step_samples: int) -> None:
        self._task = task
        self._step, self._samples = step_samples, 0

    def take_step(self, model: nn.Module) -> bool:
        """Count a step, after which a test may be due; returns whether the target is reached."""
        tests = self._samples // self._task.between
        self._samples += self._step
        return self._samples // self._task.between > tests and self.test(model)

    def test(self, model: nn.Module) -> bool:
        """Test the net; returns whether the target is reached."""
        accuracy = measure_accuracy(model)
        write_line(self._task, accuracy)
        return bool(accuracy >= self._task.target)


class Worker:
    """One worker's own pace, and its process, which the benchmark may kill."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank = task, rank
        self._steps = 0
        note_process(task, rank)

    def gradient(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
        """Compute the loss, and the gradient into the model; a slow worker rests after that."""
        began = time.perf_counter()
        loss = cross_entropy(model(images), labels)
        loss.backward()
        if self._rank == 0:
            if not self._steps:
                write_line(self._task, None)
            time.sleep((time.perf_counter() - began) * (self._task.slow - 1))
        self._steps += 1
        return float(loss.item())
