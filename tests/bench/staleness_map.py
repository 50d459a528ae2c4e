"""The map of the staleness atlas: the error at the end over the rate and the number of workers.

    python -m tests.bench.staleness_map [--jobs 2]

Asynchronous workers whose steps take equal times push gradients that are exactly W - 1 updates old.
Along a direction of curvature h, SGD whose gradients are `delay` updates old is stable while
rate * h < 2 sin(pi / (4 delay + 2)): up to there all roots of z^(delay + 1) = z^delay - rate * h
are in the unit circle. The left panel is a quadratic problem with curvatures of up to 1, the right
one a net on MNIST, where one constant takes the curvature's place. Writes
docs/images/atlas.png, and the trials to docs/measurements/reports/atlas.csv.
"""

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.colors import LogNorm

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.trials import Trial, TrialResult, run_trials
from tests.bench.pictures import save_small

mpl.use("agg")

from matplotlib import pyplot as plt

WORKERS = (1, 2, 3, 5, 9, 17, 33)
QUAD_RATES = tuple(2.0 ** (power / 2) for power in range(-11, 4))
MLP_RATES = tuple(2.0 ** (power / 2) for power in range(-17, 1))
_SEEDS = (1, 2, 3)
_GRADIENTS = 4000
_NOTHING_LEARNT = 50.0  # percent of wrong digits: a run that ends above it counts as failed
_DOCS = Path(__file__).parents[2] / "docs"
_PICTURE = _DOCS / "images" / "atlas.png"
_TABLE = _DOCS / "measurements" / "reports" / "atlas.csv"


class Cell(NamedTuple):
    """The error at the end of one trial, in percent; 100 for a trial that diverged."""

    workload: str
    workers: int
    rate: float
    seed: int
    error: float


def find_border(delay: int) -> float:
    """The product of rate and curvature up to which SGD is stable under a delay in updates."""
    return 2 * math.sin(math.pi / (4 * delay + 2))


def measure_cells(
    workload: str,
    workers: Iterable[int],
    rates: Sequence[float],
    seeds: Sequence[int] = (1,),
    jobs: int = 1,
) -> list[Cell]:
    """Train one trial for each number of workers, rate and seed."""
    trials = [
        Trial(
            workload=workload,
            strategy="asp:scale=1",
            rate=rate,
            seed=seed,
            gradients=_GRADIENTS,
            cluster=ClusterModel(workers=count, times=StepTimes(law=Law.FIXED)),
        )
        for count in workers
        for rate in rates
        for seed in seeds
    ]
    return [_describe(result) for result in run_trials(trials, jobs)]


def _describe(result: TrialResult) -> Cell:
    trial, error = result.trial, result.curve[-1].error
    if result.diverged_at is not None or not error < 100:
        error = 100.0
    return Cell(trial.workload, trial.cluster.workers, trial.rate, trial.seed, error)


def find_largest_rate(cells: Iterable[Cell], workers: int, error: float) -> float:
    """The largest rate up to which the median error of the seeds is at most `error` percent."""
    largest = 0.0
    of_count = [cell for cell in cells if cell.workers == workers]
    for rate in sorted({cell.rate for cell in of_count}):
        if np.median([cell.error for cell in of_count if cell.rate == rate]) > error:
            break
        largest = rate
    return largest


def draw(panels: dict[str, list[Cell]], path: Path) -> None:
    """Draw the median error of the seeds, a panel a workload, with the border."""
    figure, axes = plt.subplots(1, len(panels), figsize=(9.2, 3.7), squeeze=False)
    for axis, (title, cells) in zip(axes[0], panels.items(), strict=True):
        counts = sorted({cell.workers for cell in cells})
        rates = sorted({cell.rate for cell in cells})
        errors = [
            [
                np.median([c.error for c in cells if (c.workers, c.rate) == (count, rate)])
                for count in counts
            ]
            for rate in rates
        ]
        steps = np.arange(len(counts) + 1) - 0.5
        edges = np.sqrt(2) ** (2 * np.log2([*rates, rates[-1] * np.sqrt(2)]) - 0.5)
        low = max(0.1, float(np.min(errors)))
        shade = axis.pcolormesh(
            steps, edges, np.maximum(errors, low), norm=LogNorm(low, 100), cmap="viridis_r"
        )
        figure.colorbar(shade, ax=axis, label="error at the end, %").ax.tick_params(labelsize=7)
        steepest = _fit_curvature(cells)
        border = [find_border(count - 1) / steepest for count in counts]
        name = f"2 sin(pi / (4 delay + 2)) / {steepest:.3g}"
        axis.plot(range(len(counts)), border, "o-", color="#c2410c", ms=3, lw=1.4, label=name)
        axis.set_yscale("log", base=2)
        axis.set_ylim(edges[0], edges[-1])
        axis.set_xticks(range(len(counts)), [str(count) for count in counts])
        axis.set_xlabel("workers (delay + 1)", fontsize=8)
        axis.set_ylabel("rate", fontsize=8)
        axis.set_title(title, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.legend(frameon=False, fontsize=7, loc="lower left")
    figure.tight_layout()
    save_small(figure, path)


def _fit_curvature(cells: Sequence[Cell]) -> float:
    """The curvature that puts the border at the largest rate that bears no delay; 1 for `quad`."""
    if cells[0].workload == "quad":
        return 1.0
    return find_border(0) / find_largest_rate(cells, 1, _NOTHING_LEARNT)


def write_cells(cells: Iterable[Cell], path: Path) -> None:
    """Write a row a trial."""
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(Cell._fields)
        table.writerows(
            (*cell[:2], f"{cell.rate:.6g}", cell.seed, f"{cell.error:.4g}") for cell in cells
        )


def main() -> None:
    """Measure all cells, draw them, and print the largest rate of each number of workers."""
    options = argparse.ArgumentParser(description="The map of the staleness atlas.")
    options.add_argument("--jobs", type=int, default=1, help="processes")
    jobs: int = options.parse_args().jobs
    quad = measure_cells("quad", WORKERS, QUAD_RATES, jobs=jobs)
    mlp = measure_cells("mlp", WORKERS, MLP_RATES, _SEEDS, jobs)
    write_cells([*quad, *mlp], _TABLE)
    draw({"quadratic problem, curvature at most 1": quad, "net on MNIST": mlp}, _PICTURE)
    print("workers  quad: largest rate, border  net: largest rate, border")
    for count in WORKERS:
        border = find_border(count - 1)
        figures = (
            find_largest_rate(quad, count, 100 - 1e-9),
            border,
            find_largest_rate(mlp, count, _NOTHING_LEARNT),
            border / _fit_curvature(mlp),
        )
        print(f"{count:7}  " + "  ".join(f"{figure:.4f}" for figure in figures))


if __name__ == "__main__":
    main()
