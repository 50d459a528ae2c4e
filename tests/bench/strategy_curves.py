"""How each strategy learns MNIST when workers differ in speed: a picture and a table.

    python -m tests.bench.strategy_curves [--gradients 4000] [--only NAME ...]

Eight workers and two shards take turns without a network, a clock or threads
(tests/support/pure_cluster.py), in an order that a seed draws, so a run is repeatable to the bit.
Each strategy trains the same small network on the same batches at the same rate, twice: with
workers that take turns evenly, and with workers of which the slowest takes one turn where the
fastest takes sixteen. Writes docs/images/strategies.png, and prints the rows of the table in
docs/measurements/strategies.md.
"""

import argparse
from collections.abc import Sequence
from itertools import cycle
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from numpy.typing import NDArray
from PIL import Image
from threadpoolctl import threadpool_limits

from ps import DenseTable, TensorSpec
from tests.support.pure_cluster import PureCluster
from worker.data.idx import open_idx
from worker.data.read_options import ReadOptions
from worker.strategies import STRATEGIES, strategy_of

mpl.use("agg")

from matplotlib import pyplot as plt

Floats = NDArray[np.float32]

WORKERS, SHARDS, BATCH, RATE, SEED = 8, 2, 32, 0.2, 1
HIDDEN, TESTED, LOOKS = 32, 1000, 40
TURNS_OF = (16, 16, 8, 8, 4, 4, 2, 1)  # of each worker, where they differ in speed
_DRAWN = 50_000  # turns until the order repeats
_COLUMNS = 4
_TICKS = (0.2, 0.3, 0.5, 1, 2)

OPTIONS = {
    "softsync": "softsync:n=2",
    "dynsgd": "dynsgd:window=5",
    "adag": "adag:window=5",
    "easgd": "easgd:tau=5",
    "eamsgd": "eamsgd:tau=5,momentum=0.9",
    "sparknet": "sparknet:tau=5,momentum=0.5",
    "local_sgd": "local_sgd:h=5",
    "diloco": "diloco:h=20,inner_lr=0.002",
    "async_diloco": "async_diloco:h=20,inner_lr=0.002,momentum=0.5",
    "mla": "mla:h=20,inner_lr=0.002",
    "heloco": "heloco:h=20,inner_lr=0.002",
    "streaming_diloco": "streaming_diloco:h=20,inner_lr=0.002",
    "decoupled_diloco": "decoupled_diloco:h=20,inner_lr=0.002",
    "fedbuff": "fedbuff:k=4,window=5",
}
"""Each strategy's options: windows short enough for a run of some hundred steps a worker."""

BOUNDS = {"ssp": 4}
"""The staleness bound where a strategy needs one; the others have none, or are synchronous."""

IMAGES = DenseTable(
    "net",
    (
        TensorSpec("hidden", (784, HIDDEN)),
        TensorSpec("hidden.bias", (HIDDEN,)),
        TensorSpec("scores", (HIDDEN, 10)),
        TensorSpec("scores.bias", (10,)),
    ),
)
_DATA = Path(__file__).parents[2] / "deploy" / "demo" / "mnist"
_PICTURE = Path(__file__).parents[2] / "docs" / "images" / "strategies.png"


class Look(NamedTuple):
    """A test of the shards' weights after `gradients` of all workers together."""

    gradients: int
    loss: float
    accuracy: float


class Course(NamedTuple):
    """One run: its tests, and the staleness of the updates."""

    looks: list[Look]
    updates: int
    staleness: float
    most: int


class Mnist:
    """A network with one hidden layer, and the images."""

    def __init__(self) -> None:
        self.images, self.labels = _split("train")
        tested, labels = _split("test")
        self.tested, self.right = tested[:TESTED], labels[:TESTED]

    def start(self) -> Floats:
        """Initial weights, the same for every run."""
        arena, dice = IMAGES.empty(), np.random.default_rng(SEED)
        views = IMAGES.views(arena)
        for name, inputs in (("hidden", 784), ("scores", HIDDEN)):
            drawn = dice.standard_normal(views[name].shape, np.float32)
            views[name][:] = drawn * np.float32(inputs**-0.5)
        return arena

    def gradient(self, worker: int, step: int, weights: Floats) -> Floats:
        """The gradient of the batch that this worker has at this step."""
        rows = np.random.default_rng((SEED, worker, step)).integers(len(self.labels), size=BATCH)
        x, right = self.images[rows], self.labels[rows]
        views, out = IMAGES.views(weights), IMAGES.empty()
        hidden, slope = self._forward(views, x)
        slope[np.arange(BATCH), right] -= 1
        slope /= np.float32(BATCH)
        grad = IMAGES.views(out)
        grad["scores"][:] = hidden.T @ slope
        grad["scores.bias"][:] = slope.sum(0)
        back = (slope @ views["scores"].T) * (hidden > 0)
        grad["hidden"][:] = x.T @ back
        grad["hidden.bias"][:] = back.sum(0)
        return out

    def look(self, gradients: int, weights: Floats) -> Look:
        """Test the weights."""
        _, shares = self._forward(IMAGES.views(weights), self.tested)
        hit = shares[np.arange(TESTED), self.right]
        loss = -np.log(np.maximum(hit.astype(np.float64), 1e-30)).mean()
        return Look(gradients, float(loss), float((shares.argmax(1) == self.right).mean()))

    def _forward(self, views: dict[str, Floats], x: Floats) -> tuple[Floats, Floats]:
        hidden = np.maximum(x @ views["hidden"] + views["hidden.bias"], 0)
        scores = hidden @ views["scores"] + views["scores.bias"]
        powers = np.exp(scores - scores.max(1, keepdims=True))
        return hidden, powers / powers.sum(1, keepdims=True)


