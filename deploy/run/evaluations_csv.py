"""`evaluations.csv`: one row for each test of the weights, written as the results arrive.

There are few rows, so each result rewrites the whole file. A resumed run continues the file,
without the rows from after its snapshot.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from ps.whole_files import whole_file
from shards.errors import BadInput, GiveUp
from worker.training.evaluation import Evaluation

COLUMNS = {
    "iteration": "The iteration at which the weights were read.",
    "samples": "Samples that the workers had trained on by then.",
    "seconds": "Seconds of training by then, those before the run was resumed included.",
}
"""The first columns, with their meanings. One for each output of the test nets follows."""


class EvaluationsFile:
    """The results of a run's tests, and the file that holds them."""

    def __init__(self, path: Path, *, upto: int | None = None) -> None:
        """Start the file `path`, or continue it after iteration `upto`.

        Raises BadInput if the file to continue cannot be read.
        """
        self._path = path
        earlier = read_evaluations(path) if upto is not None and path.exists() else []
        self._results = {test.iteration: test for test in earlier if test.iteration <= (upto or 0)}

    @property
    def results(self) -> Sequence[Evaluation]:
        """All results, in order of iteration."""
        return [self._results[iteration] for iteration in sorted(self._results)]

    def add(self, result: Evaluation) -> None:
        """Add a result, replacing one of the same iteration; raises GiveUp if the disk fails."""
        self._results[result.iteration] = result
        names = list(dict.fromkeys(name for test in self.results for name in test.figures))
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([*COLUMNS, *names])
        for test in self.results:
            figures = [_short(test.figures[name]) if name in test.figures else "" for name in names]
            rows.writerow([test.iteration, test.samples, round(test.seconds, 3), *figures])
        try:
            with whole_file(self._path) as partial:
                partial.write_text(text.getvalue())
        except OSError as error:
            raise GiveUp(f"{self._path}: {error.strerror}") from None


def read_evaluations(path: Path) -> list[Evaluation]:
    """Read the results in an `evaluations.csv`; raises BadInput for an invalid file."""
    try:
        with path.open(newline="") as file:
            return [_parse_row(row) for row in csv.DictReader(file, strict=True)]
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadInput(f"{path}: expected the results of tests, got: {error}") from None


def _short(value: float) -> str:
    """Format with the 7 digits of a float32, which is the precision of a net's outputs."""
    return f"{value:.7g}"


def _parse_row(row: dict[str, str]) -> Evaluation:
    figures = {name: float(value) for name, value in row.items() if name not in COLUMNS and value}
    return Evaluation(int(row["iteration"]), int(row["samples"]), float(row["seconds"]), figures)
