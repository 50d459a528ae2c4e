"""What the copies of one shard and the coordinator say to each other, as frozen typed structs.

A shard that must survive is a *group*: a primary that serves, and a backup that holds the same
state. Which process is which is a *configuration*, numbered by its epoch and decided by the
coordinator alone. A process is named by its boot number, which no other life ever has.

Both directions are told by level, not by edge: a Beat says everything its sender knows about
itself, an Assignment everything that the coordinator has decided, and either may be lost, repeated
or overtaken without harm, because the next one says it again.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from shards.messages import Count, Name

Epoch = Count
MOST_EXPIRED = 1024


class Configuration(msgspec.Struct, frozen=True):
    """Who holds shard `shard` in `epoch`; processes by boot number."""

    shard: Count
    epoch: Epoch
    primary: Count
    backup: Count | None = None

    @property
    def members(self) -> set[int]:
        """Who has a part in it."""
        return {self.primary} if self.backup is None else {self.primary, self.backup}

    def holds(self, boot: int) -> bool:
        """Whether a process has a part in it."""
        return boot in self.members


class Beat(msgspec.Struct, frozen=True, tag="beat", forbid_unknown_fields=True):
    """I live. `epoch` is the newest configuration that I have accepted (0: none).

    `in_sync` is a primary's word that, in that epoch, its backup holds all it has committed and
    that it commits nothing any more without it.
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
    """Entry `position` of the primary's log, as it happened `at` its clock.

    Its frames are a message's header and payload; or, with `expired`, there are none, and the
    leases of those workers ran out, of at most `MOST_EXPIRED` in one entry.
    """

    epoch: Epoch
    position: Count
    at: float
    expired: Annotated[list[Name], Meta(max_length=MOST_EXPIRED)] = []


class Sync(msgspec.Struct, frozen=True, tag="sync", forbid_unknown_fields=True):
    """The primary's whole state after entry `position`, as it was `at` its clock.

    Frames: the saved ledger and counters, the stance in a move (quiesce.py), the weights, each
    slot; none before any are installed. Then what waits for others, each request's header and
    payload, together as many frames as `waiting` says of it.
    """

    epoch: Epoch
    position: Count
    slots: list[Name]
    at: float = 0.0
    waiting: list[Count] = []


class Replicated(msgspec.Struct, frozen=True, tag="replicated", forbid_unknown_fields=True):
    """A backup's answer: in `epoch` I hold everything up to `position`; None: I hold nothing."""

    epoch: Epoch
    position: Count | None


ToPeer = Replicate | Sync | Replicated
