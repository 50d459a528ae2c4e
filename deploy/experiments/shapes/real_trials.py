"""A small trial of each shape's set-up that also runs for real: what simulator and run must share.

Rates are such that the runs do not oscillate, so that errors can be compared. Steps are so long
that machines with two cores do not compute for most of their time.
"""

from msgspec import structs

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.trials import Trial
from shards.errors import BadInput

LINK_MS = 20.0
_MEAN_S = 0.04
_EVEN = StepTimes(mean_s=_MEAN_S, cv=0.1)
_SHORT = StepTimes(mean_s=_MEAN_S / 4, cv=0.1)
_UNEVEN = StepTimes(mean_s=_MEAN_S, cv=0.45)
_RANDOM = StepTimes(mean_s=_MEAN_S, law=Law.EXPONENTIAL)
_SLOW = StepTimes(mean_s=_MEAN_S, cv=0.1, slow_share=0.05, slow_factor=6.0)
_MOMENTUM = "momentum:momentum=0.9"


def _trial(strategy: str, rate: float, times: StepTimes = _EVEN, **more: object) -> Trial:
    """A shape's strategy with six workers behind a link."""
    cluster = ClusterModel(workers=6, times=times, link=f"rtt={LINK_MS:g}ms")
    usual = Trial(strategy=strategy, rate=rate, cluster=cluster, batch=64, gradients=900)
    return structs.replace(usual, **more)


REAL_TRIALS: dict[int, Trial] = {
    1: _trial("softsync:n=3", 0.02, rule=_MOMENTUM),
    2: _trial("ssp", 0.1, _UNEVEN, staleness=2),
    3: _trial("ssp", 0.1, _UNEVEN, staleness=4, workload="l1", rule="proximal"),
    4: _trial("sparknet:tau=5", 0.1),
    5: _trial("easgd:tau=4", 0.1),
    6: _trial("dc_asgd:adaptive=true", 0.1),
    7: _trial("async_diloco:h=5", 0.008, _SHORT, workload="charlm", batch=32, gradients=2400),
    8: _trial("asp", 0.1, _RANDOM),
    9: _trial("bsp:b=1", 0.1, _SLOW),
    10: _trial("fedbuff:k=3,window=1", 0.1, _RANDOM),
    11: _trial("stale_rate", 0.1),
    12: _trial("asp", 0.02, workload="deep:2", rule=_MOMENTUM),
    13: _trial("asp", 0.1, StepTimes(mean_s=_MEAN_S, law=Law.FIXED)),
}
"""The trial of each shape, by its number."""


def real_trial(number: int, stretch: float = 1.0) -> Trial:
    """A shape's trial as it runs through Spark, with steps and round trips `stretch` times as long.

    The proximal rule is the experiments' own, which shards in processes of their own do not know;
    SGD takes its place. Raises BadInput for a shape that there is not.
    """
    if number not in REAL_TRIALS:
        raise BadInput("shape", expected=f"one of 1 to {max(REAL_TRIALS)}", got=number)
    trial = REAL_TRIALS[number]
    if trial.rule == "proximal":
        trial = structs.replace(trial, rule="sgd")
    times = structs.replace(trial.cluster.times, mean_s=trial.cluster.times.mean_s * stretch)
    link = f"rtt={LINK_MS * stretch:g}ms"
    return structs.replace(trial, cluster=structs.replace(trial.cluster, times=times, link=link))
