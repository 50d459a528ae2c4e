"""Experiments: the folders that `downpour exp` has written, and the report of each.

The experiments' own code is large. A report is written by `downpour exp report` in a process of its
own, when it is asked for and results are newer than it.
"""

from pathlib import Path

import msgspec

from deploy.service.subprocesses import output_of

REPORT = "report.html"


class Experiment(msgspec.Struct, frozen=True):
    """A folder of a sweep or of shapes: trials that are done and failed, and the newest result."""

    name: str
    sweep: bool
    shapes: int
    done: int
    failed: int
    modified: float


def experiments(folder: Path) -> list[Experiment]:
    """The experiments below a folder, by name."""
    if not folder.is_dir():
        return []
    experiments_below = []
    for path in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        results = _results(path)
        if results or (path / "sweep.toml").is_file():
            experiments_below.append(
                Experiment(
                    path.name,
                    sweep=(path / "sweep.toml").is_file(),
                    shapes=sum(result.parent == path for result in results),
                    done=sum(result.parent.name == "trials" for result in results),
                    failed=len(list(path.glob("failed/*.txt"))),
                    modified=max((result.stat().st_mtime for result in results), default=0.0),
                )
            )
    return experiments_below


def report(folder: Path, name: str) -> bytes:
    """The page of an experiment's report; raises KeyError for an unknown one.

    A report that cannot be written is the error of `output_of`.
    """
    known = {experiment.name: experiment for experiment in experiments(folder)}
    experiment, path = known[name], folder / name / REPORT
    if not path.is_file() or path.stat().st_mtime < experiment.modified:
        output_of("exp", "report", str(folder / name))
    return path.read_bytes()


def _results(path: Path) -> list[Path]:
    names = ("trials/*.parquet", "imported/*.parquet", "shape-*.msgpack")
    return [path_of_result for name in names for path_of_result in path.glob(name)]
