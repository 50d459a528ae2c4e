"""Processes that start as where numba is not installed: loading it takes most of their start."""

from pathlib import Path


def without_numba(folder: Path) -> str:
    """Make a folder that hides numba from every process with it first on its import path."""
    folder.mkdir()
    (folder / "numba.py").write_text('raise ImportError("left out")\n')
    return str(folder)
