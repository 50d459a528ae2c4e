"""A file that is replaced whole has its old content or its new one, whatever fails."""

import errno
import os
from pathlib import Path

import pytest

from ps import whole_files
from ps.whole_files import PARTIAL, Flush, whole_file


def replace(path: Path, flush: Flush = Flush.NOTHING) -> None:
    with whole_file(path, flush=flush) as partial:
        partial.write_bytes(b"new")


@pytest.mark.parametrize("contended", [False, True])
def test_a_failed_writer_changes_nothing(tmp_path: Path, contended: bool) -> None:
    """An error of the code that writes leaves the old content, and no other file."""
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with (  # noqa: PT012  # the write before the error is what is tested
        pytest.raises(RuntimeError, match="mid-write"),
        whole_file(path, contended=contended) as partial,
    ):
        partial.write_bytes(b"ne")
        raise RuntimeError("mid-write")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("flush", "steps"),
    [
        (Flush.NOTHING, ["replace"]),
        (Flush.CONTENT, ["flush .file.partial", "replace"]),
        (Flush.NAME, ["flush .file.partial", "replace", "flush folder"]),
    ],
)
def test_flushes_come_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flush: Flush, steps: list[str]
) -> None:
    """Content is on the disk before it gets its name, and the name before the caller continues;
    if any of these steps fails, the old content stays or the new one is complete."""
    folder = tmp_path / "folder"
    folder.mkdir()
    path = folder / "file"
    taken: list[str] = []
    fails_at = len(steps)

    def take(step: str) -> None:
        taken.append(step)
        if len(taken) == fails_at + 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    real = Path.replace

    def rename(partial: Path, target: Path) -> Path:
        take("replace")
        return real(partial, target)

    monkeypatch.setattr(whole_files, "flush_to_disk", lambda flushed: take(f"flush {flushed.name}"))
    monkeypatch.setattr(Path, "replace", rename)
    replace(path, flush)
    assert (taken, path.read_bytes()) == (steps, b"new")
    for number in range(len(steps)):
        path.write_bytes(b"old")
        taken.clear()
        fails_at = number
        with pytest.raises(OSError, match="Input/output error"):
            replace(path, flush)
        renamed = "replace" in steps[:number]
        assert path.read_bytes() == (b"new" if renamed else b"old")
        assert list(folder.iterdir()) == [path]


def test_a_private_file_is_never_open_to_others(tmp_path: Path) -> None:
    """Its partial file has mode 600 before there is content, also where one was left behind."""
    path = tmp_path / "secret"
    left = tmp_path / f".secret{PARTIAL}"
    left.touch(mode=0o644)
    with whole_file(path, private=True) as partial:
        assert (partial, partial.stat().st_mode & 0o777) == (left, 0o600)
        partial.write_bytes(b"x")
    assert path.stat().st_mode & 0o777 == 0o600


def test_contending_writers_have_a_file_each(tmp_path: Path) -> None:
    """The partial file of one process is not that of another."""
    with whole_file(tmp_path / "file", contended=True) as partial:
        assert partial.name == f".file.{os.getpid()}{PARTIAL}"
        partial.touch()
