"""How a benchmark ends: its figures as JSON, then one row a goal.

    python tests/bench/report.py        the rows of every benchmark run here last, in one table

A goal that is missed is printed as `short` and fails nothing: wall times on a shared machine are
for reading, not for asserting.
"""

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path("runs") / "bench"


class Goal(NamedTuple):
    """A figure and what it should reach: at most `target`, or at least where `at_least` says so."""

    name: str
    measured: float
    target: float
    unit: str = ""
    at_least: bool = False

    @property
    def met(self) -> bool:
        ahead = self.measured >= self.target if self.at_least else self.measured <= self.target
        return bool(ahead)


def goals(rows: Iterable[Goal]) -> None:
    """Print `met` or `short`, the figure's name, what was measured and the target, a row a goal.

    The rows are kept in runs/bench/goals/, under the running program's name.
    """
    found = list(rows)
    kept = FOLDER / "goals" / f"{Path(sys.argv[0]).stem}.json"
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps([row._asdict() for row in found], indent=2) + "\n")
    show(found)


def show(rows: Iterable[Goal]) -> None:
    """Print a row a goal."""
    for row in rows:
        sign = ">=" if row.at_least else "<="
        measured, target = f"{row.measured:.4g} {row.unit}", f"{sign} {row.target:.4g} {row.unit}"
        print(f"{'met' if row.met else 'short':5}  {row.name:48}  {measured:>14}  {target:>14}")


def save(name: str, figures: Mapping[str, Any]) -> Path:
    """Write `figures` to runs/bench/NAME.json under the current folder; returns the path."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(figures, indent=2) + "\n")
    return path


def main() -> None:
    """Print every goal whose benchmark was run under the current folder."""
    for kept in sorted((FOLDER / "goals").glob("*.json")):
        print(kept.stem)
        show(Goal(**row) for row in json.loads(kept.read_text()))


if __name__ == "__main__":
    main()
