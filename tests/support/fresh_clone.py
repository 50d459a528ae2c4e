"""A fresh clone of this repository at a commit."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def fresh_clone(commit: str, folder: Path) -> None:
    """Clone what is committed into `folder`, at `commit`; changes that are not are not in it."""
    for step in (
        ["git", "clone", "--quiet", "--no-checkout", str(ROOT), str(folder)],
        ["git", "-C", str(folder), "checkout", "--quiet", "--detach", commit],
    ):
        subprocess.run(step, check=True)
