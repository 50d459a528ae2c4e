"""Errors on the wire: what a refusal says of an error, and the error that it is at the other end.

A caller catches by remedy, and the remedy is what travels. Of two kinds of which one is the other's
child, the child stands first.
"""

from shards.errors import (
    BadInput,
    BadMessage,
    DownpourError,
    Fenced,
    Gap,
    GiveUp,
    Moved,
    Resynchronise,
    Retry,
    WrongBuild,
)
from shards.messages import Message, Refusal, Remedy

_LONGEST = 256

_REMEDIES: tuple[tuple[type[DownpourError], Remedy], ...] = (
    (Gap, Remedy.GAP),
    (Moved, Remedy.MOVED),
    (Resynchronise, Remedy.RESYNCHRONISE),
    (Retry, Remedy.RETRY),
    (Fenced, Remedy.FENCED),
    (WrongBuild, Remedy.WRONG_BUILD),
    (BadMessage, Remedy.BAD_MESSAGE),
    (BadInput, Remedy.BAD_INPUT),
    (DownpourError, Remedy.GIVE_UP),
)
_ERRORS: dict[Remedy, type[DownpourError]] = {
    **{remedy: kind for kind, remedy in _REMEDIES},
    Remedy.GAP: Resynchronise,  # the refusal's `expected` says what a Gap would
    Remedy.MOVED: Resynchronise,  # its frame says what a Moved would
    Remedy.GIVE_UP: GiveUp,
}


def refusal(request: int, shard: int, boot: int, error: DownpourError) -> Refusal:
    """What `shard` answers to a request that fails with `error`, whose text is told in one line."""
    remedy = next(remedy for kind, remedy in _REMEDIES if isinstance(error, kind))
    expected = error.expected if isinstance(error, Gap) else 0
    text = " ".join(str(error).split())[:_LONGEST]
    return Refusal(request, shard, boot, remedy, text, expected)


def changed_nothing(answer: Message) -> bool:
    """Whether the request that is answered like this has left everything as it was.

    A gradient that the guard refuses has not: that is counted (gradient_guard.py).
    """
    return isinstance(answer, Refusal) and answer.remedy is not Remedy.BAD_INPUT


def error_of(refusal: Refusal) -> DownpourError:
    """The error that a refusal stands for."""
    return _ERRORS[refusal.remedy](refusal.text)
