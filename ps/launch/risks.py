"""Which risks last long enough to be told.

A replicated job that has lost a copy, or its coordinator, has another within seconds as a rule, and
nobody needs to know. One that gets none, because no process can start or the coordinator's disk is
full, trains on as if nothing were wrong; the next death would then cost what was acknowledged.
"""

TOLD_AFTER_S = 30.0


class Risks:
    """What is to be told of the risks of one job; pure."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._told = False

    def due_message(self, risk: str, now: float) -> str | None:
        """What to tell now that there is this `risk`, or none; None if that is nothing new.

        `now` is in seconds. A risk is told once when it has lasted, and so is its end.
        """
        if not risk:
            over, self._since, self._told = self._told, None, False
            return "every shard has two copies again, and a coordinator" if over else None
        self._since = now if self._since is None else self._since
        if self._told or now - self._since < TOLD_AFTER_S:
            return None
        self._told = True
        return (
            f"for {TOLD_AFTER_S:g} s now {risk}; training goes on, but another death may take"
            " back acknowledged pushes, or end the run"
        )
