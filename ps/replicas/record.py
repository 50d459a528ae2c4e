"""The coordinator's record on disk: what it has decided, in one SQLite file.

It is written before anyone is told, so whatever was told survives kill -9 and, where the disk keeps
what it has acknowledged, power failure: the log is flushed at each commit. A row is one shard's.

The coordinator's key lies in it, too, so that each of its lives proves the same one. The file is
its user's alone.
"""

import sqlite3
from pathlib import Path

import msgspec

from ps.replicas.coordinator import Group
from ps.security.keys import KeyPair
from ps.storage.private import check_private
from shards.errors import UNDECODABLE, BadInput

RECORD = "coordinator.sqlite"
"""The file's name, in a folder of the job's own."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS job (id TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS key (secret TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS groups (shard INTEGER PRIMARY KEY, decided BLOB NOT NULL);
"""


class Record:
    """The file at `path`, made if it is not there. Used by one thread at a time."""

    def __init__(self, path: Path, job: str) -> None:
        """Raises BadInput when the file is another job's, or none of this kind."""
        self._path = path
        try:
            path.touch(mode=0o600)
            check_private(path, "coordinator's record")
        except OSError as error:
            raise BadInput(f"coordinator's record {path}: {error.strerror}") from None
        try:
            self._file = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.executescript(_SCHEMA)
            kept = self._file.execute("SELECT id FROM job").fetchone()
            if kept is None:
                self._file.execute("INSERT INTO job VALUES (?)", (job,))
        except sqlite3.Error as error:
            raise BadInput(f"coordinator's record {path}: {error}") from None
        if kept is not None and kept[0] != job:
            self.close()  # whose it is stays a secret
            raise BadInput(f"coordinator's record {path}: expected job {job}, got another's")

    def keys(self) -> KeyPair:
        """The coordinator's own, made when they are wanted first. Raises BadInput."""
        try:
            kept = self._file.execute("SELECT secret FROM key").fetchone()
            if kept is not None:
                return KeyPair.of(kept[0])
            made = KeyPair.new()
            self._file.execute("INSERT INTO key VALUES (?)", (made.secret,))
        except sqlite3.Error as error:
            raise BadInput(f"coordinator's record {self._path}: {error}") from None
        return made

    def load(self) -> dict[int, Group]:
        """What was saved last; empty at first. Raises BadInput when it cannot be read."""
        try:
            rows = self._file.execute("SELECT shard, decided FROM groups").fetchall()
            return {shard: msgspec.msgpack.decode(row, type=Group) for shard, row in rows}
        except (sqlite3.Error, *UNDECODABLE) as error:
            raise BadInput(f"coordinator's record {self._path}: {error}") from None

    def save(self, groups: dict[int, Group]) -> None:
        """Return when `groups` will survive."""
        rows = [(shard, msgspec.msgpack.encode(group)) for shard, group in groups.items()]
        with self._file:
            self._file.execute("BEGIN")
            self._file.executemany("INSERT OR REPLACE INTO groups VALUES (?, ?)", rows)

    def close(self) -> None:
        self._file.close()
