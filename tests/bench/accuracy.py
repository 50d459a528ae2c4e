"""What four asynchronous workers learn, against a plain loop in one process: PyTorch, JAX, NumPy.

    make experiment E=accuracy DATA=folder       every task; or some: TASKS="mnist_mlp adult_mlp"

Each task trains a model twice from the same first values, with the same rate, batch size and number
of epochs: by SGD in one process, and by `worker.run` from a DataFrame with four Spark workers, two
shards and the asynchronous strategy `downpour:scale=1`, at a staleness bound of 4. Both are tested
on rows that neither has trained on. The goal is that the second loses at most half a point.

mnist_numpy, adult_numpy   logistic regression, its gradient by hand
mnist_mlp, adult_mlp       PyTorch: one hidden layer
mnist_cnn                  PyTorch: two convolutions and a hidden layer
mnist_jax, adult_jax       JAX: one hidden layer
"""

import argparse
import gzip
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

import deploy
import ps
import worker
from tests.bench.report import Goal, goals
from worker.spark import start_session

MOST_LOST = 0.5  # points
WORKERS, SHARDS, BOUND = 4, 2, 4
BATCH, HIDDEN = 64, 64
Floats = NDArray[np.float32]


class Rows(NamedTuple):
    """Features (n, d) and classes (n,)."""

    x: Floats
    label: NDArray[np.int64]

    def some(self, chosen: Any) -> "Rows":
        return Rows(self.x[chosen], self.label[chosen])


class Task(NamedTuple):
    """A model of a library on a data set, with the settings of its training."""

    data: str
    kind: str
    epochs: int
    rate: float


TASKS = {
    "mnist_numpy": Task("mnist", "numpy", 5, 0.1),
    "mnist_mlp": Task("mnist", "mlp", 5, 0.1),
    "mnist_cnn": Task("mnist", "cnn", 2, 0.05),
    "mnist_jax": Task("mnist", "jax", 5, 0.1),
    "adult_numpy": Task("adult", "numpy", 5, 0.05),
    "adult_mlp": Task("adult", "mlp", 5, 0.05),
    "adult_jax": Task("adult", "jax", 5, 0.05),
}


def mnist(folder: Path, train: bool) -> Rows:
    """The digits, as numbers from 0 to 1."""
    prefix = "train" if train else "t10k"
    with gzip.open(folder / f"{prefix}-images-idx3-ubyte.gz") as file:
        pixels = np.frombuffer(file.read(), np.uint8, offset=16)
    with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return Rows(np.divide(pixels.reshape(-1, 784), 255, dtype=np.float32), labels.astype(np.int64))


def adult(path: Path) -> tuple[Rows, Rows]:
    """Numbers with mean 0 and deviation 1, categories as one column each; a fifth is for tests."""
    table = pq.read_table(path)
    *names, label = table.column_names
    columns = []
    for name in names:
        values = table[name].to_numpy()
        if pa.types.is_integer(table.schema.field(name).type):
            columns.append(((values - values.mean()) / values.std())[:, None])
        else:
            columns.append(values[:, None] == np.unique(values))
    x = np.concatenate(columns, axis=1).astype(np.float32)
    _, classes = np.unique(table[label].to_numpy(), return_inverse=True)
    order = np.random.default_rng(0).permutation(len(x))
    rows = Rows(x[order], classes[order].astype(np.int64))
    cut = len(x) * 4 // 5
    return rows.some(slice(cut)), rows.some(slice(cut, None))


class Net(NamedTuple):
    """A model as plain functions over a dict of arrays."""

    first: dict[str, Floats]
    gradient: Callable[[Any, Any], tuple[float, Any]]
    scores: Callable[[Any, Floats], NDArray[Any]]
    adapter: Callable[[Any, Any, Any], None]


def layers(sizes: list[int], seed: int) -> dict[str, Floats]:
    """First values of fully connected layers."""
    dice, found = np.random.default_rng(seed), {}
    for number, (before, after) in enumerate(pairwise(sizes)):
        weights = dice.standard_normal((before, after)) / np.sqrt(before)
        found[f"w{number}"] = weights.astype(np.float32)
        found[f"b{number}"] = np.zeros(after, np.float32)
    return found


