"""LeNet and cifar10_quick trained through a shard in a plain process, on the CPU and on the GPU.

One worker, the same batches, seeds and rule on both; the GPU must reach the accuracy that the CPU
reaches. LeNet's data comes with the demo; CIFAR-10 is trained where its file is, which cifar.py
makes.
"""

import gzip
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ps import AdminClient, ShardDevice
from ps.client import Client
from ps.job_spec import shard_specs
from ps.launch.processes import process_shards
from tests.bench.report import Goal
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver, read_solver
from worker.strategies import Downpour
from worker.training.device_selection import DeviceRequest, allocator, place_model
from worker.training.model import Batch
from worker.training.training_loop import Plan, train_worker

_DEMO, _NETS = Path("deploy/demo"), Path(__file__).with_name("nets")
_CPU, _GPU = DeviceRequest(False), DeviceRequest(True)
_SLACK = 0.01  # of accuracy: the two round differently, and a run's chance is larger than that


class Data(msgspec.Struct, frozen=True):
    """Images (n, c, h, w), uint8 or with their mean subtracted float32, and labels."""

    train: NDArray[np.generic]
    train_label: NDArray[np.int64]
    test: NDArray[np.generic]
    test_label: NDArray[np.int64]

    def batches(self, size: int, seed: int = 5) -> Iterator[Batch]:
        """Training batches without end, shuffled anew each epoch."""
        dice = np.random.default_rng(seed)
        while True:
            order = dice.permutation(len(self.train))
            for start in range(0, len(order) - size + 1, size):
                chosen = order[start : start + size]
                yield {"data": self.train[chosen], "label": self.train_label[chosen]}


class Trained(msgspec.Struct, frozen=True):
    accuracy: float
    steps_a_second: float


def run(cifar: Path | None) -> list[Goal]:
    """Train everything that there is data for; a goal each."""
    goals = _race("LeNet", _DEMO / "lenet_solver.prototxt", mnist(_DEMO / "mnist"), 600)
    if cifar is None:
        print("cifar10_quick: not trained, for want of its data (--cifar)")
        return goals
    solver = _NETS / "cifar10_quick_solver.prototxt"
    return goals + _race("cifar10_quick", solver, read_cifar(cifar), 300)


def _race(name: str, path: Path, data: Data, steps: int) -> list[Goal]:
    shape = data.train.shape[1:]
    solver = read_solver(path, (shape[0], shape[1], shape[2]))
    there = {
        words: train(solver, data, steps, wanted, device)
        for words, wanted, device in (
            ("the CPU", _CPU, ShardDevice.CPU),
            ("the GPU", _GPU, ShardDevice.CPU),
            ("the GPU, the shard too", _GPU, ShardDevice.GPU),
        )
    }
    for words, trained in there.items():
        print(
            f"{name} on {words}: {trained.accuracy:.2%} after {steps} steps,"
            f" {trained.steps_a_second:.0f} steps/s",
            flush=True,
        )
    target = there.pop("the CPU").accuracy - _SLACK
    return [
        Goal(f"{name} accuracy on {words}", trained.accuracy, target, "", at_least=True)
        for words, trained in there.items()
    ]


def train(
    solver: Solver,
    data: Data,
    steps: int,
    wanted: DeviceRequest,
    shard_device: ShardDevice = ShardDevice.CPU,
) -> Trained:
    """Train `steps` steps with one worker and one shard; the accuracy is the test net's, on CPU."""
    host = CaffeModel(solver.train)
    model = place_model(host, wanted, partition=0)
    plan = Plan(steps=steps, seed=3, strategy=Downpour(), schedule=solver.schedule)
    specs = shard_specs(
        model.table, rule=solver.rule, schedule=solver.schedule, decay=solver.decay, bound=0
    )
    with (
        process_shards(specs, device=shard_device) as hosts,
        AdminClient(hosts.cluster) as console,
        threadpool_limits(1),
    ):
        console.install(model.initial(3))
        started = time.monotonic()
        with Client(hosts.cluster, worker="w0", allocate=allocator(model)) as client:
            train_worker(client, model, data.batches(host.net.batch_size), plan)
        took = time.monotonic() - started
        return Trained(accuracy(solver, console.read(), data), steps / took)


def accuracy(solver: Solver, weights: NDArray[np.float32], data: Data) -> float:
    """The share of the test images that the solver's test net gets right."""
    model, right = CaffeModel(solver.tests[0].net), 0.0
    for start in range(0, len(data.test), 100):
        part = slice(start, start + 100)
        batch = {"data": data.test[part], "label": data.test_label[part]}
        right += model.outputs(weights, batch)["accuracy"] * len(batch["label"])
    return right / len(data.test)


def mnist(folder: Path) -> Data:
    """The four IDX files."""

    def read(name: str, header: int) -> NDArray[np.uint8]:
        content = gzip.decompress((folder / f"{name}.gz").read_bytes())
        return np.frombuffer(content, np.uint8, offset=header)

    return Data(
        read("train-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28),
        read("train-labels-idx1-ubyte", 8).astype(np.int64),
        read("t10k-images-idx3-ubyte", 16).reshape(-1, 1, 28, 28),
        read("t10k-labels-idx1-ubyte", 8).astype(np.int64),
    )


def read_cifar(path: Path) -> Data:
    """What cifar.py wrote, the training images' mean subtracted as Caffe's example does."""
    with np.load(path) as arrays:
        mean = arrays["train_data"].mean(axis=0, dtype=np.float64).astype(np.float32)
        return Data(
            arrays["train_data"] - mean,
            arrays["train_label"],
            arrays["test_data"] - mean,
            arrays["test_label"],
        )
