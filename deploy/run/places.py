"""Checks that the places of a new run are its own, before anything is written there.

A run checks them before it starts, and the training service when a job is submitted.
"""

from pathlib import Path

from deploy.run.settings import TrainSettings
from ps.snapshots.catalog import SnapshotCatalog
from ps.storage import without_secrets
from shards.errors import BadInput


def check_own(settings: TrainSettings, *, stores: bool = True) -> None:
    """Raise BadInput if --snapshots or --logs names a place with files of another job.

    Without `stores`, a place in an object store is not asked: it may be slow to answer.
    """
    snapshots, logs = settings.snapshots, settings.logs
    remote = snapshots is not None and "://" in snapshots and not snapshots.startswith("file://")
    if snapshots is not None and "://" not in snapshots and Path(snapshots).is_file():
        raise BadInput(f"--snapshots {snapshots}", expected="a folder", got="a file")
    if snapshots is not None and (stores or not remote) and SnapshotCatalog(snapshots).entries():
        raise BadInput(
            f"--snapshots {without_secrets(snapshots)}",
            expected="a place of this run's own",
            got="one with snapshots",
            hint="choose another place",
        )
    if logs is not None and logs.is_dir() and any(logs.iterdir()):
        raise BadInput(
            f"--logs {logs}", expected="a folder of this run's own", got="one with files"
        )
