"""LeNet on MNIST at 100 ms and 100 Mbit/s against no link at all: samples a second, and accuracy.

Two workers are processes of this machine, each behind a link of its own
(ps/transport/link_emulator.py); the shard is in this one. For every bound the run without a link
and the one behind it follow each other, so that a busy neighbour slows them alike. Prefetch is on
wherever the bound allows it. A run whose weights grow beyond all bounds, as too stale gradients can
make them, is shown as nan.

A step of LeNet computes for less time than its 1.7 MB occupy such a link. `longer` has steps of
several batches, which compute for longer than that, as larger networks do: a worker that the link
can keep up with.

The rule is Adagrad, as Downpour's authors had it. Staleness acts as momentum does (Mitliagkas et
al. 2016): with the demo's 0.9 on top of that of such a link, every bound but 0 diverges, and so
does plain SGD at 0.05.

    python tests/bench/bench_latency_training.py [--steps 100] [--link rtt=100ms,rate=100Mbit]
        [--picture docs/images/slow-link.png]
"""

import argparse
import math
import multiprocessing
import tempfile
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path

import msgspec

from ps.transport.transports import Transport
from shards.errors import DownpourError
from shards.rules import Adagrad
from shards.schedules import Fixed
from tests.bench.report import Goal, goals, save
from tests.support import lenet_job
from worker.job.training_job import Job

_WORKERS = 2
_LOSS = 0.05
_RATE = 0.01
_PATIENCE_S = 60.0
NEAR, FAR = "no link", "behind the link"


class Variant(msgspec.Struct, frozen=True):
    """One kind of run: its name, bound, batches a step, steps for every one of --steps."""

    name: str
    bound: int | None
    batches: int = 1
    share: float = 1.0


class Outcome(msgspec.Struct, frozen=True):
    """What one run came to; a step's seconds of computing, and of waiting for the network."""

    samples_per_s: float
    accuracy: float
    compute_s: float
    network_s: float


VARIANTS = (
    Variant("bound 0", 0),
    Variant("bound 4", 4),
    Variant("bound 16", 16),
    Variant("no bound", None),
    Variant("longer, bound 16", 16, batches=8, share=0.4),
)


def job(variant: Variant, steps: int, link: str) -> Job:
    """LeNet's job as the demo has it, but for the variant, the rule and the link."""
    told = lenet_job.lenet_job(
        steps=max(4, round(steps * variant.share)),
        workers=_WORKERS,
        shards=1,
        bound=variant.bound,
        prefetch=variant.bound != 0,
        transport=Transport.TCP,
        lease_s=_PATIENCE_S,
        link=link or None,
    )
    plan = msgspec.structs.replace(told.plan, iter_size=variant.batches)
    return msgspec.structs.replace(told, plan=plan, rule=Adagrad(), schedule=Fixed(base_rate=_RATE))


def train(pool: Executor, variant: Variant, steps: int, link: str) -> Outcome:
    """One run from fresh shards to tested weights."""
    told = job(variant, steps, link)
    with tempfile.TemporaryDirectory() as folder:
        lenet_job.write_rows(Path(folder))
        try:
            training = lenet_job.train_in(pool, Path(folder), told, patience_s=_PATIENCE_S)
        except DownpourError as error:
            print(f"{variant.name}: {error}")
            return Outcome(math.nan, math.nan, math.nan, math.nan)
    reports = training.reports
    return Outcome(
        samples_per_s=sum(one.samples for one in reports) / max(one.seconds for one in reports),
        accuracy=lenet_job.examine(training.weights)["accuracy"],
        compute_s=sum(one.compute_s for one in reports) / sum(one.steps for one in reports),
        network_s=sum(one.network_s for one in reports) / sum(one.steps for one in reports),
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--link", default="rtt=100ms,rate=100Mbit")
    options.add_argument("--picture", type=Path)
    given = options.parse_args()
    found: dict[str, dict[str, Outcome]] = {}
    print(f"{'':22}{'':16}{'samples/s':>10}{'accuracy':>10}{'compute ms':>11}{'network ms':>11}")
    with ProcessPoolExecutor(_WORKERS, multiprocessing.get_context("spawn")) as pool:
        train(pool, VARIANTS[1], 2, "")  # what is loaded and compiled first
        for variant in VARIANTS:
            found[variant.name] = {}
            for name, link in ((NEAR, ""), (FAR, given.link)):
                found[variant.name][name] = one = train(pool, variant, given.steps, link)
                print(
                    f"{variant.name:22}{name:16}{one.samples_per_s:10.0f}{one.accuracy:10.2%}"
                    f"{one.compute_s * 1e3:11.1f}{one.network_s * 1e3:11.1f}",
                    flush=True,
                )
    finish(found, given.link, given.picture)


def finish(found: dict[str, dict[str, Outcome]], link: str, picture: Path | None) -> None:
    """Write the figures down, draw them, and judge them."""
    print(save("latency_training", {"link": link, "runs": msgspec.to_builtins(found)}))
    if picture is not None:
        draw(found, link, picture)
    longer = found["longer, bound 16"]
    lost = 1 - longer[FAR].samples_per_s / longer[NEAR].samples_per_s
    asked = longer[FAR].network_s / (longer[FAR].compute_s + longer[FAR].network_s)
    bounded = found["bound 4"]
    goals(
        [
            Goal("computing longer than the transfer: rate lost", lost, _LOSS),
            Goal("the same, as time spent waiting for the network", asked, _LOSS),
            Goal("bound 4: accuracy lost", bounded[NEAR].accuracy - bounded[FAR].accuracy, 0.01),
        ]
    )


def draw(found: dict[str, dict[str, Outcome]], link: str, out: Path) -> None:
    """Two panels of bars, one pair a variant: samples a second, and test accuracy."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.6), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    names = list(found)
    for axes, field, scale in ((left, "samples_per_s", 1.0), (right, "accuracy", 100.0)):
        for offset, run, colour in ((-0.2, NEAR, "#9aa5b1"), (0.2, FAR, "#2a6fbb")):
            values = [scale * getattr(found[name][run], field) for name in names]
            bars = axes.bar([at + offset for at in range(len(names))], values, 0.38, color=colour)
            axes.bar_label(bars, fmt="%.0f" if scale == 1 else "%.1f", fontsize=8, padding=2)
            bars.set_label(run)
        axes.set_xticks(range(len(names)), [name.replace(", ", "\n") for name in names], fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#e4e7eb", linewidth=0.8)
        axes.set_axisbelow(True)
    left.set_ylabel("samples a second, two workers")
    right.set_ylabel("test accuracy, %")
    right.set_ylim(bottom=max(0.0, right.dataLim.y0 - 10) if right.dataLim.y0 > 10 else 0.0)
    left.legend(frameon=False, fontsize=9)
    figure.suptitle(f"LeNet behind {link}", fontsize=14, fontweight="bold", color="#1f2933")
    figure.savefig(out, dpi=110)


if __name__ == "__main__":
    main()