def numpy_net(size: int, classes: int, seed: int) -> Net:
    """Logistic regression; `ctx.loop` trains it."""

    def scores(params: Any, x: Floats) -> Any:
        return x @ params["w0"] + params["b0"]

    def gradient(params: Any, batch: Any) -> tuple[float, Any]:
        raised = scores(params, batch["x"])
        raised = np.exp(raised - raised.max(1, keepdims=True))
        error = raised / raised.sum(1, keepdims=True)
        own = np.arange(len(error)), batch["label"]
        loss = float(-np.log(np.maximum(error[own], 1e-30)).mean())
        error[own] -= 1
        error /= np.float32(len(error))
        return loss, {"w0": batch["x"].T @ error, "b0": error.sum(0)}

    def adapter(net: Any, task: Task, ctx: worker.Context) -> None:
        ctx.loop(net.gradient, BATCH, epochs=task.epochs)

    return Net(layers([size, classes], seed), gradient, scores, adapter)


def jax_net(size: int, classes: int, seed: int) -> Net:
    """One hidden layer in JAX; `worker.jax` trains it."""
    import jax

    def scores(params: Any, x: Any) -> Any:
        hidden = jax.nn.relu(x @ params["w0"] + params["b0"])
        return hidden @ params["w1"] + params["b1"]

    def loss(params: Any, x: Any, label: Any) -> Any:
        found = jax.nn.log_softmax(scores(params, x))
        return -jax.numpy.take_along_axis(found, label[:, None], 1).mean()

    step = jax.jit(jax.value_and_grad(loss))

    def gradient(params: Any, batch: Any) -> tuple[float, Any]:
        value, grads = step(params, batch["x"], batch["label"])
        return float(value), {name: np.asarray(each) for name, each in grads.items()}

    def adapter(net: Any, task: Task, ctx: worker.Context) -> None:
        steps = worker.jax.wrap(net.first, None, ctx)
        for batch in ctx.batches(BATCH, epochs=task.epochs):
            value, grads = step(steps.params, batch["x"], batch["label"])
            steps.step(grads, loss=value)

    return Net(layers([size, HIDDEN, classes], seed), gradient, scores, adapter)


