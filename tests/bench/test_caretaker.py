"""The process that ends and removes what a contest leaves behind."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.bench.endtoend import places
from tests.bench.endtoend.places import Line
from tests.support.eventually import eventually
from tests.support.fresh_clone import ROOT

PROGRAM = """
import subprocess, time
subprocess.Popen(["sleep", "1000"], start_new_session=True)
from ps.shared_memory.shm_files import temporary_folder
folder = temporary_folder("contest")
folder.__enter__()
open({up!r}, "w").close()
time.sleep(1000)
"""
CONTEST = """
from pathlib import Path
from tests.bench.endtoend import contest
from tests.bench.endtoend.places import Line
contest.PROGRAMS = Path({folder!r})
trial = contest.Trial(line={line!r}, workers=1)
contest.run_trial(contest.Contender("program.py", ("downpour-sgd",)), trial, 600)
"""


def list_processes(folder: Path) -> list[str]:
    """The commands of the processes that have this folder for temporary files."""
    commands = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(folder):
                commands.append(" ".join(process.cmdline()))
    return commands


@pytest.mark.parametrize("line", [None, Line()], ids=["quiet", "slow link"])
def test_a_killed_contest_leaves_nothing(tmp_path: Path, line: Line | None) -> None:
    """Its programs end, also those in sessions of their own; no line, namespace or file stays."""
    if line is not None and (why := places.missing()) is not None:
        pytest.skip(why)
    up = tmp_path / "up"
    (tmp_path / "program.py").write_text(PROGRAM.format(up=str(up)))
    command = [sys.executable, "-c", CONTEST.format(folder=str(tmp_path), line=line)]
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment) as contest:
        eventually(up.exists, because="the program has started")
        assert any("sleep" in command for command in list_processes(tmp_path))
        contest.kill()
    eventually(
        lambda: not list_processes(tmp_path), because=lambda: "; ".join(list_processes(tmp_path))
    )
    assert {path.name for path in tmp_path.iterdir()} == {"up", "program.py"}
    spaces = Path("/run/netns")
    assert not [*spaces.glob(f"dp*x{contest.pid}")]
