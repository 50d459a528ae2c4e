"""The settings of a job that change while it trains: which changes are valid, which are in force.

An operator changes the staleness bound, and the factor on the rates of all schedules. A change is
the whole new settings under a higher revision, so a repeated or late request changes nothing. Every
shard keeps the settings of the highest revision that it has received. An operator asks shard 0
first, which accepts only one change of each revision: so of two operators one finds that the other
was first, and all shards end with the same settings (ps/session/admin_plans.py).

A factor keeps the shape of a schedule: a policy that lowers the rate with the iteration continues
from the changed rate. A pull is judged by the bound that is in force when it is answered. Raising
the bound answers the parked pulls that may now pass. Lowering it takes back no answer, so for a
while two workers may be as far apart as the former bound allowed.

Not every job can follow every change. A bound below what the strategy needs would make workers wait
for themselves. Workers that take steps at a rate of their own would not follow the factor.
"""

from collections.abc import Sequence

from msgspec import structs

from shards import argument_checks
from shards.aggregation import Round
from shards.errors import BadInput
from shards.messages import LiveSettings
from shards.shard_state import ShardState
from shards.spec import ShardSpec

LIVE = ("staleness", "rate_factor")
"""The options of a job that an operator may change while it trains."""
MAX_FACTOR = 1e6
"""The largest factor on the rates."""


def check_factor(argument: str, value: object) -> float:
    """A factor on the rates; raises BadInput naming `argument`."""
    expected = f"more than 0, up to {MAX_FACTOR:g}"
    factor = argument_checks.number(argument, value, expected=expected)
    if not 0 < factor <= MAX_FACTOR:
        raise argument_checks.wrong(argument, expected, factor)
    return factor


def describe_settings(settings: LiveSettings) -> str:
    """Settings that an operator has changed, in words."""
    bound = "no staleness bound" if settings.bound is None else f"staleness bound {settings.bound}"
    return f"the job trains with {bound} and rate factor {settings.rate_factor:g} from now on"


def check_change(spec: ShardSpec, settings: LiveSettings) -> None:
    """Raise BadInput unless the shards of this spec can train with these settings."""
    bound = settings.bound
    got = "none" if bound is None else bound
    if isinstance(spec.merge, Round) and bound != 0:
        raise BadInput("staleness bound", expected="0, as pushes are merged in rounds", got=got)
    if spec.least_bound is None and bound is not None:
        raise BadInput("staleness bound", expected="none, as the strategy has none", got=got)
    if bound is not None and bound < (spec.least_bound or 0):
        raise BadInput(
            "staleness bound",
            expected=(
                f"at least {spec.least_bound}, below which workers of this "
                "strategy wait for themselves"
            ),
            got=got,
        )
    if spec.local_rate and settings.rate_factor != spec.rate_factor:
        raise BadInput(
            "rate factor",
            expected=(
                f"{spec.rate_factor:g}, as workers of this strategy take steps "
                "at a rate of their own"
            ),
            got=f"{settings.rate_factor:g}",
            hint="resume the job with another one",
        )


def unify_settings(states: Sequence[ShardState], spec: ShardSpec) -> Sequence[ShardState]:
    """The states, all with the settings of the highest revision that any of them has.

    A change may have reached some shards only when these states were saved. Settings that the
    shards of `spec` cannot train with are dropped.
    """
    newest = newest_settings(states)
    if newest is not None:
        try:
            check_change(spec, newest)
        except BadInput:
            # Dropped and not refused: the operator made the change for a job with other options.
            newest = None
    return [
        structs.replace(state, saved=structs.replace(state.saved, settings=newest))
        for state in states
    ]


def newest_settings(states: Sequence[ShardState]) -> LiveSettings | None:
    """The settings of the highest revision in these states; None if no operator changed any."""
    changed = [state.saved.settings for state in states if state.saved.settings is not None]
    return max(changed, key=lambda settings: settings.revision, default=None)
