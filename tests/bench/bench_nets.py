"""What a training step of Caffe's networks costs on one core: ours, and PyTorch's (NCHW).

Both contenders start from the same float32 images and weights and end with the gradient of all
parameters; before anything is timed their losses and gradients are compared. Rounds visit them in a
freshly shuffled order, so that a busy neighbour slows them alike. A goal is the median over the
rounds of the ratio of CPU seconds: other load on the cores moves it less than it moves wall time.

Activation memory is how far one step raises the resident memory of a process of its own, at most,
above what it held before, with the code loaded and the weights and their gradients in place.

PyTorch (2.13.0, an extra that only benchmarks need) is left out where it is not installed; then
there is nothing to compare with, and no goals.

    python tests/bench/bench_nets.py [--nets lenet,resnet50] [--rounds 7]
"""

import argparse
import importlib.util
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from google.protobuf import text_format
from threadpoolctl import threadpool_limits

from tests.bench.report import Goal, goals, save
from tests.support import caffe_nets
from worker.caffe.model import CaffeModel
from worker.caffe.net import Description
from worker.caffe.text import parse_net
from worker.training.model import Batch

OURS, TORCH = "this project", "PyTorch"
MEMORY_GOAL = 1.2

Contender = Callable[[], float]


class NetCase(NamedTuple):
    """A net's batch, its goal (CPU seconds over PyTorch's), and how many rounds a `--rounds` is."""

    batch: int
    goal: float
    rounds: int = 1


CASES = {
    "lenet": NetCase(64, 0.7, 5),
    "cifar10_quick": NetCase(100, 1.0, 2),
    "cifar10_full": NetCase(100, 1.3, 2),
    "caffenet": NetCase(16, 1.5),
    "googlenet": NetCase(8, 1.5),
    "resnet50": NetCase(8, 1.5),
}


def batch_of(name: str, rows: int) -> Batch:
    """Images of noise, and labels."""
    rng = np.random.default_rng(1)
    return {
        "data": rng.standard_normal((rows, *caffe_nets.NETS[name]().image), np.float32),
        "label": rng.integers(0, 10, rows),
    }


def text_of(name: str, rows: int, *, dropout: bool = True) -> str:
    """The net for training; without dropout, whose draws differ, gradients can be compared."""
    text = caffe_nets.training(caffe_nets.NETS[name](), rows)
    if dropout:
        return text
    net = parse_net(text, name)
    kept = [layer for layer in net.layer if layer.type != "Dropout"]
    del net.layer[:]
    net.layer.extend(kept)
    return text_format.MessageToString(net)


class Ours:
    """`CaffeModel.gradient` on a batch."""

    def __init__(self, text: str, batch: Batch) -> None:
        self.model, self.batch = CaffeModel(Description(text)), batch
        self.weights = self.model.initial(seed=1)
        self.out = np.zeros_like(self.weights)

    def step(self) -> float:
        return self.model.gradient(self.weights, self.batch, self.out, step=0, seed=0)

    def gradients(self) -> dict[str, np.ndarray]:
        views, buffers = self.model.table.views(self.out), self.model.net.buffers
        return {name: view for name, view in views.items() if name not in buffers}


class Torch:
    """The twin, on the same weights."""

    def __init__(self, text: str, batch: Batch) -> None:
        import torch

        from tests.bench.torch_nets import TorchNet

        torch.set_num_threads(1)
        model = CaffeModel(Description(text))
        self.net = TorchNet(text, model.table.views(model.initial(seed=1)))
        self.batch = batch

    def step(self) -> float:
        return self.net.gradient(self.batch)

    def gradients(self) -> dict[str, np.ndarray]:
        return {name: tensor.grad.numpy() for name, tensor in self.net.trained.items()}


KINDS: dict[str, type[Ours] | type[Torch]] = {OURS: Ours, TORCH: Torch}


def contenders(name: str, rows: int, *, dropout: bool = True) -> dict[str, Ours | Torch]:
    text, batch = text_of(name, rows, dropout=dropout), batch_of(name, rows)
    return {kind: KINDS[kind](text, batch) for kind in kinds()}


