"""The course of a trial's rate, in shares of its run.

    fixed                          the rate throughout
    step:at=0.5/0.75,gamma=0.1     times gamma at each of these shares
    cosine                         from the rate to 0 along half a cosine

A schedule counts the steps of a worker, as the shards do: the gradients so far over the number of
workers. Where workers differ in speed, each one's own steps reach its own end.
"""

from math import cos, pi

from shards import argument_checks
from shards.errors import BadInput
from shards.schedules import Fixed, MultiStep, RatePolicy, Schedule

FIXED = "fixed"
_EXPECTED = "fixed, cosine or step:at=0.5/0.75,gamma=0.1"


class Cosine(RatePolicy, frozen=True, tag="cosine", kw_only=True):
    """`base_rate * (1 + cos(pi * iteration / max_iteration)) / 2`, and 0 from `max_iteration` on.

    Loshchilov and Hutter 2017, arXiv 1608.03983, without restarts.
    """

    max_iteration: int

    def rate(self, iteration: int) -> float:
        share = min(1.0, iteration / self.max_iteration)
        return float(self.base_rate * (1 + cos(pi * share)) / 2)


def schedule_over(text: str, rate: float, steps: int) -> Schedule:
    """The schedule in a text, over a run in which a worker takes `steps`; raises BadInput."""
    kind, _, options = argument_checks.text("schedule", text, _EXPECTED).partition(":")
    if kind == FIXED and not options:
        return Fixed(base_rate=rate)
    if kind == "cosine" and not options:
        # The shards know a schedule by its method alone, so it need not be of Caffe's union.
        return Cosine(base_rate=rate, max_iteration=max(1, steps))  # type: ignore[return-value]
    if kind == "step":
        given = dict(option.partition("=")[::2] for option in options.split(","))
        if set(given) == {"at", "gamma"}:
            at = [_number("at", share) for share in given["at"].split("/")]
            if at != sorted(at) or not all(0 < share < 1 for share in at):
                raise BadInput(
                    "schedule: at", expected="rising shares between 0 and 1", got=given["at"]
                )
            return MultiStep(
                base_rate=rate,
                gamma=_number("gamma", given["gamma"]),
                steps=tuple(round(share * steps) for share in at),
            )
    raise BadInput("schedule", expected=_EXPECTED, got=f"{text!r}")


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadInput(f"schedule: {option}", expected="a number", got=f"{text!r}") from None
