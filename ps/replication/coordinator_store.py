"""The coordinator's record on disk: its decisions, in one JSON file.

The record is written before a decision is sent, so every decision that was sent survives kill -9
and, if the disk keeps what it has acknowledged, power failure. The file is small, and replaced as a
whole; a checksum reveals damage (checked_json.py).

The file also holds the coordinator's key, so that a restarted coordinator proves the same identity.
Only the user that owns it can read it.
"""

from pathlib import Path

import msgspec

from ps.replication.coordinator import ShardGroup
from ps.security.keys import KeyPair
from ps.snapshots import checked_json
from ps.snapshots.private_files import check_private, replace_private
from shards.errors import UNDECODABLE, BadInput

RECORD = "coordinator.json"
"""The name of the record's file, in a folder of the job's own."""


class _Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: the job's id, the secret half of the key if one was made, and each
    shard's group.
    """

    job: str
    key: str | None = None
    groups: dict[int, ShardGroup] = {}


class CoordinatorStore:
    """The record in the file at `path`, created if missing. Not for use by two threads."""

    def __init__(self, path: Path, job: str) -> None:
        """Raises BadInput if the file is another job's, damaged, or of another kind."""
        self._path = path
        if path.exists():
            check_private(path, "coordinator's record")
            self._decided = _read(path)
        else:
            self._decided = _Decided(job)
            self._replace(self._decided)
        if self._decided.job != job:  # a job's id is a secret, so the error omits it
            raise BadInput(f"coordinator's record {path}", expected=f"job {job}", got="another's")

    def keys(self) -> KeyPair:
        """The coordinator's own key pair, made on the first call. Raises BadInput."""
        if self._decided.key is not None:
            return KeyPair.of(self._decided.key)
        keys = KeyPair.new()
        self._replace(msgspec.structs.replace(self._decided, key=keys.secret))
        return keys

    def load(self) -> dict[int, ShardGroup]:
        """The groups that were saved last; empty at first."""
        return dict(self._decided.groups)

    def save(self, groups: dict[int, ShardGroup]) -> None:
        """Save `groups` durably, and keep those of other shards; raises BadInput."""
        together = {**self._decided.groups, **groups}
        self._replace(msgspec.structs.replace(self._decided, groups=together))

    def close(self) -> None:
        """Do nothing: no file is held open."""

    def _replace(self, decided: _Decided) -> None:
        try:
            replace_private(self._path, checked_json.encode(decided))
        except OSError as error:
            raise BadInput(f"coordinator's record {self._path}: {error.strerror}") from None
        self._decided = decided


def _read(path: Path) -> _Decided:
    try:
        return checked_json.decode(path.read_bytes(), _Decided, required=True)
    except OSError as error:
        raise BadInput(f"coordinator's record {path}: {error.strerror}") from None
    except (*UNDECODABLE, BadInput) as error:
        raise BadInput(f"coordinator's record {path}: {error}") from None
