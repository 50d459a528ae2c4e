"""Who has joined a shard that speaks CURVE, on disk: for the next life of a shard that comes back.

Its workers find it on its port, show the keys that the last life let in, and are known; nobody has
to join again. The file lies beside the log or the saves, is its user's alone, and holds public keys
only.

A job's new driver has new keys, and a book of its former ones lets nobody in.
"""

from pathlib import Path

import msgspec

from ps.security.authorization import Admission, Enrolments
from ps.snapshots import checked_json
from ps.snapshots.secure_files import replace_private
from shards.errors import UNDECODABLE, BadInput, GiveUp

_NAME = "joined"


class _Page(msgspec.Struct, frozen=True):
    admission: Admission
    enrolments: Enrolments


class EnrolmentStore:
    """The book in a shard's `folder`, whose lock the caller holds.

    `needed`: who cannot be written down is not let in. A shard that may go back to what it saved
    last lets them in: its next life may not know them, and they join it as others do.
    """

    def __init__(self, folder: Path, *, needed: bool = True) -> None:
        self.path = folder / _NAME
        self._needed = needed
        self._admission: Admission | None = None

    def read(self, admission: Admission) -> Enrolments | None:
        """What was written last under this admission; None where nothing was. Raises BadInput."""
        self._admission = admission
        try:
            page = checked_json.decode(self.path.read_bytes(), _Page)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise BadInput(f"joined workers {self.path}: {error.strerror}") from None
        except (*UNDECODABLE, BadInput) as error:
            raise BadInput(f"joined workers {self.path}: {error}") from None
        return page.enrolments if page.admission == admission else None

    def write(self, enrolments: Enrolments) -> None:
        """Return when it will survive; where it cannot be, the last one stays: raises GiveUp if it
        is needed."""
        assert self._admission is not None, "it was read first"
        content = checked_json.encode(_Page(self._admission, enrolments))
        try:
            replace_private(self.path, content)
        except OSError as error:
            if self._needed:
                raise GiveUp(f"joined workers {self.path}: {error.strerror}") from None
