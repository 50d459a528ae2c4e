"""The nets in PyTorch, their data and their tests, for the programs of this folder."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from tests.bench.endtoend.programs.task import (
    Task,
    measure,
    note_process,
    slow_down,
    write_line,
)

_TESTED_AT_ONCE = 500


class Standardise(nn.Module):  # type: ignore[misc]  # torch may not be installed
    """Bytes or floats as floats of about 0 to 1, or of mean 0."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.shift, self.scale = float(task.read("shift")), float(task.read("scale"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float() - self.shift) * self.scale


def read_training_set(task: Task) -> TensorDataset:
    """The training samples with their classes."""
    return TensorDataset(*(torch.from_numpy(task.read(name)) for name in ("train_x", "train_y")))


def make_net(task: Task) -> nn.Module:
    """Caffe's LeNet, 431,080 parameters; its CIFAR-10 quick, 145,578; or an MLP, 7,106."""
    torch.manual_seed(task.seed)
    layers: dict[str, list[nn.Module]] = {
        "lenet": [
            *(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2)),
            *(nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
        ],
        "cifar": [
            *(nn.Conv2d(3, 32, 5, padding=2), nn.MaxPool2d(3, 2, ceil_mode=True), nn.ReLU()),
            *(nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True)),
            *(nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.AvgPool2d(3, 2, ceil_mode=True)),
            *(nn.Flatten(), nn.Linear(1024, 64), nn.Linear(64, 10)),
        ],
        "adult": [nn.LazyLinear(64), nn.ReLU(), nn.Linear(64, 2)],
    }
    net = nn.Sequential(Standardise(task), *layers[task.work])
    net(torch.from_numpy(task.read("test_x")[:1]))  # gives a lazy layer its size
    return net


class Record:
    """Tests of the net, a line of JSON each in the file that the benchmark reads.

    `step_samples` are the samples of one step of all workers.
    """

    def __init__(self, task: Task, step_samples: int) -> None:
        self._task = task
        self._tested = torch.from_numpy(task.read("test_x"))
        self._step, self._samples = step_samples, 0

    def take_step(self, model: nn.Module) -> bool:
        """Count a step, after which a test may be due; returns whether the target is reached."""
        tests = self._samples // self._task.between
        self._samples += self._step
        return self._samples // self._task.between > tests and self.test(model)

    def test(self, model: nn.Module) -> bool:
        """Test the net; returns whether the target is reached."""
        with torch.no_grad():
            outputs = torch.cat([model(part) for part in self._tested.split(_TESTED_AT_ONCE)])
        accuracy = measure(self._task, outputs.numpy())
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
        with slow_down(self._task.slow if self._rank == 0 else 1.0):
            loss = cross_entropy(model(images), labels)
            loss.backward()
            if self._rank == 0 and not self._steps:
                write_line(self._task, None)
        self._steps += 1
        return float(loss.item())
