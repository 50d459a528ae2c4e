"""The gradient guard: refuses poisonous gradients, and quarantines workers that keep sending them.

A push with an infinite or NaN norm is never applied: one NaN would spread to every weight read from
then on. Norms are summed in float32, so a norm beyond 1.8e19 counts as infinite. A table may also
limit the norm of a shard's section of a gradient; a larger one is refused in the same way, and with
it the whole push. After a number of refusals a worker is quarantined: its pushes are no longer
examined, whatever they hold and whichever incarnation of the worker sends them. Where tables differ
in that number, the smallest counts.

The ledger counts the refusals, so every later incarnation of the shard, its other copy, and the
shards of a reshard know them. So such a refusal is a change, which is logged and replicated like
others. A job that resumes from a snapshot counts from zero: either the user has mended the fault,
or the quarantine comes again.

The guard finds broken workers. A malicious one can stay below every limit.
"""

from math import inf

import msgspec
from msgspec import structs

from shards import argument_checks
from shards.errors import GiveUp
from shards.named_fields import NamedFields

_MAX_NORM = 1.8e19  # the root of the largest float32


class Guard(msgspec.Struct, frozen=True, metaclass=NamedFields):
    """A table's limits: the norm of a shard's section of a gradient, and refusals of one worker.

    `max_norm` None allows any finite norm. A worker is quarantined at `quarantine_after` refusals.
    """

    max_norm: float | None = None
    quarantine_after: int = 16

    def __post_init__(self) -> None:
        if self.max_norm is not None:
            expected, argument = "a max_norm above 0", "guard"
            most = argument_checks.number(argument, self.max_norm, least=0, expected=expected)
            if most == 0:
                raise argument_checks.wrong(argument, expected, most)
            structs.force_setattr(self, "max_norm", most)
        after = argument_checks.whole("guard: quarantine_after", self.quarantine_after, 1)
        structs.force_setattr(self, "quarantine_after", after)

    @property
    def max_squares(self) -> float:
        """The largest squared norm accepted; it is finite, so infinity and NaN never pass `<=`."""
        # Finite also without a limit: `inf <= inf` would accept an infinite gradient.
        return 1.7e308 if self.max_norm is None else self.max_norm**2

    def describe(self, squares: float, *, finite: bool) -> str:
        """The fault of a gradient with this squared norm; `finite`: whether all its values are."""
        if not finite:
            return "holds NaN or infinity: expected finite gradients"
        norm = f"norm {squares**0.5:.4g}" if squares < inf else f"a norm beyond {_MAX_NORM:g}"
        return f"has {norm}: expected at most {min(self.max_norm or inf, _MAX_NORM):g}"

    def quarantines(self, refused: int) -> bool:
        """Return whether a worker with this number of refused gradients is quarantined."""
        return refused >= self.quarantine_after

    def check(self, worker: str, refused: int) -> None:
        """Raise GiveUp if a worker with this number of refused gradients is in quarantine."""
        if refused and self.quarantines(refused):
            raise GiveUp(
                f"worker {worker} is in quarantine: {refused} of its gradients were refused"
            )
