"""Decides which risks have lasted long enough to be reported.

A replicated job that has lost a copy, or its coordinator, usually has another within seconds, which
needs no report. A job that gets none, because no process can start or the coordinator's disk is
full, continues training as if nothing were wrong; the next death could then cost acknowledged
pushes.
"""

TOLD_AFTER_S = 30.0


class Risks:
    """Which reports are due for the risks of one job; pure."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._reported = False

    def due_message(self, risk: str, now: float) -> str | None:
        """The message to report now, given the current `risk` (empty: none); None if nothing new.

        `now` is in seconds. A lasting risk is reported once, and so is its end.
        """
        if not risk:
            over, self._since, self._reported = self._reported, None, False
            return "every shard has two copies again, and a coordinator" if over else None
        self._since = now if self._since is None else self._since
        if self._reported or now - self._since < TOLD_AFTER_S:
            return None
        self._reported = True
        return (
            f"for {TOLD_AFTER_S:g} s now {risk}; training continues, but another death may take"
            " back acknowledged pushes, or end the run"
        )
