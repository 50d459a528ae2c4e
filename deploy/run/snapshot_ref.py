"""Parses references to snapshots: a run, a place of snapshots, or one snapshot.

runs/demo                  a run folder: its snapshots, wherever they are stored
runs/demo@400              the run's snapshot of iteration 400
runs/demo/snapshots/400    the same snapshot, by its own folder
s3://bucket/demo@400       one snapshot in a place that pyarrow can access
"""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec.structs import replace

from deploy.run.folder import SETTINGS, SNAPSHOTS
from deploy.run.settings import TrainSettings
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog, SnapshotStatus
from ps.snapshots.manifest import MANIFEST, Manifest
from ps.storage import without_secrets
from shards.errors import BadInput


class SnapshotRef(msgspec.Struct, frozen=True):
    """A reference: `catalog`, the folder or URI of a snapshot catalog; `name`, one of its snapshots
    (None: the newest); `run`, the run folder that they belong to, if known."""

    catalog: str
    name: str | None = None
    run: Path | None = None

    @property
    def place(self) -> str:
        """The catalog as shown to users, without any key in its URI."""
        return without_secrets(self.catalog)

    def open(self) -> SnapshotCatalog:
        """Open the catalog of the snapshots."""
        return SnapshotCatalog(self.catalog)

    def pick(self) -> str:
        """The given name, else that of the newest snapshot; raises BadInput if there is none."""
        return self.name if self.name is not None else self.open().newest().name


def origin_of(text: str) -> SnapshotRef:
    """Parse a reference; raises BadInput for a folder with neither a run nor snapshots."""
    base, separator, name = text.rpartition("@")
    if not separator or not name.isdecimal():
        base, name = text, ""
    if "://" in base and not base.startswith("file://"):
        return SnapshotRef(base.rstrip("/"), name or None)
    path = Path(unquote(urlsplit(base).path) if base.startswith("file:") else base).absolute()
    if (path / SETTINGS).is_file():
        settings = TrainSettings.load(path / SETTINGS)
        return SnapshotRef(catalog_of(settings, path), name or None, path)
    if (path / MANIFEST).is_file() and not name:
        run = path.parent.parent if path.parent.name == SNAPSHOTS else None
        known = run is not None and (run / SETTINGS).is_file()
        return SnapshotRef(str(path.parent), path.name, run if known else None)
    if not path.is_dir() or not any(entry.name.isdecimal() for entry in path.iterdir()):
        raise BadInput(text, expected="a run folder or a place with snapshots", got="none there")
    return SnapshotRef(str(path), name or None)


def catalog_of(settings: TrainSettings, run: Path) -> str:
    """The folder or URI of a run's snapshots."""
    return settings.snapshots if settings.snapshots is not None else str(run / SNAPSHOTS)


def read(origin: SnapshotRef) -> LoadedSnapshot:
    """Read the referenced snapshot; without a name, the newest good one."""
    catalog = origin.open()
    return catalog.newest_good() if origin.name is None else catalog.load(origin.name)


def newest(
    catalog: SnapshotCatalog, logs: LoadedSnapshot | None, check: Callable[[str, Manifest], None]
) -> LoadedSnapshot:
    """The newest good snapshot of a run, or the state from its `logs` if that has more steps.

    With logs no snapshot is needed: a run may be killed before its first snapshot is complete, or
    all its snapshots may be damaged. `check` receives the place and manifest of each candidate, and
    raises if it belongs to another job. Raises BadInput without logs and without a good snapshot.
    """
    if logs is None:
        return catalog.newest_good(check)
    check(logs.place, logs.manifest)
    if all(entry.state is SnapshotStatus.INCOMPLETE for entry in catalog.entries()):
        return logs
    try:
        snapshot = catalog.newest_good(check)
    except BadInput as error:
        return replace(logs, passed_over=(str(error),))
    return snapshot if snapshot.manifest.steps > logs.manifest.steps else logs
