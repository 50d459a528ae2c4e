"""The benchmark of the start of a training."""

import sys

import pytest

from tests.bench import bench_start


def test_no_rounds_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a round there is no figure, and earlier ones stay."""
    monkeypatch.setattr(sys, "argv", ["bench_start.py", "--rounds", "0"])
    with pytest.raises(SystemExit):
        bench_start.main()
    assert "--rounds: expected at least 1, got 0" in capsys.readouterr().err
