"""The suite is repeated in fresh clones, and each run leaves a line."""

import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.repeat_suite import Run, main

_FAILS_SECOND = """
import pathlib, sys
seen = pathlib.Path(sys.argv[1])
seen.write_text(seen.read_text() + "x" if seen.exists() else "x")
assert pathlib.Path("Makefile").exists() and not pathlib.Path(".venv").exists()
if seen.read_text() == "xx":
    print("FAILED tests/a.py::b - no")
    print("==== 1 failed, 2 passed, 3 skipped, 1 error in 4.5s (0:00:04) ====")
    sys.exit(1)
print("3 passed in 2.25s")
"""


def test_each_run_is_a_line_and_a_failure_fails_the_series(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command runs in a clone without what is not committed; the output of a run that failed is
    kept.
    """
    stub = tmp_path / "stub.py"
    stub.write_text(_FAILS_SECOND)
    out = tmp_path / "repeats.jsonl"
    command = f"{sys.executable} {stub} {tmp_path / 'seen'}"
    assert main(["--runs", "2", "--out", str(out), "--busy", "--command", command]) == 1
    runs = [msgspec.json.decode(line, type=Run) for line in out.read_bytes().splitlines()]
    assert [(run.status, run.tests_s, run.passed, run.failed, run.failures) for run in runs] == [
        (0, 2.25, 3, 0, []), (1, 4.5, 2, 2, ["tests/a.py::b"]),
    ]  # fmt: skip
    assert all(run.busy and run.commit == runs[0].commit for run in runs)
    assert "1 of 2 runs passed" in capsys.readouterr().out
    assert [path.name for path in tmp_path.glob("*.log")] == ["repeats.2.log"]


def test_the_record_is_outside_the_tree(capsys: pytest.CaptureFixture[str]) -> None:
    """A file of the tree would be gone with it, or be taken for a part of it."""
    with pytest.raises(SystemExit):
        main(["--out", __file__])
    assert "expected a file outside" in capsys.readouterr().err
