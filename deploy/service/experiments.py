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
    found = []
    for path in sorted(each for each in folder.iterdir() if each.is_dir()):
        results = _results(path)
        if results or (path / "sweep.toml").is_file():
            found.append(
                Experiment(
                    path.name,
                    sweep=(path / "sweep.toml").is_file(),
                    shapes=sum(each.parent == path for each in results),
                    done=sum(each.parent.name == "trials" for each in results),
                    failed=len(list(path.glob("failed/*.txt"))),
                    modified=max((each.stat().st_mtime for each in results), default=0.0),
                )
            )
    return found


def report(folder: Path, name: str) -> bytes:
    """The page of an experiment's report; raises KeyError for an unknown one.

    A report that cannot be written is the error of `output_of`.
    """
    known = {each.name: each for each in experiments(folder)}
    found, path = known[name], folder / name / REPORT
    if not path.is_file() or path.stat().st_mtime < found.modified:
        output_of("exp", "report", str(folder / name))
    return path.read_bytes()


def _results(path: Path) -> list[Path]:
    names = ("trials/*.parquet", "imported/*.parquet", "shape-*.msgpack")
    return [found for name in names for found in path.glob(name)]
