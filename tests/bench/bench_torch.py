"""What `worker.torch` adds to a step of PyTorch, and how well its workers learn.

    python tests/bench/bench_torch.py [--steps 50] [--rounds 7] [--rows 40000]

The step is that of an MLP of 1.1 M parameters, in one thread, with as many rows as take about 20
ms. The plain loop and those with a worker take turns in short runs, in random order; each figure is
the median over rounds, of wall time and of the worker's CPU time. The shard is a process of this
host. Then two workers on Spark train a CNN with BatchNorm and an MLP on the first rows of MNIST,
and so does a plain loop with the same steps in all; the figures are shares of the test images.
"""

import argparse
import random
from contextlib import ExitStack
from typing import Any

import torch
from torch.nn import Flatten, Linear, ReLU, Sequential
from torch.nn.functional import cross_entropy

import worker
import worker.torch
from deploy.clusters.java import spark_environment
from deploy.examples import mnist_spark_torch as cnn
from tests.bench.loops import Step, StepTime, in_turn, rows_for
from tests.bench.report import Goal, goals, save
from worker.spark import start_session

STEP_MS, ADDED, POINTS = 20.0, 0.05, 0.5
CASES = ("downpour", "downpour, prefetch", "easgd:tau=10", "local_sgd:h=10")
RATE, SIZE, EPOCHS = 0.1, 32, 4


def mlp() -> Sequential:
    torch.manual_seed(2)
    return Sequential(
        Flatten(), Linear(784, 800), ReLU(), Linear(800, 600), ReLU(), Linear(600, 10)
    )


def looped(model: Any, opt: Any, rows: int) -> Step:
    """A step of an ordinary loop."""
    images, labels = torch.rand(rows, 1, 28, 28), torch.randint(10, (rows,))

    def step() -> None:
        cross_entropy(model(images), labels).backward()
        opt.step()
        opt.zero_grad()

    return step


def plain_step(rows: int) -> Step:
    """A step of the plain loop."""
    model = mlp()
    return looped(model, torch.optim.SGD(model.parameters(), lr=1e-3), rows)


def overhead(steps: int, rounds: int) -> dict[str, StepTime]:
    """What a step of the plain loop takes, and of a worker in each case."""
    rows = rows_for(STEP_MS, plain_step)
    with ExitStack() as stack:
        cases = {"plain": plain_step(rows)}
        for case in CASES:
            strategy, ahead = case.removesuffix(", prefetch"), case.endswith("prefetch")
            model = mlp()
            table = worker.torch.params(model, rate=1e-3)
            job = stack.enter_context(worker.start(table, strategy=strategy))
            joined = worker.torch.join(job, "w0", model, strategy=strategy, prefetch=ahead)
            cases[case] = looped(model, stack.enter_context(joined), rows)
        return in_turn(cases, steps, rounds)


def train(args: dict[str, Any], ctx: worker.Context) -> None:
    """The example's loop, for either net."""
    model = cnn.net() if args["net"] == "CNN" else mlp()
    opt = worker.torch.wrap(model, None, ctx)
    for batch in ctx.batches(SIZE, epochs=EPOCHS):
        scores = model(cnn.inputs(batch["image"]))
        cross_entropy(scores, torch.from_numpy(batch["label"])).backward()
        opt.step()
        opt.zero_grad()


def plainly(model: Any, data: list[tuple[bytes, int]]) -> Any:
    """The same loop in one process."""
    opt, dice = torch.optim.SGD(model.parameters(), lr=RATE), random.Random(1)
    for _ in range(EPOCHS):
        order = dice.sample(data, len(data))
        for begin in range(0, len(order), SIZE):
            images, labels = zip(*order[begin : begin + SIZE], strict=True)
            cross_entropy(model(cnn.inputs(images)), torch.tensor(labels)).backward()
            opt.step()
            opt.zero_grad()
    return model


def learning(rows: int) -> dict[str, float]:
    """The percentage of test images that each net recognises, by how it was trained."""
    data, test = cnn.rows("train", rows), cnn.rows("t10k", 10_000)
    found = {}
    with start_session(None, 2, app="bench_torch", env=spark_environment()) as spark:
        df = spark.createDataFrame(data, "image binary, label long").repartition(2)
        for name, net in (("CNN", cnn.net), ("MLP", mlp)):
            percent = found[f"{name} plain"] = 100 * cnn.accuracy(plainly(net(), data), test)
            print(f"{name} plain               {percent:8.2f} %", flush=True)
            for strategy in ("downpour:scale=1", "easgd:tau=4"):
                trained = worker.run(
                    df,
                    train,
                    {"net": name},
                    params=worker.torch.params(net(), rate=RATE),
                    strategy=strategy,
                    shards_in="processes",
                )
                model = worker.torch.load(net(), trained.params)
                percent = found[f"{name} {strategy}"] = 100 * cnn.accuracy(model, test)
                print(f"{name} {strategy:20}{percent:8.2f} %", flush=True)
    return found


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--steps", type=int, default=50)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--rows", type=int, default=40_000)
    given = options.parse_args()
    torch.set_num_threads(1)
    took = overhead(given.steps, given.rounds)
    for name, (wall, cpu) in took.items():
        print(f"{name:24}{wall:8.2f} ms, CPU {cpu:8.2f} ms", flush=True)
    learned = learning(given.rows)
    print(save("torch", {"step_ms": took, "recognised": learned}))
    plain, _ = took["plain"]
    goals(
        [
            *(
                Goal(
                    f"added to a step, {name}", 100 * (took[name][0] / plain - 1), 100 * ADDED, "%"
                )
                for name in CASES
            ),
            *(
                Goal(f"behind, {name}", learned[f"{name[:3]} plain"] - percent, POINTS, "points")
                for name, percent in learned.items()
                if "plain" not in name
            ),
        ]
    )


if __name__ == "__main__":
    main()
