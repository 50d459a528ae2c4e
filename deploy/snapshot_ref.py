"""Which snapshot a person means: a run, a place or one snapshot there, written in one word.

runs/demo                  a run folder: its snapshots, wherever they are
runs/demo@400              the one of iteration 400
runs/demo/snapshots/400    the same, by its own folder
s3://bucket/demo@400       a place that pyarrow reaches, and one snapshot there
"""

from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec
from msgspec.structs import replace

from deploy.run_folder import SETTINGS, SNAPSHOTS
from deploy.settings import TrainSettings
from ps.snapshots.catalog import LoadedSnapshot, SnapshotCatalog, SnapshotStatus
from ps.snapshots.manifest import MANIFEST, Manifest
from ps.snapshots.object_store import without_secrets
from shards.errors import BadInput


class SnapshotRef(msgspec.Struct, frozen=True):
    """A shelf of snapshots, one of them (None: the newest), and the run folder they belong to."""

    shelf: str
    name: str | None = None
    run: Path | None = None

    @property
    def place(self) -> str:
        """The shelf, for people: its URI may hold a key."""
        return without_secrets(self.shelf)

    def open(self) -> SnapshotCatalog:
        """The shelf."""
        return SnapshotCatalog(self.shelf)

    def pick(self) -> str:
        """The name meant: the one given, else the newest's; raises BadInput if there is none."""
        return self.name if self.name is not None else self.open().newest().name


def origin_of(text: str) -> SnapshotRef:
    """What `text` means; raises BadInput for a folder that holds neither run nor snapshots."""
    base, separator, name = text.rpartition("@")
    if not separator or not name.isdecimal():
        base, name = text, ""
    if "://" in base and not base.startswith("file://"):
        return SnapshotRef(base.rstrip("/"), name or None)
    path = Path(unquote(urlsplit(base).path) if base.startswith("file:") else base).absolute()
    if (path / SETTINGS).is_file():
        settings = TrainSettings.load(path / SETTINGS)
        return SnapshotRef(shelf_of(settings, path), name or None, path)
    if (path / MANIFEST).is_file() and not name:
        run = path.parent.parent if path.parent.name == SNAPSHOTS else None
        known = run is not None and (run / SETTINGS).is_file()
        return SnapshotRef(str(path.parent), path.name, run if known else None)
    if not path.is_dir() or not any(entry.name.isdecimal() for entry in path.iterdir()):
        raise BadInput(f"{text}: expected a run folder or a place with snapshots, got none there")
    return SnapshotRef(str(path), name or None)


def shelf_of(settings: TrainSettings, run: Path) -> str:
    """Where a run's snapshots are."""
    return settings.snapshots if settings.snapshots is not None else str(run / SNAPSHOTS)


def read(origin: SnapshotRef) -> LoadedSnapshot:
    """The snapshot that is meant, read whole; of the newest ones, the first that is good."""
    shelf = origin.open()
    return shelf.newest_good() if origin.name is None else shelf.load(origin.name)


def newest(
    shelf: SnapshotCatalog, logs: LoadedSnapshot | None, check: Callable[[str, Manifest], None]
) -> LoadedSnapshot:
    """The newest good snapshot of a run, or its logs if they tell more.

    With logs no snapshot is needed: they are what a run has that was killed while it wrote its
    first one, and they are whole where every snapshot is damaged. `check` is given the place and
    manifest of what may be gone on from, and raises if it is another job's. Raises BadInput where
    there are no logs and no good snapshot.
    """
    if logs is None:
        return shelf.newest_good(check)
    check(logs.place, logs.manifest)
    if all(entry.state is SnapshotStatus.INCOMPLETE for entry in shelf.entries()):
        return logs
    try:
        found = shelf.newest_good(check)
    except BadInput as error:
        return replace(logs, passed_over=(str(error),))
    return found if found.manifest.steps > logs.manifest.steps else logs
