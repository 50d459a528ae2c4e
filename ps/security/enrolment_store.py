"""Stores the enrolments of a shard that uses CURVE, so that a restarted shard knows its workers.

The workers reconnect to the same port with the keys that the earlier process admitted, and need not
join again. The file is stored next to the WAL or the autosaves, is readable by its user only, and
holds public keys only.

A job's new driver has new keys, so a file of its earlier ones admits nobody.
"""

from pathlib import Path

import msgspec

from ps.logs import logger
from ps.security.authorization import Admission, Enrolments
from ps.snapshots import checked_json
from ps.snapshots.secure_files import replace_private
from shards.errors import UNDECODABLE, BadInput, GiveUp

_NAME = "joined"
_LOG = logger(__name__)  # a shard's process adds the shard


class _StoredEnrolments(msgspec.Struct, frozen=True):
    admission: Admission
    enrolments: Enrolments


class EnrolmentStore:
    """The enrolments in a shard's `folder`; the caller holds its lock.

    `needed`: reject an enrolment that cannot be stored. A shard that restarts from autosaves admits
    the worker all the same: if the restarted shard does not know the worker, it joins again.
    """

    def __init__(self, folder: Path, *, needed: bool = True) -> None:
        self.path = folder / _NAME
        self._needed = needed
        self._admission: Admission | None = None

    def read(self, admission: Admission) -> Enrolments | None:
        """The enrolments written last under this admission, or None. Raises BadInput."""
        self._admission = admission
        try:
            stored = checked_json.decode(self.path.read_bytes(), _StoredEnrolments)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadInput(f"joined workers {self.path}: {error.strerror}") from None
        except (*UNDECODABLE, BadInput) as error:
            raise BadInput(f"joined workers {self.path}: {error}") from None
        return stored.enrolments if stored.admission == admission else None

    def write(self, enrolments: Enrolments) -> None:
        """Store enrolments durably.

        On failure the earlier file stays; raises GiveUp if storing is `needed`.
        """
        assert self._admission is not None, "call `read` first"
        content = checked_json.encode(_StoredEnrolments(self._admission, enrolments))
        try:
            replace_private(self.path, content)
        except OSError as error:
            what = f"joined workers {self.path}: {error.strerror}"
            if self._needed:
                raise GiveUp(what) from None
            _LOG.warning("%s; after a death of the shard they join again", what)
