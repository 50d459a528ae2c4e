"""What a benchmark says at its end."""

import sys
from pathlib import Path

import pytest

from tests.bench import report
from tests.bench.report import Goal


def test_goals_are_shown_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A row a goal when a benchmark ends, and all of them again from what was kept."""
    monkeypatch.chdir(tmp_path)
    fast, good = Goal("fast", 2.0, 1.0, "ms"), Goal("good", 0.95, 0.9, "", at_least=True)
    for program, row in (("bench_one.py", fast), ("bench_two.py", good)):
        monkeypatch.setattr(sys, "argv", [program])
        report.goals([row])
    at_once = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in at_once] == [["short", "fast"], ["met", "good"]]
    report.main()
    kept = capsys.readouterr().out.splitlines()
    assert kept == ["bench_one", at_once[0], "bench_two", at_once[1]]
