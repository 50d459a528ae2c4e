"""`evaluations.csv`: one row for each test of the weights, written as the results come.

Its columns are iteration, samples and seconds (see `worker.evaluation.Evaluation`), then one for
each output of the test nets, such as accuracy and loss. The rows are few, so the file is written
whole for each result. A resumed run continues it, without the rows of what came after its snapshot.
"""

import csv
import io
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from shards.errors import BadInput, GiveUp
from worker.evaluation import Evaluation

_FIXED = ("iteration", "samples", "seconds")


class EvaluationsFile:
    """The results of a run's tests, and the file that holds them."""

    def __init__(self, path: Path, *, upto: int | None = None) -> None:
        """Begin the file `path`, or continue it behind iteration `upto`.

        Raises BadInput for a file to continue that cannot be read.
        """
        self._path = path
        earlier = read_evaluations(path) if upto is not None and path.exists() else []
        self._results = {test.iteration: test for test in earlier if test.iteration <= (upto or 0)}

    @property
    def results(self) -> Sequence[Evaluation]:
        """All results, in order of iteration."""
        return [self._results[iteration] for iteration in sorted(self._results)]

    def add(self, result: Evaluation) -> None:
        """Add a result, in the place of an earlier one of its iteration; raises GiveUp."""
        self._results[result.iteration] = result
        names = list(dict.fromkeys(name for test in self.results for name in test.figures))
        text = io.StringIO()
        rows = csv.writer(text, lineterminator="\n")
        rows.writerow([*_FIXED, *names])
        for test in self.results:
            figures = [_short(test.figures[name]) if name in test.figures else "" for name in names]
            rows.writerow([test.iteration, test.samples, round(test.seconds, 3), *figures])
        part = self._path.with_name(f".{self._path.name}.partial")
        try:
            part.write_text(text.getvalue())
            part.replace(self._path)
        except OSError as error:
            with suppress(OSError):
                part.unlink()
            raise GiveUp(f"{self._path}: {error.strerror}") from None


def read_evaluations(path: Path) -> list[Evaluation]:
    """The results in a `evaluations.csv`; raises BadInput for a file that is not one."""
    try:
        with path.open(newline="") as file:
            return [_tested(row) for row in csv.DictReader(file, strict=True)]
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        raise BadInput(f"{path}: expected the results of tests, got: {error}") from None


def _short(value: float) -> str:
    """As many digits as a float32 has: what a net outputs is no more exact."""
    return f"{value:.7g}"


def _tested(row: dict[str, str]) -> Evaluation:
    figures = {name: float(value) for name, value in row.items() if name not in _FIXED and value}
    return Evaluation(int(row["iteration"]), int(row["samples"]), float(row["seconds"]), figures)
