"""The contest of whole trainings, with programs that take no time."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.bench import bench_endtoend
from tests.bench.endtoend import contest
from tests.bench.endtoend.contest import Contender, Trial, run_trial
from tests.bench.report import FOLDER

TRIAL = Trial(target=0.9)


@pytest.fixture
def write_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Make a contender of some lines of Python, which have `task` and `write_line`."""

    def write(*lines: str) -> Contender:
        monkeypatch.setattr(contest, "PROGRAMS", tmp_path)
        head = ["import sys", "from tests.bench.endtoend.programs.task import *"]
        (tmp_path / "program.py").write_text("\n".join([*head, "task = read_task()", *lines]))
        return Contender("program.py", "numpy")

    return write


def test_a_run_ends_at_its_target(write_program: object) -> None:
    """The first test that reaches the target counts, and whatever the program started is ended."""
    assert callable(write_program)
    contender = write_program(
        "import subprocess",
        "child = subprocess.Popen(['sleep', '1000'])",
        "print('the child is', child.pid, flush=True)",
        "write_line(task, None)",
        "for accuracy in (0.5, 0.95, 0.97): write_line(task, accuracy)",
        "time.sleep(1000)",
    )
    outcome = run_trial(contender, TRIAL, limit_s=60)
    assert outcome.seconds is not None
    assert outcome.first_step_s is not None
    assert outcome.first_step_s <= outcome.seconds < 60
    assert [accuracy for _, accuracy in outcome.curve] == [0.5, 0.95, 0.97]
    child = outcome.output.split("the child is ")[1].split()[0]
    assert not Path(f"/proc/{child}").exists()
    assert outcome.cpu_s > 0


def test_a_run_that_misses_says_why(write_program: object) -> None:
    """A program that ends early has no seconds; its last words are kept."""
    assert callable(write_program)
    contender = write_program("write_line(task, 0.5)", "sys.exit('no more data')")
    outcome = run_trial(contender, TRIAL, limit_s=60)
    assert outcome.seconds is None
    assert "no more data" in outcome.output


def test_workers_are_killed_in_turn(write_program: object) -> None:
    """A process that is noted as a worker's is killed after each interval."""
    assert callable(write_program)
    contender = write_program(
        "import os, signal",
        "child = os.fork()",
        "if child == 0: note_process(task, 0); write_line(task, None); time.sleep(1000)",
        "_, status = os.waitpid(child, 0)",
        "write_line(task, 0.95 if os.WTERMSIG(status) == signal.SIGKILL else 0.1)",
        "time.sleep(1000)",
    )
    outcome = run_trial(contender, TRIAL._replace(kill_every_s=0.2), limit_s=60)
    assert outcome.seconds is not None
    assert outcome.kills == 1


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        (["--only", "Horovod"], "--only: expected some of downpour, .* got Horovod"),
        (["--conditions", "noise"], "--conditions: expected some of quiet, .* got noise"),
    ],
)
def test_unknown_names_are_refused(arguments: Sequence[str], refusal: str) -> None:
    with pytest.raises(SystemExit, match=refusal):
        bench_endtoend.main(list(arguments))


@pytest.mark.slow
def test_the_quick_form(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`--quick` trains this project's own program to its target, and keeps figures and picture."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench_endtoend.py"])
    bench_endtoend.main(["--quick"])
    figures = json.loads((FOLDER / "endtoend.json").read_text())
    (outcome,) = figures["quiet"]["downpour train"]
    assert outcome["seconds"] is not None, capsys.readouterr().err
    assert (FOLDER / "endtoend.png").stat().st_size > 10_000
