"""The figures of a job as its runner writes them."""

from pathlib import Path
from typing import Any

from deploy.progress_model import Readings
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
