"""The benchmark of the small GPT reads what its contenders print."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench import bench_diloco_rivals as bench
from tests.bench.peers.gpt_rival import Race


@pytest.mark.slow
def test_our_side_runs(tmp_path: Path, monkeypatch: Any) -> None:
    """The example's report is read from the first line on, and its processes end with the race."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    points = bench.run_ours(Race(seconds=20, pace_s=0.02, kill_s=10, small=True))
    assert (points[0].tokens, round(points[0].loss)) == (0, 6)
    assert points == sorted(points)


def test_a_contender_is_read_or_left_out(
    monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines of another kind are skipped; one that prints no point is named with its last line."""
    race = Race(seconds=4, pace_s=0.1, kill_s=2, small=True)
    monkeypatch.setattr(bench, "RIVALS", {"good": "one", "bad": "two"})
    monkeypatch.setattr(bench, "run_ours", lambda _: [bench.Point(1.0, 512, 3.0)])
    program = tmp_path / "python"
    program.write_text(
        "#!/bin/sh\ncase $2 in *one) echo noise; echo 1.5 512 5.5; echo 3.5 1024 4.25;;\n"
        "*) echo no gloo here >&2; exit 3;; esac\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(bench, "ENVIRONMENT", program)
    curves = bench.run_all(race, rivals=True)
    assert curves["good"] == [(1.5, 512, 5.5), (3.5, 1024, 4.25)]
    assert set(curves) == {"decoupled_diloco", "good"}
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["good", "-", "5.500", "5.500", "4.250", "1,024"]
    assert lines[2] == "bad: left out: no gloo here"
    json.dumps(curves)