def kinds() -> list[str]:
    return [OURS, TORCH] if importlib.util.find_spec("torch") else [OURS]


def difference(name: str) -> float:
    """The largest difference of a tensor's gradients, relative to the tensor's largest.

    For two images, without dropout.
    """
    both = contenders(name, 2, dropout=False)
    losses = [one.step() for one in both.values()]
    np.testing.assert_allclose(losses[0], losses[-1], rtol=1e-4)
    ours, theirs = (one.gradients() for one in both.values())
    assert set(ours) == set(theirs)
    return max(
        float(np.abs(ours[key] - theirs[key]).max() / (np.abs(theirs[key]).max() + 1e-12))
        for key in ours
    )


def measure(runs: dict[str, Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Wall and CPU milliseconds of every contender in every round; the first two warm up."""
    taken: dict[str, dict[str, list[float]]] = {name: {"wall": [], "cpu": []} for name in runs}
    order, dice = list(runs), random.Random(7)
    for number in range(-2, rounds):
        dice.shuffle(order)
        for name in order:
            wall, cpu = time.perf_counter(), time.process_time()
            runs[name]()
            if number >= 0:
                taken[name]["wall"].append(1e3 * (time.perf_counter() - wall))
                taken[name]["cpu"].append(1e3 * (time.process_time() - cpu))
    return taken


def resident(field: str) -> int:
    """VmRSS (now) or VmHWM (the most so far) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def activations(name: str, kind: str) -> int:
    """The bytes by which a step raises this process's resident memory, at its peak."""
    text, rows = text_of(name, CASES[name].batch), CASES[name].batch
    one = KINDS[kind](text, batch_of(name, rows))
    whole, one.batch = one.batch, batch_of(name, 1)
    one.step()
    one.batch = whole
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back to VmRSS
    one.step()
    return resident("VmHWM") - before


def in_a_process(name: str, kind: str) -> int:
    found = subprocess.run(
        [sys.executable, __file__, "--memory-of", name, kind],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    return int(found.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--nets", default=",".join(CASES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-memory", action="store_true", help="time only")
    parser.add_argument("--memory-of", nargs=2, metavar=("NET", "CONTENDER"), help="for own use")
    options = parser.parse_args()
    with threadpool_limits(1):
        if options.memory_of:
            print(activations(*options.memory_of))
            return
        run(options.nets.split(","), options.rounds, memory=not options.no_memory)


def run(names: list[str], rounds: int, *, memory: bool) -> None:
    """Measure the named nets; print a table, then the goals."""
    if TORCH not in kinds():
        print("PyTorch is not installed, so there is no comparison: pip install torch==2.13.0")
    print(f"{'net, batch':20}{'contender':14}{'CPU ms':>9}{'wall ms':>9}{'MB':>8}{'agree to':>10}")
    rows, figures = [], {}
    for name in names:
        case = CASES[name]
        apart = difference(name) if TORCH in kinds() else float("nan")
        both = contenders(name, case.batch)
        taken = measure({kind: one.step for kind, one in both.items()}, rounds * case.rounds)
        del both
        held = {kind: in_a_process(name, kind) if memory else 0 for kind in kinds()}
        for kind, times in taken.items():
            cpu, wall = (statistics.median(times[clock]) for clock in ("cpu", "wall"))
            title = f"{name}, {case.batch}"
            print(f"{title:20}{kind:14}{cpu:9.1f}{wall:9.1f}{held[kind] / 1e6:8.1f}{apart:10.1e}")
        figures[name] = {"milliseconds": taken, "bytes": held, "apart": apart}
        if TORCH in kinds():
            pairs = zip(taken[OURS]["cpu"], taken[TORCH]["cpu"], strict=True)
            ratio = statistics.median(own / other for own, other in pairs)
            rows.append(Goal(f"{name}: CPU seconds over PyTorch's", ratio, case.goal, "x"))
        if memory and TORCH in kinds():
            more = held[OURS] / held[TORCH]
            rows.append(Goal(f"{name}: activation memory over PyTorch's", more, MEMORY_GOAL, "x"))
    print(save("nets", figures))
    goals(rows)


if __name__ == "__main__":
    main()
