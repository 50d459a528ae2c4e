"""Checks before a run starts that the disk has room for its results.

A run that meets a full disk at the end loses everything after its last snapshot.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from shards.errors import BadInput

_SPARE_BYTES = 1 << 20  # settings, summary, pictures, the beginning of updates.parquet


def check_room(needs: Mapping[Path, int]) -> None:
    """Raise BadInput if a disk has less free space than its folders need, given in bytes.

    The folders need not exist yet. A disk that does not report its free space passes.
    """
    totals: dict[int, int] = {}
    folders: dict[int, Path] = {}
    for folder, size in needs.items():
        device = existing(folder).stat().st_dev
        totals[device] = totals.get(device, _SPARE_BYTES) + size
        folders.setdefault(device, folder)
    for device, total in totals.items():
        free = free_bytes(folders[device])
        if free is not None and free < total:
            raise BadInput(
                folders[device],
                expected=(
                    f"room for at least {megabytes(total)}, for the weights in two "
                    "formats and one snapshot"
                ),
                got=f"{megabytes(free)} free on that disk",
            )


def free_bytes(folder: Path) -> int | None:
    """The free bytes for a user's files on the disk of a folder; None if not known."""
    try:
        statistics = os.statvfs(existing(folder))
    except OSError:
        return None
    return statistics.f_bavail * statistics.f_frsize if statistics.f_blocks else None


def megabytes(size: int) -> str:
    """Format a size in bytes as MB."""
    return f"{size / 1e6:,.1f} MB"


def existing(folder: Path) -> Path:
    """The folder itself, or its nearest parent that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())
