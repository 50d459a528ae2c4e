"""The messages between the copies of one shard and the coordinator, as frozen typed structs.

A shard that must survive is a *group*: a primary that serves, and a backup that holds the same
state. Which process is which is a *configuration*, numbered by its epoch and decided by the
coordinator alone. A process is named by its boot number, which no other incarnation ever has.

Both directions are level-triggered, not edge-triggered: a Beat holds everything that its sender
knows about itself, an Assignment everything that the coordinator has decided. Either may be lost,
repeated or overtaken without harm, because the next one repeats it.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from shards.messages import Count, Name, Piece
from shards.tables import MAX_TABLES

Epoch = Count
MAX_EXPIRED = 1024


class Configuration(msgspec.Struct, frozen=True):
    """The processes, by boot number, that hold shard `shard` in `epoch`."""

    shard: Count
    epoch: Epoch
    primary: Count
    backup: Count | None = None

    @property
    def members(self) -> set[int]:
        """The boot numbers of the primary and the backup, if there is one."""
        return {self.primary} if self.backup is None else {self.primary, self.backup}

    def holds(self, boot: int) -> bool:
        """Return whether process `boot` is the primary or the backup."""
        return boot in self.members


class Beat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """A sign of life. `epoch` is the newest configuration that the sender has accepted (0: none).

    `in_sync` is a primary's promise that, in that epoch, its backup holds everything committed and
    that nothing more is committed without it.
    """

    shard: Count
    boot: Count
    epoch: Epoch
    in_sync: bool = False


class Assignment(msgspec.Struct, frozen=True, tag="assignment", forbid_unknown_fields=True):
    """The coordinator's decision. A primary serves under it only once it is `confirmed`."""

    configuration: Configuration
    confirmed: bool


class Replicate(msgspec.Struct, frozen=True, tag="replicate", forbid_unknown_fields=True):
    """Entry `position` of the primary's replication log; `at` is the primary's clock in seconds.

    The frames are a message's header and payload. Without any the entry is a tick's: the leases of
    the workers `expired`, at most `MAX_EXPIRED`, ran out, and the grace for reports on the tables
    `merges` ended.
    """

    epoch: Epoch
    position: Count
    at: float
    expired: Annotated[list[Name], Meta(max_length=MAX_EXPIRED)] = []
    merges: Annotated[list[Name], Meta(max_length=MAX_TABLES)] = []


class Sync(msgspec.Struct, frozen=True, tag="sync", forbid_unknown_fields=True):
    """A piece of the primary's whole state after entry `position` (state_pieces.py, replica.py)."""

    epoch: Epoch
    position: Count
    piece: Piece


class Replicated(msgspec.Struct, frozen=True, tag="replicated", forbid_unknown_fields=True):
    """A backup's answer: in `epoch` it holds everything up to `position`.

    With `position` None it holds nothing but the first `pieces` of a state.
    """

    epoch: Epoch
    position: Count | None
    pieces: Count = 0


ToPeer = Replicate | Sync | Replicated