def torch_net(size: int, classes: int, seed: int, *, images: bool) -> Net:
    """A module of PyTorch, of fully connected layers or for images; `worker.torch` trains it."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    if images:
        small = [nn.Conv2d(1, 8, 5), nn.ReLU(), nn.MaxPool2d(2)]
        small += [nn.Conv2d(8, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
        small += [nn.Linear(256, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes)]
        module = nn.Sequential(nn.Unflatten(1, (1, 28, 28)), *small)
    else:
        module = nn.Sequential(nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, classes))

    def loss_of(batch: Any) -> Any:
        output = module(torch.from_numpy(np.array(batch["x"])))
        return nn.functional.cross_entropy(output, torch.from_numpy(np.array(batch["label"])))

    def gradient(params: Any, batch: Any) -> tuple[float, Any]:
        worker.torch.load(module, params)
        module.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        return float(loss), {name: one.grad.numpy() for name, one in module.named_parameters()}

    def scores(params: Any, x: Floats) -> Any:
        worker.torch.load(module, params)
        with torch.inference_mode():
            return module(torch.from_numpy(x)).numpy()

    def adapter(net: Any, task: Task, ctx: worker.Context) -> None:
        steps = worker.torch.wrap(module, None, ctx)
        for batch in ctx.batches(BATCH, epochs=task.epochs):
            loss = loss_of(batch)
            loss.backward()
            steps.step(loss=loss)
            steps.zero_grad()

    first = {name: one.detach().numpy().copy() for name, one in module.named_parameters()}
    return Net(first, gradient, scores, adapter)


NETS: dict[str, Callable[[int, int, int], Net]] = {
    "numpy": numpy_net,
    "jax": jax_net,
    "mlp": partial(torch_net, images=False),
    "cnn": partial(torch_net, images=True),
}


def batches(rows: Rows, epochs: int, seed: int) -> Iterator[dict[str, Any]]:
    """The batches of one process: each epoch has every row once, in another order."""
    dice = np.random.default_rng(seed)
    for _ in range(epochs):
        order = dice.permutation(len(rows.x))
        for first in range(0, len(order), BATCH):
            part = rows.some(order[first : first + BATCH])
            yield {"x": part.x, "label": part.label}


def in_one_process(net: Net, task: Task, rows: Rows, seed: int) -> Any:
    """The parameters after plain SGD."""
    params = {name: one.copy() for name, one in net.first.items()}
    for batch in batches(rows, task.epochs, seed):
        _, grads = net.gradient(params, batch)
        for name, one in params.items():
            one -= np.float32(task.rate) * grads[name]
    return params


def train(args: tuple[Task, int, int, int], ctx: worker.Context) -> None:
    """What each of the workers runs."""
    task, size, classes, seed = args
    net = NETS[task.kind](size, classes, seed)
    net.adapter(net, task, ctx)


def by_workers(task: Task, net: Net, rows: Rows, df: Any, classes: int, seed: int) -> Any:
    """The result of asynchronous training."""
    given = task, rows.x.shape[1], classes, seed
    return worker.run(
        df,
        train,
        given,
        params=ps.Dense.like(net.first, rate=task.rate),
        workers=WORKERS,
        shards=SHARDS,
        shards_in="processes",
        strategy="downpour:scale=1",
        staleness=BOUND,
        seed=seed,
    )


def accuracy(net: Net, params: Any, rows: Rows) -> float:
    """The share of rows whose class has the highest score, in per cent."""
    parts = [net.scores(params, rows.x[n : n + 1000]) for n in range(0, len(rows.x), 1000)]
    return 100 * float((np.concatenate(parts).argmax(1) == rows.label).mean())


def read(options: argparse.Namespace, data: str) -> tuple[Rows, Rows]:
    """Rows to train on and rows to test on."""
    if data == "adult":
        train_rows, test_rows = adult(options.data / "tabular" / "adult.parquet")
    else:
        train_rows, test_rows = (mnist(options.data / "mnist", train) for train in (True, False))
    return train_rows.some(slice(options.rows)), test_rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), metavar="TASK")
    parser.add_argument("--data", type=Path, required=True, help="a folder with mnist and tabular")
    parser.add_argument("--rows", type=int, default=None, help="train on the first rows only")
    parser.add_argument("--epochs", type=int, help="for each task, in place of its own number")
    parser.add_argument("--seeds", type=int, default=1)
    options = parser.parse_args()
    found = []
    environment = dict(deploy.spark_environment())
    with (
        start_session(None, WORKERS, app="accuracy", env=environment) as session,
        threadpool_limits(1),
    ):
        for name in options.tasks:
            task = TASKS[name]
            task = task._replace(epochs=options.epochs or task.epochs)
            rows, tests = read(options, task.data)
            values = pa.array(rows.x.ravel())
            column = pa.FixedSizeListArray.from_arrays(values, rows.x.shape[1])
            column = column.cast(pa.list_(pa.float32()))
            df = session.createDataFrame(pa.table({"x": column, "label": rows.label})).cache()
            classes = int(rows.label.max()) + 1
            for seed in range(1, options.seeds + 1):
                net = NETS[task.kind](rows.x.shape[1], classes, seed)
                began = time.monotonic()
                alone = accuracy(net, in_one_process(net, task, rows, seed), tests)
                between = time.monotonic()
                trained = by_workers(task, net, rows, df, classes, seed)
                ended = time.monotonic()
                together = accuracy(net, trained.params, tests)
                print(
                    f"| {name} | {len(rows.x)} | {task.epochs} | {seed} | {alone:.2f} |"
                    f" {together:.2f} | {together - alone:+.2f} | {between - began:.0f} s |"
                    f" {ended - between:.0f} s |",
                    flush=True,
                )
                goal = f"{name}, seed {seed}: points lost by four asynchronous workers"
                found.append(Goal(goal, alone - together, MOST_LOST))
            df.unpersist()
    goals(found)
    sys.exit(not all(goal.met for goal in found))


if __name__ == "__main__":
    main()
