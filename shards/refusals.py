"""Errors on the wire: converts an error to a Refusal, and a Refusal back to an error.

Callers catch errors by remedy, so the remedy is what travels. In `_REMEDIES` a subclass comes
before its base class, because the first match is taken.
"""

from shards.errors import (
    BadInput,
    BadMessage,
    DownpourError,
    Fenced,
    Full,
    Gap,
    GiveUp,
    Mismatch,
    Moved,
    Resynchronise,
    Retry,
)
from shards.messages import LONGEST_TEXT, Message, Quiesced, Refusal, Remedy, SettingsInForce

_REMEDIES: tuple[tuple[type[DownpourError], Remedy], ...] = (
    (Gap, Remedy.GAP),
    (Moved, Remedy.MOVED),
    (Resynchronise, Remedy.RESYNCHRONISE),
    (Retry, Remedy.RETRY),
    (Fenced, Remedy.FENCED),
    (Mismatch, Remedy.MISMATCH),
    (BadMessage, Remedy.BAD_MESSAGE),
    (BadInput, Remedy.BAD_INPUT),
    (Full, Remedy.FULL),
    (DownpourError, Remedy.GIVE_UP),
)
_ERRORS: dict[Remedy, type[DownpourError]] = {
    **{remedy: kind for kind, remedy in _REMEDIES},
    Remedy.GAP: Resynchronise,  # the Refusal's `expected` has what a Gap would hold
    Remedy.MOVED: Resynchronise,  # its frame has what a Moved would hold
    Remedy.GIVE_UP: GiveUp,
}


def refusal(request: int, shard: int, boot: int, error: DownpourError) -> Refusal:
    """The answer of `shard` to a request that failed with `error`; its text becomes one line."""
    remedy = next(remedy for kind, remedy in _REMEDIES if isinstance(error, kind))
    expected = error.expected if isinstance(error, Gap) else 0
    # Cut, because a refusal has to fit into a header whatever text the error quotes.
    text = " ".join(str(error).split())[:LONGEST_TEXT]
    return Refusal(request, shard, boot, remedy, text, expected)


def leaves_state_unchanged(answer: Message) -> bool:
    """Return whether this answer shows that its request changed no state.

    A gradient that the guard refuses does change it: the refusal is counted (gradient_guard.py).
    """
    if isinstance(answer, Quiesced):
        return answer.busy_s > 0
    if isinstance(answer, SettingsInForce):
        return not answer.changed
    return isinstance(answer, Refusal) and answer.remedy is not Remedy.BAD_INPUT


def error_of(refusal: Refusal) -> DownpourError:
    """The error to raise for a Refusal at the receiving end."""
    error = _ERRORS[refusal.remedy](refusal.text)
    error.shard = refusal.shard
    return error
