"""The figures of a job as its runner writes them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.run.progress_model import LinkReading, Readings, ShardReading, WorkerReading
from deploy.runner.readings import FigureTally, ReadingFiles


def write_figures(job: Path, **figures: Any) -> None:
    """Write a reading of a job that has taken 5 of 9 steps, with these figures of `Readings`."""
    plain: dict[str, Any] = {
        "elapsed_s": 1.0, "steps": 5, "planned": 9, "remaining_s": None, "samples_per_s": None,
        "loss": None, "rate": 0.1, "epoch": None, "staleness_mean": None, "staleness_max": None,
        "bound": 4, "absent": 0, "workers": (), "shards": (),
    }  # fmt: skip
    readings = Readings(**plain | figures)
    point = FigureTally().reading(1, 1.0, readings, 5, None)
    ReadingFiles(job / "readings").write(point)


def training_figures(
    steps: int,
    planned: int,
    *,
    elapsed_s: float,
    loss: float,
    clocks: Sequence[int],
    links: tuple[LinkReading, ...] = (),
) -> Readings:
    """The figures of a job with one shard and a worker at each of these clocks."""
    workers = tuple(
        WorkerReading(
            name=f"w{number}", clock=clock, step=clock, standing="runs", waits=False, loss=1.0,
            restarts=0,
        )
        for number, clock in enumerate(clocks)
    )  # fmt: skip
    shard = ShardReading(
        shard=0, version=steps, updates_per_s=9.0, bytes_in_per_s=1e6, bytes_out_per_s=1e6,
        max_clock_gap=3,
    )  # fmt: skip
    return Readings(
        elapsed_s=elapsed_s, steps=steps, planned=planned, remaining_s=9.0, samples_per_s=80.0,
        loss=loss, rate=0.1, epoch=1.0, staleness_mean=1.0, staleness_max=3, bound=4, absent=0,
        workers=workers, shards=(shard,), links=links,
    )  # fmt: skip