def course(data: Mnist, text: str, gradients: int, turns_of: Sequence[int]) -> Course:
    """Train by the strategy in a text until this number of gradients has been taken."""
    taken = 0

    def gradient(worker: int, step: int, weights: Floats) -> Floats:
        nonlocal taken
        taken += 1
        return data.gradient(worker, step, weights)

    cluster = PureCluster(
        strategy_of("strategy", text),
        workers=WORKERS,
        steps=gradients,
        shards=SHARDS,
        bound=BOUNDS.get(text),
        rate=RATE,
        decay=0.0,
        gradient=gradient,
        table=IMAGES,
        begin=data.start(),
    )
    shares = np.array(turns_of) / sum(turns_of)
    order = np.random.default_rng(SEED).choice(WORKERS, _DRAWN, p=shares).tolist()
    looks, turns = [data.look(0, cluster.weights())], cycle(order)
    while taken < gradients:
        cluster.workers[next(turns)].turn()
        if taken >= len(looks) * gradients // LOOKS:
            looks.append(data.look(taken, cluster.weights()))
    rows = cluster.records()
    return Course(looks, len(rows), float(rows["staleness"].mean()), int(rows["staleness"].max()))


def draw(courses: dict[str, tuple[Course, Course]], out: Path) -> None:
    """A panel for each strategy: loss over gradients, with even and with uneven workers."""
    rows = ceil(len(courses) / _COLUMNS)
    size = 3 * _COLUMNS, 2.5 * rows
    figure, axes = plt.subplots(
        rows, _COLUMNS, figsize=size, sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(courses) :]:
        axis.set_visible(False)
    even_of = {text.partition(":")[0]: even for text, (even, _) in courses.items()}
    baseline = even_of.get("bsp")
    for axis, (text, (even, uneven)) in zip(axes.flat, courses.items(), strict=False):
        if baseline is not None:
            _curve(axis, baseline, "#c9d1da", "bsp", 3.0)
        _curve(axis, even, "#2a6fbb", "even workers", 1.2)
        _curve(axis, uneven, "#c2410c", "speeds from 1 to 16", 1.2)
        name, _, options = text.partition(":")
        axis.set_title(f"{name}\n{options}" if options else name, fontsize=9)
        axis.text(
            *(0.97, 0.93, f"accuracy {uneven.looks[-1].accuracy:.1%}"),
            transform=axis.transAxes,
            ha="right",
            va="top",
            fontsize=8,
        )
        axis.set_yscale("log")
        axis.set_ylim(0.15, 4)
        axis.set_yticks(_TICKS, [f"{tick:g}" for tick in _TICKS])
        axis.minorticks_off()
        axis.grid(color="#e4e7eb", linewidth=0.7)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
    for axis in axes.flat[max(0, len(courses) - _COLUMNS) : len(courses)]:
        axis.xaxis.set_tick_params(labelbottom=True)
        axis.set_xlabel("gradients of all workers", fontsize=8)
    for axis in axes[:, 0]:
        axis.set_ylabel("test loss", fontsize=8)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=3, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0, 1, 0.97))
    figure.savefig(out, dpi=100)
    with Image.open(out) as drawn:  # few colours: a third of the size
        drawn.convert("RGB").quantize(128, dither=Image.Dither.NONE).save(out, optimize=True)
    plt.close(figure)


def _curve(axis: Any, found: Course, colour: str, label: str, width: float) -> None:
    gradients = [look.gradients for look in found.looks]
    axis.plot(gradients, [look.loss for look in found.looks], colour, label=label, lw=width)


def row(text: str, even: Course, uneven: Course) -> str:
    """A row of the table."""
    first, last = even.looks[-1], uneven.looks[-1]
    return (
        f"| `{text}` | {uneven.updates} | {uneven.staleness:.1f}, {uneven.most}"
        f" | {first.loss:.3f}, {first.accuracy:.1%} | {last.loss:.3f}, {last.accuracy:.1%} |"
    )


def main() -> None:
    """Train by every strategy, draw the picture and print the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gradients", type=int, default=4000)
    parser.add_argument("--only", nargs="*", default=list(STRATEGIES), help="names, or texts")
    parser.add_argument("--picture", type=Path, default=_PICTURE)
    given = parser.parse_args()
    data, courses = Mnist(), dict[str, tuple[Course, Course]]()
    with threadpool_limits(1):
        for name in given.only:
            text = OPTIONS.get(name, name)
            even = course(data, text, given.gradients, [1] * WORKERS)
            uneven = course(data, text, given.gradients, TURNS_OF)
            courses[text] = even, uneven
            print(row(text, even, uneven), flush=True)
    draw(courses, given.picture)


def _split(split: str) -> tuple[Floats, NDArray[np.int64]]:
    found = open_idx(_DATA, ReadOptions(split=split, classes=10))  # type: ignore[arg-type]  # one of two
    pixels = found.images.reshape(len(found.labels), -1).astype(np.float32) / np.float32(255)
    return pixels, found.labels.astype(np.int64)


if __name__ == "__main__":
    main()
