"""How long LeNet's forward and backward pass take at batch 64 on one core: ours, and PyTorch's.

Rounds visit the contenders in a freshly shuffled order, so that a busy neighbour slows them alike;
medians are reported, and the ratio to PyTorch in the same round is what carries to other machines.
Each contender starts from the same uint8 images and ends with the gradient of all parameters.
PyTorch (2.13.0, an extra that only benchmarks need) is left out where it is not installed.

    python tests/bench/bench_lenet.py [--batch 64] [--rounds 40]
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from tests.bench.report import Goal, goals, save
from worker.caffe.model import CaffeModel
from worker.caffe.solver import read_solver
from worker.training.model import Batch

SOLVER = Path("deploy/demo/lenet_solver.prototxt")
OURS, NCHW, LAST = "this project", "PyTorch NCHW", "PyTorch channels_last"

Contender = Callable[[], float]


def ours(images: NDArray[np.uint8], labels: NDArray[np.int64]) -> Contender:
    """`CaffeModel.gradient` of the demo's network."""
    model = CaffeModel(read_solver(SOLVER).train)
    weights = model.initial(seed=1)
    out = np.empty_like(weights)
    batch: Batch = {"data": images, "label": labels}
    return lambda: model.gradient(weights, batch, out, step=0, seed=0)


def torch_lenet(images: NDArray[np.uint8], labels: NDArray[np.int64], last: bool) -> Contender:
    """The same network as a PyTorch user writes it."""
    import torch

    torch.set_num_threads(1)
    nn = torch.nn
    net = nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    )
    if last:
        net = net.to(memory_format=torch.channels_last)
    pixels, classes = torch.from_numpy(images), torch.from_numpy(labels)

    def run() -> float:
        net.zero_grad()
        x = pixels.float() / 256
        if last:
            x = x.contiguous(memory_format=torch.channels_last)
        loss = nn.functional.cross_entropy(net(x), classes)
        loss.backward()
        return float(loss.detach())

    return run


def contenders(batch: int) -> dict[str, Contender]:
    dice = np.random.default_rng(1)
    images = dice.integers(0, 256, (batch, 1, 28, 28), np.uint8)
    labels = dice.integers(0, 10, batch)
    found = {OURS: ours(images, labels)}
    try:
        found[NCHW] = torch_lenet(images, labels, last=False)
        found[LAST] = torch_lenet(images, labels, last=True)
    except ImportError:
        print("PyTorch is not installed: pip install torch==2.13.0")
    return found


def measure(runs: dict[str, Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU milliseconds of every contender in every round; the first rounds warm up."""
    taken: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in runs}
    order, dice = list(runs), random.Random(7)
    for number in range(-3, rounds):
        dice.shuffle(order)
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name]()
            if number >= 0:
                taken[name]["wall"].append(1e3 * (time.perf_counter() - wall))
                taken[name]["cpu"].append(1e3 * (time.process_time() - cpu))
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    with threadpool_limits(1):
        taken = measure(contenders(options.batch), options.rounds)
    wall = {name: statistics.median(times["wall"]) for name, times in taken.items()}
    base = taken.get(NCHW, taken[OURS])["wall"]
    print(f"{'':24}{'ms':>10}{'CPU ms':>10}{'x ' + (NCHW if NCHW in taken else OURS):>18}")
    ratio = {}
    for name, times in taken.items():
        cpu = statistics.median(times["cpu"])
        pairs = zip(times["wall"], base, strict=True)
        ratio[name] = statistics.median(own / other for own, other in pairs)
        print(f"{name:24}{wall[name]:10.1f}{cpu:10.1f}{ratio[name]:18.2f}")
    print(save("lenet", {"batch": options.batch, "milliseconds": taken}))
    rows = [Goal("LeNet forward+backward, batch 64, one core", wall[OURS], 36, "ms")]
    if NCHW in taken:
        rows.append(Goal("LeNet against PyTorch NCHW, one thread", ratio[OURS], 36 / 31, "x"))
    goals(rows)


if __name__ == "__main__":
    main()
