"""Temporary folders that are removed with their owner."""

import subprocess
import sys
from pathlib import Path

import pytest

from ps.shared_memory import shm_files

_KILLED_IN_THE_MIDST = """
import os, signal, sys, tempfile
from ps.shared_memory.shm_files import temporary_folder
tempfile.tempdir = sys.argv[1]
with temporary_folder("record") as folder:
    (folder / "secret").write_text("key")
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_temporary_folder_of_a_killed_process_goes_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next process that needs one removes it, but no living process's, and no similar name."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "downpour-kept-notes").mkdir()
    command = [sys.executable, "-c", _KILLED_IN_THE_MIDST, str(tmp_path)]
    with shm_files.temporary_folder("saves") as living:
        said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        left = Path(said.stdout.strip())
        assert (left / "secret").exists()
        with shm_files.temporary_folder("record") as folder:
            assert sorted(tmp_path.iterdir()) == sorted(
                [tmp_path / "downpour-kept-notes", living, folder]
            )
            assert folder.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == [tmp_path / "downpour-kept-notes"]
