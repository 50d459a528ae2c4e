"""Processes that start as where numba is not installed: loading it takes most of their start."""

import os
from pathlib import Path


def without_numba(folder: Path) -> str:
    """Make a folder that hides numba from every process with it first on its import path."""
    folder.mkdir()
    (folder / "numba.py").write_text('raise ImportError("left out")\n')
    return str(folder)


def import_path(*folders: Path) -> dict[str, str]:
    """The environment of a Python that imports from `folders`, after those of PYTHONPATH."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*([before] if before else []), *map(str, folders)])}
