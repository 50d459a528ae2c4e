"""Races of whole steps: LeNet forward, backward and update in one graph; a pull beside compute."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from cupy_kernels.ops.updates.spec import CHUNK, HYPER, MULTIPLIERS
from tests.bench.report import Goal
from tests.gpu.ground import GpuGround, Ground, Run
from tests.gpu.race import Ceilings, Entry, Race, Times
from tests.gpu.races import CAFFENET, MICRO, update
from worker.caffe.layer import StepKey
from worker.caffe.net import Network
from worker.caffe.solver import read_solver

_SOLVER = Path("deploy/demo/lenet_solver.prototxt")


def lenet_step(ground: Ground) -> Iterator[Race]:
    """A whole training step at batch 64: two convolutions, two products, loss, update."""
    rows = ground.size(64, 1)
    images = ground.dice.integers(0, 256, (rows, 1, 28, 28)).astype(np.uint8)
    labels = ground.dice.integers(0, 10, rows)
    entries = [Entry("LeNet step, one graph", lenet(ground, images, labels))]
    if isinstance(ground, GpuGround) and ground.torch is not None:
        run = torch_lenet(ground, images, labels)
        entries.append(Entry("torch LeNet step, eager", run, graph=None, host=True))

    def judge(times: dict[str, Times], _: Ceilings) -> list[Goal]:
        took = MICRO * times[entries[0].name].median
        return [Goal("LeNet batch 64, full step as one graph", took, 60.0, "us")]

    yield Race("LeNet step", entries, judge, flush=False)


def lenet(ground: Ground, images: Any, labels: Any) -> Run:
    """Our network on the device, and the momentum kernel on its arena."""
    net = Network(read_solver(_SOLVER, (1, 28, 28)).train)
    n = net.table.size
    weights, gradient = ground.put(net.initial(1)), ground.empty((n,))
    columns = {"data": ground.put(images), "label": ground.put(labels)}
    step = ground.put(np.zeros(1, np.uint64))
    learn = ground.kernel(
        "update_momentum",
        w=weights,
        g=gradient,
        history=ground.put(np.zeros(n, np.float32)),
        out=weights,
        groups=ground.put(np.zeros(n // CHUNK, np.uint16)),
        multipliers=ground.struct(MULTIPLIERS, rate=1.0, decay=1.0),
        hyper=ground.struct(HYPER, rate=1e-3, keep=0.9),
        verdict=None,
        n=n,
    )

    def run() -> None:
        net.forward(weights, columns, StepKey(step=step, seed=0))
        net.backward(weights, gradient)
        learn()

    return run


def torch_lenet(ground: GpuGround, images: Any, labels: Any) -> Run:
    """The same network as PyTorch runs it by default."""
    torch: Any = ground.torch
    nn = torch.nn
    model = nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Linear(500, 10)),
    ).cuda()
    optimiser = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    data = torch.as_tensor(images).cuda().float() / 256
    wanted = torch.as_tensor(labels).cuda()

    def run() -> None:
        optimiser.zero_grad()
        nn.functional.cross_entropy(model(data), wanted).backward()
        optimiser.step()

    return run


def overlapped_pull(ground: Ground) -> Iterator[Race]:
    """CaffeNet's weights on their way in, beside updates that take about as long."""
    n = ground.size(CAFFENET, 1024)
    once = update(ground, "update_adagrad", ("square_sum",), n)
    names = ["compute alone", "pull alone", "compute and pull"]
    if not isinstance(ground, GpuGround):
        yield Race("overlap", [Entry(names[0], once)], lambda _, __: [])
        return
    compute = _times_over(once, 15)
    copy = _pull(ground, n)

    def together() -> None:
        copy(compute)

    entries = [
        Entry(names[0], compute, graph=None),
        Entry(names[1], lambda: copy(lambda: None), graph=None),
        Entry(names[2], together, graph=None),
    ]

    def judge(times: dict[str, Times], _: Ceilings) -> list[Goal]:
        longer = max(times[names[0]].median, times[names[1]].median)
        return [Goal("pull overlapped with compute", times[names[2]].median / longer, 1.05, "x")]

    yield Race("overlap", entries, judge)


def _times_over(run: Run, count: int) -> Run:
    def repeated() -> None:
        for _ in range(count):
            run()

    return repeated


def _pull(ground: GpuGround, n: int) -> Any:
    """Copies in on a stream of its own while the given work is queued on the main one."""
    import cupyx

    cupy, main = ground.cupy, ground.main
    source = cupyx.zeros_pinned((n,), np.float32)
    target, stream = ground.empty((n,)), cupy.cuda.Stream(non_blocking=True)

    def run(beside: Run) -> None:
        stream.wait_event(main.record())
        target.set(source, stream=stream)
        beside()
        main.wait_event(stream.record())

    return run


ALL = (lenet_step, overlapped_pull)
