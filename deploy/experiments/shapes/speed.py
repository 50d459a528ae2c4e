"""Shape 10: the speed of synchronous and asynchronous updates (Dutta et al. 2018)."""

from msgspec import structs

from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.shapes.base import (
    Bench,
    Check,
    Origin,
    Shape,
    errors,
    judge_rule,
    list_figures,
    positive,
)
from deploy.experiments.statistics import interval_of_pairs
from deploy.experiments.timing_simulation import TimingSimulation
from deploy.experiments.trials import Trial

WORKERS = 8
_EARLY = 0.05


def harmonic(count: int) -> float:
    """1 + 1/2 + ... + 1/count, the mean of the longest of `count` exponential times of mean 1."""
    return sum(1 / k for k in range(1, count + 1))


def judge(bench: Bench, control: bool) -> list[Check]:
    """Exponential step times of mean 1, eight workers; the control has fixed times.

    Accept: the mean steps per update of sync, K-sync (late workers cancel) and K-batch-async within
    2 % of H_W, H_W - H_(W-K) and K/W. On mlp, at rates tuned for the end: asynchronous has the
    smaller error at a twentieth of the time, synchronous at the end; both by the paired interval.
    """
    times = StepTimes(mean_s=1.0, law=Law.FIXED if control else Law.EXPONENTIAL)
    cluster = ClusterModel(workers=WORKERS, times=times)
    measured = speeds(cluster, bench.pick(10_000, 50_000)) if bench.measures else []
    return [*measured, *_errors(bench, cluster)]


def speeds(cluster: ClusterModel, rounds: int) -> list[Check]:
    """The steps per update, measured without gradients over so many steps of each worker."""
    known = [1, 2, 4, 6, 8]
    sync = [harmonic(WORKERS) - harmonic(WORKERS - k) for k in known]
    batch = [k / WORKERS for k in known]
    found_sync = [_per_update(cluster, f"bsp:b={WORKERS - k}", 0, rounds, True) for k in known]
    found_batch = [_per_update(cluster, f"fedbuff:k={k},window=1", None, rounds) for k in known]
    dropped = _per_update(cluster, "bsp:b=4", 0, rounds)
    rows = [
        ("K-sync: H_W - H_(W-K) steps per update (K = W: sync, H_W)", sync, found_sync),
        ("K-batch-async: K/W steps per update", batch, found_batch),
    ]
    checks = []
    for claim, expected, figures in rows:
        off = max(abs(is_ / was - 1) for is_, was in zip(figures, expected, strict=True))
        measured = f"{list_figures(known, figures)}; at most {off:.1%} off"
        if expected is sync:
            measured += f"; K = 4 where late workers finish their step: {dropped:.3g}"
        checks.append(
            Check(
                claim,
                f"by K: {list_figures(known, expected)}",
                measured,
                judge_rule(off <= 0.02),
                Origin.OWN,
            )
        )
    return checks


def _per_update(
    cluster: ClusterModel, strategy: str, bound: int | None, rounds: int, cancel: bool = False
) -> float:
    trial = Trial(workload="quad", strategy=strategy, staleness=bound, cluster=cluster)
    done = TimingSimulation(trial.job(), cancel=cancel).run(rounds * cluster.workers)
    return done.seconds / done.updates


def _errors(bench: Bench, cluster: ClusterModel) -> list[Check]:
    seconds = bench.pick(1200, 5000)
    sync = round(WORKERS * seconds / harmonic(WORKERS))
    both = [
        Trial(strategy="bsp", gradients=sync, cluster=cluster),
        Trial(strategy="asp:scale=1", gradients=WORKERS * seconds, cluster=cluster),
    ]
    tested = bench.pick(2000, 10_000)
    both = [
        structs.replace(trial, tested=tested, look_every=trial.gradients // 40) for trial in both
    ]
    rates = bench.tune(both)
    tuned = [
        structs.replace(trial, rate=rate.best) for trial, rate in zip(both, rates, strict=True)
    ]
    slow, fast = bench.run(tuned, bench.pick(5, 10))
    early = [[result.error_at(_EARLY * seconds) for result in results] for results in (slow, fast)]
    first = interval_of_pairs(early[0], early[1])
    last = interval_of_pairs(errors(fast), errors(slow))
    published = "async is best early, sync at the end"
    return [
        Check("mlp, early: error of sync less async > 0", published, str(first), positive(first)),
        Check(
            "mlp, at the end: error of async less sync > 0", published, str(last), positive(last)
        ),
    ]


SHAPE = Shape(
    10,
    "the speed of synchronous and asynchronous updates",
    "Dutta et al. 2018, arXiv 1803.01113",
    judge,
)
