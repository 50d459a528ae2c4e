"""Whether the disk has room for what a run writes, looked at before the run starts.

A run that finds its disk full at the end has trained for nothing but its last snapshot, if that one
was still written.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from shards.errors import BadInput

_SPARE_BYTES = 1 << 20  # settings, summary, pictures, the beginning of updates.parquet


def check_room(needs: Mapping[Path, int]) -> None:
    """Raise BadInput where a disk has less room than its folders need, in bytes each.

    The folders need not exist yet. A disk that does not report its room passes.
    """
    totals: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for folder, size in needs.items():
        device = _existing(folder).stat().st_dev
        totals[device] = totals.get(device, _SPARE_BYTES) + size
        folders.setdefault(device, folder)
    for device, total in totals.items():
        free = free_bytes(folders[device])
        if free is not None and free < total:
            raise BadInput(
                f"{folders[device]}: expected room for at least {megabytes(total)}, for the weights"
                f" in two formats and one snapshot; got {megabytes(free)} free on that disk"
            )


def free_bytes(folder: Path) -> int | None:
    """The room that a user's files may still take on the disk of a folder; None if not known."""
    try:
        found = os.statvfs(_existing(folder))
    except OSError:
        return None
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def megabytes(size: int) -> str:
    """A size in bytes as a person reads it."""
    return f"{size / 1e6:,.1f} MB"


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
