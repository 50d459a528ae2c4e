"""The benchmark of the small GPT: its contenders' curves, goals and refusals."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.bench import bench_diloco_rivals as bench
from tests.bench.bench_diloco_rivals import Curve, Point
from tests.bench.endtoend import contest, places
from tests.bench.endtoend.contest import Contender, Killer, Trial
from tests.bench.endtoend.places import Line

TRIAL = Trial(work="gpt", target=float("inf"), workers=1, kill_every_s=0.2, kill_of_all=True)
HEAD = (
    "import os, sys, time\nfrom tests.bench.endtoend.programs.task import *\ntask = read_task()\n"
)


def make_curve(*points: Point, seconds: float = 8.0) -> Curve:
    return Curve([*points], seconds, 3.0, 1, 20.0, 5_000_000, "")


def test_a_contender_is_read_or_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A killed learner's successor counts further tokens; one that takes no step, and one that is
    never tested, are rows with their last words."""
    programs = {
        "good": (
            "for life in range(2):",
            "    if not (child := os.fork()):",
            "        note_process(task, 0); write_line(task, None); time.sleep(1000)",
            "    os.waitpid(child, 0)",
            "    write_loss(task, 5.0 - life, 512 * (life + 1), time.time())",
        ),
        "no-step": ("sys.exit('no gloo here')",),
        "no-test": ("write_line(task, None)", "sys.exit('no memory')"),
    }
    monkeypatch.setattr(contest, "PROGRAMS", tmp_path)
    for name, lines in programs.items():
        (tmp_path / f"{name}.py").write_text(HEAD + "\n".join(lines))
    contenders = {name: Contender(f"{name}.py", ("numpy",)) for name in programs}
    curves = bench.run_all(contenders, TRIAL, 60, 60, ideal_tokens=2048)
    assert set(curves) == {"good"}
    assert [point[1:] for point in curves["good"].points] == [(512, 5.0), (1024, 4.0)]
    assert curves["good"].kills == 2
    said = capsys.readouterr().out
    assert "no-step: failed: no step in 60 s: no gloo here" in said
    assert "no-test: failed: no test of the model in 60 s: no memory" in said
    (row,) = [line.split() for line in said.splitlines() if line.startswith("good")]
    assert row[1:8] == ["4.000"] * 4 + ["1,024", "50", "2"]
    json.dumps({name: curve._asdict() for name, curve in curves.items()})


def test_a_pause_ends_with_further_tokens() -> None:
    """Tests that find no further tokens are part of it, as is the rest of the time."""
    points = (Point(1, 10, 5.0), Point(2, 20, 4.0), Point(3, 20, 4.0), Point(6, 30, 3.0))
    assert make_curve(*points).longest_pause_s == 4
    assert make_curve(*points, seconds=20).longest_pause_s == 14
    assert bench.format_row("it", make_curve(*points), 30).split()[1:5] == [
        *("4.000", "4.000", "3.000", "3.000")
    ]


def test_goals_compare_the_ends() -> None:
    """Of this project with each other contender that ran; without this project there are none."""
    ours, other = make_curve(Point(7, 900, 2.0)), make_curve(Point(8, 450, 2.5))
    curves = {bench.OURS: ours, bench.TORCHFT: other}
    rows = {goal.name: (goal.measured, goal.met) for goal in bench.list_goals(curves, 1200)}
    assert rows == {
        "tokens, to learners that never wait": (0.75, False),
        "loss at the end, to torchft": (0.8, True),
        "tokens, to torchft": (2.0, True),
    }
    assert list(bench.list_goals({bench.TORCHFT: other}, 1200)) == []


def test_a_learner_is_killed_when_all_take_steps(tmp_path: Path) -> None:
    """While one is on its way back no other dies."""
    record = tmp_path / "record"
    record.touch()
    killer = Killer(record, TRIAL._replace(workers=2, kill_every_s=1e-9))
    with subprocess.Popen(["sleep", "1000"]) as one, subprocess.Popen(["sleep", "1000"]) as two:
        try:
            (tmp_path / "record.0.pid").write_text(f"{one.pid}")
            for _ in range(3):
                killer.act()
            assert killer.kills == 0
            (tmp_path / "record.1.pid").write_text(f"{two.pid}")
            killer.act()
            assert killer.kills == 1
        finally:
            one.kill()
            two.kill()


@pytest.mark.parametrize("text", ["rtt=100ms", "rtt=1s,rate=1Gbit,jitter=1ms", "fast"])
def test_other_links_are_refused(text: str) -> None:
    with pytest.raises(SystemExit, match="--link: expected"):
        bench.read_line(text)


@pytest.mark.parametrize("option", ["--seconds", "--start-s", "--kill-every", "--pace"])
@pytest.mark.parametrize("value", ["0", "nan", "inf"])
def test_other_times_are_refused(option: str, value: str) -> None:
    with pytest.raises(SystemExit, match=f"{option}: expected seconds above 0, got {value}"):
        bench.main([option, value])


def test_a_link_needs_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the right to make them it says how to run without a link."""
    monkeypatch.setattr(places, "missing", lambda: None)
    assert bench.read_line(bench.LINK) == Line(0.1, 12.5e6)
    assert bench.read_line("none") is None
    monkeypatch.setattr(places, "missing", lambda: "it needs root")
    with pytest.raises(SystemExit, match="--link: it needs root; --link none runs without it"):
        bench.read_line(bench.LINK)


def test_what_is_not_installed_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    absent = Contender("plain.py", ("no-such-package",))
    monkeypatch.setattr(bench, "CONTENDERS", {"absent": absent})
    assert bench.choose_contenders([]) == {}
    expected = "absent: left out, for no-such-package are not installed: make bench B=peers\n"
    assert capsys.readouterr().out == expected
    with pytest.raises(SystemExit, match="nothing to run"):
        bench.main(["--link", "none"])


def test_the_goals_know_the_example() -> None:
    """Its speeds and the tokens of its steps, which are not imported for want of PyTorch."""
    pytest.importorskip("torch")
    from deploy.examples.gpt_torch import BATCH, CONTEXT, SPEEDS

    assert (*SPEEDS.values(),) == bench.SPEEDS
    assert BATCH * CONTEXT == bench.STEP_TOKENS


@pytest.mark.slow
def test_our_side_survives_a_kill(tmp_path: Path, monkeypatch: Any) -> None:
    """Without a link: tokens are counted after the death of a learner, too."""
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    options = ["--small", "--pace", "0.05", "--test-every", "1"]
    contender = bench.CONTENDERS[bench.OURS]._replace(options=options)
    trial = TRIAL._replace(data=str(bench.DOCS), workers=3, kill_every_s=5.0)
    curve = bench.run_contender(contender, trial, 60, 300)
    assert curve.kills >= 1
    assert curve.points[0].tokens < curve.points[-1].tokens
