"""Temporary folders that are removed with their owner."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from ps.shared_memory import shm_files

_KILLED_WITH_RAY = """
import os, signal, sys, tempfile
from ps.shared_memory.shm_files import ray_folder
tempfile.tempdir = sys.argv[1]
with ray_folder() as folder:
    (folder / "session").mkdir()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
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


def test_all_that_killed_processes_have_left_is_swept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory and temporary folders at once; what has an owner stays."""
    shared, temporary = tmp_path / "shm", tmp_path / "tmp"
    shared.mkdir()
    temporary.mkdir()
    monkeypatch.setattr(shm_files, "ROOT", shared)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    (shared / "downpour-0123456789abcdef-memory-0123456789abcdef").touch()
    (temporary / f"downpour-kept-saves-{'0' * 32}").mkdir()
    living = shm_files.Claim(shared / "downpour-0123456789abcdef-memory-1111111111111111")
    shm_files.sweep_all()
    assert [*shared.iterdir(), *temporary.iterdir()] == [living.path]
    living.release()


def start_and_end() -> None:
    with shm_files.ray_folder():
        pass


def test_the_ray_folder_of_a_killed_process_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next start or sweep removes it; one of a living process, or of another name, stays."""
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        root = Path(short)
        monkeypatch.setattr("tempfile.tempdir", short)
        command = [sys.executable, "-c", _KILLED_WITH_RAY, short]
        similar = root / "downpour-ray-notes"
        similar.mkdir()
        with shm_files.ray_folder() as living:
            for sweep in (shm_files.sweep_all, start_and_end):
                said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
                left = Path(said.stdout.strip())
                assert (left.parent, (left / "session").is_dir()) == (root, True)
                sweep()
                assert not left.exists()
            assert living.is_dir()
            assert living.stat().st_mode & 0o777 == 0o700
        assert similar.is_dir()
