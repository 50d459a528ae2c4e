"""`evaluations.csv` is readable at any moment, and a resumed run continues it."""

from pathlib import Path

import pandas as pd
import pytest

from deploy.run.evaluations_csv import EvaluationsFile, read_evaluations
from shards.errors import BadInput, GiveUp
from worker.training.evaluation import Evaluation


def result(iteration: int, **figures: float) -> Evaluation:
    return Evaluation(iteration, 64 * iteration, iteration / 10, figures)


def test_rows_are_there_as_they_come(tmp_path: Path) -> None:
    """After each result the file is complete: one column per output, one row per test, in order."""
    path = tmp_path / "evaluations.csv"
    file = EvaluationsFile(path)
    assert not path.exists()
    for iteration in (0, 10):
        file.add(result(iteration, accuracy=0.5, loss=1.25))
        read = pd.read_csv(path)
        assert list(read.columns) == ["iteration", "samples", "seconds", "accuracy", "loss"]
        assert read.iteration.max() == iteration
    assert read_evaluations(path) == list(file.results)


def test_a_resumed_run_continues_it(tmp_path: Path) -> None:
    """Rows after the snapshot are dropped, and each iteration has one row."""
    path = tmp_path / "evaluations.csv"
    file = EvaluationsFile(path)
    for iteration in (0, 10, 20, 30):
        file.add(result(iteration, accuracy=0.1))
    resumed = EvaluationsFile(path, upto=20)
    resumed.add(result(20, accuracy=0.2))
    resumed.add(result(25, loss=7.0))
    assert [test.iteration for test in read_evaluations(path)] == [0, 10, 20, 25]
    assert [test.figures for test in read_evaluations(path)][2:] == [
        {"accuracy": 0.2},
        {"loss": 7.0},
    ]


def test_a_new_run_begins_a_new_file(tmp_path: Path) -> None:
    """A new run does not keep the rows of an earlier run."""
    EvaluationsFile(tmp_path / "evaluations.csv").add(result(10, loss=1.0))
    EvaluationsFile(tmp_path / "evaluations.csv").add(result(20, loss=2.0))
    assert [test.iteration for test in read_evaluations(tmp_path / "evaluations.csv")] == [20]


@pytest.mark.parametrize("text", ["iteration,samples\n1,2\n", "a,b\n1,2\n", "iteration\nx,1,2\n"])
def test_a_file_of_something_else_is_named(tmp_path: Path, text: str) -> None:
    """The error has the file's name."""
    (tmp_path / "evaluations.csv").write_text(text)
    with pytest.raises(BadInput, match=r"evaluations\.csv: expected the results of tests, got: "):
        EvaluationsFile(tmp_path / "evaluations.csv", upto=5)


def test_a_disk_that_refuses_is_named(tmp_path: Path) -> None:
    """No half-written file stays."""
    with pytest.raises(GiveUp, match=r"gone/evaluations\.csv: No such file"):
        EvaluationsFile(tmp_path / "gone" / "evaluations.csv").add(result(1, loss=1.0))
