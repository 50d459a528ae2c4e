"""The poison guard: gradients that must not be applied, and workers that keep sending them.

A push whose norm is not finite is never applied: one NaN would be in every weight that anybody
reads from then on. Norms are summed in float32, so one beyond 1.8e19 counts as infinite. A job may
also say how large the norm of a shard's part may be; what is larger is refused in the same way. A
worker that has been refused a number of times is quarantined: its pushes are not looked at any
more, whatever they hold and whichever life sends them.

How often stands in the ledger, so it is known to every later life of the shard, to its other copy,
and to the shards that a job moves to. So a refusal of this kind is a change, which is logged and
replicated as others are. A job that goes on from a snapshot begins to count anew: whoever resumes
it has seen to what was wrong, or sees the quarantine again.

This finds workers that are broken. One that means harm stays below every limit.
"""

from math import inf

import msgspec
from msgspec import structs

from shards import arguments
from shards.errors import GiveUp

_MOST_NORM = 1.8e19  # the root of the largest float32


class Guard(msgspec.Struct, frozen=True):
    """What a job tolerates: a norm of at most `max_norm`, None for any that is finite, and fewer
    than `quarantine_after` refusals of one worker's gradients.
    """

    max_norm: float | None = None
    quarantine_after: int = 16

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            expected, what = "a max_norm above 0", "guard"
            most = arguments.number(what, self.max_norm, least=0, expected=expected)
            if most == 0:
                raise arguments.wrong(what, expected, most)
            structs.force_setattr(self, "max_norm", most)
        after = arguments.whole("guard: quarantine_after", self.quarantine_after, 1)
        structs.force_setattr(self, "quarantine_after", after)

    @property
    def most_squares(self) -> float:
        """What a squared norm must not exceed, and what infinity and NaN do exceed."""
        return 1.7e308 if self.max_norm is None else self.max_norm**2

    def describe(self, squares: float, *, finite: bool) -> str:
        """What is wrong with a gradient of that squared norm, whose values are `finite` or not."""
        if not finite:
            return "holds NaN or infinity: expected finite gradients"
        norm = f"norm {squares**0.5:.4g}" if squares < inf else f"a norm beyond {_MOST_NORM:g}"
        return f"has {norm}: expected at most {min(self.max_norm or inf, _MOST_NORM):g}"

    def quarantines(self, refused: int) -> bool:
        """Whether a worker of whose gradients so many were refused is not heard any more."""
        return refused >= self.quarantine_after

    def check(self, worker: str, refused: int) -> None:
        """Raise GiveUp for a worker in quarantine."""
        if refused and self.quarantines(refused):
            raise GiveUp(
                f"worker {worker} is in quarantine: {refused} of its gradients were refused"
            )
