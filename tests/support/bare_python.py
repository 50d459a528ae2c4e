"""A Python in which nothing is installed, as the first on PATH may be."""

import sys
from pathlib import Path


def bare_python(folder: Path) -> Path:
    """A `python3` of the right version that finds no installed package."""
    folder.mkdir()
    path = folder / "python3"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "$@"\n')
    path.chmod(0o755)
    return path
