"""The coordinator's record on disk: what it has decided, in one JSON file.

It is written before anyone is told, so whatever was told survives kill -9 and, where the disk keeps
what it has acknowledged, power failure. It is small, and replaced whole; a checksum tells a damaged
one (checked_json.py).

The coordinator's key lies in it, too, so that each of its lives proves the same one. The file is
its user's alone.
"""

from pathlib import Path

import msgspec

from ps.replicas.coordinator import Group
from ps.security.keys import KeyPair
from ps.storage import checked_json
from ps.storage.private import check_private, replace_private
from shards.errors import UNDECODABLE, BadInput, GiveUp

RECORD = "coordinator.json"
"""The file's name, in a folder of the job's own."""


class _Decided(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the file holds: the job's id, the key's secret half if it was wanted, and each shard's
    group.
    """

    job: str
    key: str | None = None
    groups: dict[int, Group] = {}


class Record:
    """The file at `path`, made if it is not there. Used by one thread at a time."""

    def __init__(self, path: Path, job: str) -> None:
        """Raises BadInput when the file is another job's, damaged, or none of this kind."""
        self._path = path
        try:
            if path.exists():
                check_private(path, "coordinator's record")
                self._held = checked_json.decode(path.read_bytes(), _Decided, required=True)
            else:
                self._replace(_Decided(job))
        except OSError as error:
            raise BadInput(f"coordinator's record {path}: {error.strerror}") from None
        except (*UNDECODABLE, GiveUp) as error:
            text = str(error).removeprefix(f"coordinator's record {path}: ")
            raise BadInput(f"coordinator's record {path}: {text}") from None
        if self._held.job != job:  # whose it is stays a secret
            raise BadInput(f"coordinator's record {path}: expected job {job}, got another's")

    def keys(self) -> KeyPair:
        """The coordinator's own, made when they are wanted first. Raises GiveUp."""
        if self._held.key is not None:
            return KeyPair.of(self._held.key)
        made = KeyPair.new()
        self._replace(msgspec.structs.replace(self._held, key=made.secret))
        return made

    def load(self) -> dict[int, Group]:
        """What was saved last; empty at first."""
        return dict(self._held.groups)

    def save(self, groups: dict[int, Group]) -> None:
        """Return when `groups` will survive, and those of other shards; raises GiveUp."""
        together = {**self._held.groups, **groups}
        self._replace(msgspec.structs.replace(self._held, groups=together))

    def close(self) -> None:
        """Nothing is held open."""

    def _replace(self, held: _Decided) -> None:
        try:
            replace_private(self._path, checked_json.encode(held))
        except OSError as error:
            raise GiveUp(f"coordinator's record {self._path}: {error.strerror}") from None
        self._held = held
