"""Snapshots of jobs, listed and verified here, compared and exported by another process.

To compare or export a snapshot needs the net and whole weights in memory, which the service does
not load: `downpour snapshots` does it.
"""

from pathlib import Path
from typing import Any

import msgspec

from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import catalog_of
from deploy.service.subprocesses import output_of
from ps.snapshots.catalog import SnapshotCatalog, SnapshotStatus
from ps.snapshots.manifest import damage
from shards.errors import BadInput, DownpourError

FORMATS = {"safetensors": ".safetensors", "caffemodel": ".caffemodel", "h5": ".h5"}


def list_complete_snapshots(settings: TrainSettings) -> list[dict[str, Any]]:
    """The complete snapshots of a run, the oldest first."""
    try:
        entries = SnapshotCatalog(catalog_of(settings, settings.out)).entries()
    except (DownpourError, OSError):
        return []
    return [
        {
            "name": entry.name,
            "state": str(entry.state),
            "steps": entry.manifest.steps,
            "bytes": entry.manifest.bytes,
            "taken_at": entry.manifest.taken_at,
            "aligned": entry.manifest.aligned,
        }
        for entry in entries
        if entry.manifest is not None and entry.state is not SnapshotStatus.INCOMPLETE
    ]


def verify_snapshot(settings: TrainSettings, name: str) -> list[str]:
    """Read every byte of a snapshot; returns its faults, none for a good one."""
    return list(damage(_catalog(settings, name).store.below(name)))


def compare_snapshots(settings: TrainSettings, first: str, second: str) -> dict[str, Any]:
    """Compare two snapshots: how far each tensor moved, and what changed in the ledger."""
    for name in (first, second):
        _catalog(settings, name)
    pair = [f"{settings.out}@{name}" for name in (first, second)]
    difference: dict[str, Any] = msgspec.json.decode(
        output_of("snapshots", "diff", *pair, "--json")
    )
    return difference


def export_snapshot(settings: TrainSettings, name: str, target: Path) -> None:
    """Write the weights of a snapshot to a file with a suffix of `FORMATS`."""
    _catalog(settings, name)
    output_of("snapshots", "restore", f"{settings.out}@{name}", "--output", str(target))


def _catalog(settings: TrainSettings, name: str) -> SnapshotCatalog:
    """The catalog that has this snapshot; raises BadInput without it."""
    catalog = SnapshotCatalog(catalog_of(settings, settings.out))
    if not name.isdecimal() or name not in catalog:
        raise BadInput(
            "snapshot", expected="one of the job", got=name[:80], hint="see its snapshots"
        )
    return catalog
