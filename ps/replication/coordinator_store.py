"""The coordinator's record on disk: what it has decided, in one JSON file.

It is written before anyone is told, so whatever was told survives kill -9 and, where the disk keeps
what it has acknowledged, power failure. It is small, and replaced whole; a checksum tells a damaged
one (checked_json.py).

The coordinator's key lies in it, too, so that each of its lives proves the same one. The file is
its user's alone.
"""

from pathlib import Path

import msgspec

from ps.replication.coordinator import ShardGroup
from ps.security.keys import KeyPair
from ps.snapshots import checked_json
from ps.snapshots.secure_files import check_private, replace_private
from shards.errors import UNDECODABLE, BadInput

RECORD = "coordinator.json"
"""The file's name, in a folder of the job's own."""


class _Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds: the job's id, the key's secret half if it was wanted, and each shard's
    group.
    """

    job: str
    key: str | None = None
    groups: dict[int, ShardGroup] = {}


class CoordinatorStore:
    """The file at `path`, made if it is not there. Used by one thread at a time."""

    def __init__(self, path: Path, job: str) -> None:
        """Raises BadInput when the file is another job's, damaged, or none of this kind."""
        self._path = path
        if path.exists():
            check_private(path, "coordinator's record")
            self._held = _read(path)
        else:
            self._held = _Decided(job)
            self._replace(self._held)
        if self._held.job != job:  # whose it is stays a secret
            raise BadInput(f"coordinator's record {path}: expected job {job}, got another's")

    def keys(self) -> KeyPair:
        """The coordinator's own, made when they are wanted first. Raises BadInput."""
        if self._held.key is not None:
            return KeyPair.of(self._held.key)
        made = KeyPair.new()
        self._replace(msgspec.structs.replace(self._held, key=made.secret))
        return made

    def load(self) -> dict[int, ShardGroup]:
        """What was saved last; empty at first."""
        return dict(self._held.groups)

    def save(self, groups: dict[int, ShardGroup]) -> None:
        """Return when `groups` will survive, and those of other shards; raises BadInput."""
        together = {**self._held.groups, **groups}
        self._replace(msgspec.structs.replace(self._held, groups=together))

    def close(self) -> None:
        """Nothing is held open."""

    def _replace(self, held: _Decided) -> None:
        try:
            replace_private(self._path, checked_json.encode(held))
        except OSError as error:
            raise BadInput(f"coordinator's record {self._path}: {error.strerror}") from None
        self._held = held


def _read(path: Path) -> _Decided:
    try:
        return checked_json.decode(path.read_bytes(), _Decided, required=True)
    except OSError as error:
        raise BadInput(f"coordinator's record {path}: {error.strerror}") from None
    except (*UNDECODABLE, BadInput) as error:
        raise BadInput(f"coordinator's record {path}: {error}") from None
