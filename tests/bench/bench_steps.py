"""What a worker adds to a step of 20 ms, and how much memory it takes: NumPy, JAX, PyTorch.

    python tests/bench/bench_steps.py [--steps 25] [--rounds 7]

The step is that of a network of 1.1 M parameters, in one thread, with as many rows as take about 20
ms. The plain loop and those with a worker take turns in short runs, in random order; each figure is
the median over rounds. The shard is a process of this host. A library that is not installed is left
out; PyTorch's step is that of bench_torch.py.

Memory is that of a process that trains 25 M parameters, a hundred megabytes, less that of a process
with the plain loop, in copies of the parameters. Each counts at its largest, of the moments when
the gradient is there and those between two steps: so a gradient, which both have, counts for
neither. Of the memory that it shares with the shard, half is counted (PSS).
"""

import argparse
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import psutil
from threadpoolctl import threadpool_limits

import ps
import worker
from deploy.examples.numpy_net import Perceptron
from tests.bench.loops import Step, StepTime, in_turn, rows_for
from tests.bench.report import Goal, goals, save

STEP_MS, ADDED, COPIES = 20.0, 0.05, 2.0
SIZE, HIDDEN, CLASSES = 784, 1400, 10
SIDE, FEW = 5000, 4
WARM, READ = 40, 4  # steps before memory is read, and while it is
RATE = 1e-3
LOOPS = ("downpour", "local_sgd:h=10")
NET = Perceptron(SIZE, CLASSES, HIDDEN)


def batch_of(rows: int) -> dict[str, Any]:
    dice = np.random.default_rng(1)
    features = dice.standard_normal((rows, SIZE), np.float32)
    return {"features": features, "label": dice.integers(0, CLASSES, rows)}


def numpy_plain(rows: int) -> Step:
    """The loop without a worker."""
    params, batch = NET.params(1), batch_of(rows)

    def step() -> None:
        _, gradients = NET.gradient(params, batch)
        for name, gradient in gradients.items():
            params[name] -= RATE * gradient

    return step


def numpy_cases(rows: int, stack: ExitStack) -> dict[str, Step]:
    """The same network with a worker of the SDK, as in `ctx.worker.step()`."""
    batch = batch_of(rows)

    def joined(me: ps.Worker) -> Step:
        def step() -> None:
            with me.step(samples=rows) as step:
                step.loss, gradients = NET.gradient(step.pull(), batch)
                step.push(gradients)

        return step

    found = {}
    for name, ahead in (("step", 0), ("step, prefetch", 1)):
        job = stack.enter_context(worker.start(ps.Dense.like(NET.params(1), rate=RATE)))
        found[name] = joined(stack.enter_context(job.worker("w0", prefetch=ahead)))
    return found


def jax_gradient() -> Callable[[Any, Any], Any]:
    """The loss of the network and its gradient, compiled."""
    import jax

    def loss(params: Any, batch: Any) -> Any:
        hidden = jax.numpy.tanh(batch["features"] @ params["into"])
        scores = jax.nn.log_softmax(hidden @ params["out"] + params["bias"])
        return -jax.numpy.take_along_axis(scores, batch["label"][:, None], 1).mean()

    return jax.jit(jax.value_and_grad(loss))  # type: ignore[no-any-return]


def jax_plain(rows: int) -> Step:
    import jax

    params: Any = jax.tree.map(jax.numpy.array, NET.params(1))
    value_and_grad, batch = jax_gradient(), batch_of(rows)
    update = jax.jit(lambda one, other: jax.tree.map(lambda x, dx: x - RATE * dx, one, other))

    def step() -> None:
        nonlocal params
        loss, gradients = value_and_grad(params, batch)
        params = update(params, gradients)
        float(loss)

    return step


def jax_cases(rows: int, stack: ExitStack) -> dict[str, Step]:
    """The same network with `worker.jax`."""
    import worker.jax

    value_and_grad, batch = jax_gradient(), batch_of(rows)

    def joined(opt: Any) -> Step:
        def step() -> None:
            loss, gradients = value_and_grad(opt.params, batch)
            opt.step(gradients, loss=loss)

        return step

    found = {}
    for strategy in LOOPS:
        table = worker.jax.params(NET.params(1), rate=RATE)
        job = stack.enter_context(worker.start(table, strategy=strategy))
        join = worker.jax.join(job, "w0", NET.params(1), strategy=strategy)
        found[strategy] = joined(stack.enter_context(join))
    return found


def overhead(library: str, steps: int, rounds: int) -> dict[str, StepTime]:
    """What a step takes, plain and in each case."""
    if library == "torch":
        import torch

        from tests.bench import bench_torch

        torch.set_num_threads(1)
        return bench_torch.overhead(steps, rounds)
    plain, cases = {"numpy": (numpy_plain, numpy_cases), "jax": (jax_plain, jax_cases)}[library]
    with ExitStack() as stack:
        rows = rows_for(STEP_MS, plain)
        return in_turn({"plain": plain(rows), **cases(rows, stack)}, steps, rounds)


def numpy_large(job: str, stack: ExitStack, look: Step) -> Step:
    """A step of a linear layer in NumPy; with a worker if there is a job.

    It calls `look` when the gradient is there.
    """
    x = np.full((FEW, SIDE), 0.5, np.float32)
    if not job:
        weight = np.zeros((SIDE, SIDE), np.float32)

        def plain() -> None:
            gradient = x.T @ (x @ weight)
            look()
            gradient *= RATE
            np.subtract(weight, gradient, weight)

        return plain
    me = stack.enter_context(ps.connect(job).worker("w0"))

    def step() -> None:
        with me.step() as step:
            gradient = x.T @ (x @ step.pull()["weight"])
            look()
            step.push({"weight": gradient})

    return step


def jax_large(job: str, stack: ExitStack, look: Step) -> Step:
    """The same in JAX."""
    import jax

    import worker.jax

    tree, rows = {"weight": np.zeros((SIDE, SIDE), np.float32)}, np.full((FEW, SIDE), 0.5)
    rows = rows.astype(np.float32)
    gradient = jax.jit(jax.grad(lambda tree, rows: ((rows @ tree["weight"]) ** 2).mean()))
    if job:
        opt = stack.enter_context(worker.jax.join(ps.connect(job), "w0", tree))

        def step() -> None:
            grads = jax.block_until_ready(gradient(opt.params, rows))
            look()
            opt.step(grads)

        return step
    params = jax.tree.map(jax.numpy.array, tree)
    update = jax.jit(
        lambda one, other: jax.tree.map(lambda x, dx: x - RATE * dx, one, other), donate_argnums=0
    )

    def plain() -> None:
        nonlocal params
        grads = jax.block_until_ready(gradient(params, rows))
        look()
        params = jax.block_until_ready(update(params, grads))

    return plain


def torch_large(job: str, stack: ExitStack, look: Step) -> Step:
    """The same in PyTorch."""
    import torch

    import worker.torch

    model, rows = torch.nn.Linear(SIDE, SIDE, bias=False), torch.full((FEW, SIDE), 0.5)
    opt: Any = torch.optim.SGD(model.parameters(), lr=RATE)
    if job:
        opt = stack.enter_context(worker.torch.join(ps.connect(job), "w0", model))

    def step() -> None:
        model(rows).square().mean().backward()
        look()
        opt.step()
        opt.zero_grad()

    return step


LARGE = {"numpy": numpy_large, "jax": jax_large, "torch": torch_large}


def print_memory(library: str, job: str) -> None:
    """Train for some steps, and print the most bytes that this process has in memory."""
    seen: list[int] = []
    reads = False

    def look() -> None:
        if reads:
            seen.append(psutil.Process().memory_full_info().pss)

    with ExitStack() as stack, threadpool_limits(1):
        step = LARGE[library](job, stack, look)
        for number in range(WARM + READ):
            reads = number >= WARM
            step()
            look()
        print(max(seen))


def copies(library: str) -> float:
    """The memory that a worker takes besides the plain loop's, in copies of the parameters."""
    params = {"weight": np.zeros((SIDE, SIDE), np.float32)}
    with TemporaryDirectory() as folder, worker.start(ps.Dense.like(params, rate=RATE)) as job:
        cluster = Path(folder) / "job.json"
        job.save(cluster)
        plain, with_worker = (
            int(subprocess.check_output([sys.executable, __file__, "--memory", library, place]))
            for place in ("", str(cluster))
        )
    return (with_worker - plain) / params["weight"].nbytes


def main() -> None:
    """Measure, and hold the figures against the goals."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--steps", type=int, default=25)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--memory", nargs=2, help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.memory:
        print_memory(*given.memory)
        return
    rows: list[Goal] = []
    figures: dict[str, Any] = {}
    for library in ("numpy", "jax", "torch"):
        if find_spec(library) is None:
            print(f"{library}: left out, because it is not installed")
            continue
        with threadpool_limits(1):
            took = figures[library] = overhead(library, given.steps, given.rounds)
        for name, (wall, cpu) in took.items():
            print(f"{library:6} {name:20}{wall:8.2f} ms, CPU {cpu:8.2f} ms", flush=True)
        rows += [
            Goal(f"{what} added to a step, {library}, {name}", 100 * more, 100 * ADDED, "%")
            for name, times in took.items()
            if name != "plain"
            for what, more in (
                ("time", times.wall / took["plain"].wall - 1),
                ("CPU time", times.cpu / took["plain"].cpu - 1),
            )
        ]
        held = figures[f"{library}, copies"] = copies(library)
        print(f"{library:6} memory              {held:8.2f} copies of the parameters", flush=True)
        rows.append(Goal(f"memory of a worker, {library}", held, COPIES, "copies"))
    save("steps", figures)
    goals(rows)


if __name__ == "__main__":
    main()
