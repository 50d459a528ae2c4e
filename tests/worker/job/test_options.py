"""The options of a training run: what they must satisfy together, and what they stand for."""

from typing import Any

import msgspec
import pytest

from ps.durability import Durability
from ps.session.compression import Compression
from ps.snapshots.catalog import Retention
from shards.errors import BadInput
from tests.support.ones_job import TABLE, ones_job
from worker.job.options import (
    LinkOptions,
    ShardRuntime,
    SnapshotPolicy,
    TrainingPlan,
    TrainOptions,
    WorkerRuntime,
)
from worker.job.training_job import apply_strategy
from worker.strategies import BSP, STRATEGIES, Downpour, LocalSGD


@pytest.mark.parametrize(
    ("every", "interval"),
    [
        (None, (0, 0.0)),
        (500, (500, 0.0)),
        ("500", (500, 0.0)),
        ("30s", (0, 30.0)),
        ("2h", (0, 7200.0)),
    ],
)
def test_snapshots_by_count_or_by_time(every: Any, interval: tuple[int, float]) -> None:
    """A number is of iterations, also as text; with a unit it is a time."""
    assert SnapshotPolicy(snapshot_every=every).interval() == interval


def test_which_snapshots_are_kept() -> None:
    """All, or so many, or those of a time."""
    assert SnapshotPolicy().retention() == Retention()
    policy = SnapshotPolicy(snapshot_keep=3, snapshot_keep_for="2d")
    assert policy.retention() == Retention(3, 2 * 86400.0)


def test_a_strategy_and_its_options() -> None:
    """A name or a value; an option of another strategy is refused, as a shorter bound is."""
    assert TrainingPlan(n_push=2).build_strategy() == Downpour(n_push=2)
    plan = TrainingPlan(strategy=Downpour(n_push=3), n_fetch=2)
    assert plan.build_strategy() == Downpour(n_push=3, n_fetch=2)
    assert TrainingPlan(strategy="bsp").build_strategy() == BSP()
    for strategy in ("bsp", BSP()):
        with pytest.raises(BadInput, match=r"^n_push 2: strategy bsp has no such option$"):
            TrainingPlan(strategy=strategy, n_push=2)
    with pytest.raises(BadInput, match="pushing every 9 steps needs at least 8, got 4"):
        TrainingPlan(n_push=9, staleness=4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_without_a_bound_the_strategy_has_its_own(strategy: str) -> None:
    """Each strategy runs without `staleness`; a given bound stays, None for none included."""
    plan = TrainingPlan(strategy=strategy)
    assert plan.staleness == STRATEGIES[strategy].usual_bound
    assert TrainingPlan(n_push=9, n_fetch=1).staleness == 8
    assert TrainingPlan(n_push=9, n_fetch=1, prefetch=True).staleness == 9
    assert TrainingPlan(staleness=None).staleness is None


def test_the_device_of_the_solver() -> None:
    """It counts unless one is set."""
    assert str(WorkerRuntime().build_device("cpu")) == "cpu"
    assert str(WorkerRuntime(device="gpu:1").build_device("cpu")) == "gpu:1"


def test_links() -> None:
    """Text for what a program has as values."""
    links = LinkOptions(link="rtt=10ms", compress="int8", compress_pull="bf16")
    model = links.build_link()
    assert model is not None
    assert model.rtt_s == 0.01
    assert links.build_compression() == Compression.parse("int8", "bf16")


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"port": 65535, "shards": 2}, "port: expected 0 to 65534, got 65535"),
        ({"bind": "::1"}, "bind: expected an IPv4 address, got '::1'"),
        ({"link": "rtt=1ms", "transport": "shm"}, "link: expected transport tcp or auto, got shm"),
        (
            {"link": "rtt=1ms", "durability": "replicated"},
            "link: expected shards with one copy each, got replicated ones",
        ),
        (
            {"port": 7000, "durability": "replicated"},
            "durability replicated: port: expected 0, for free ports, got 7000",
        ),
        (
            {"silence_s": 10, "durability": "replicated"},
            "silence_s: expected at least 0.2 s, .* got 10",
        ),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], line: str) -> None:
    """The first of them is named, and what it would go with."""
    with pytest.raises(BadInput, match=f"^{line}$"):
        TrainOptions(**options)


def test_autosaves_are_for_memory() -> None:
    """Other levels lose nothing that one would bring back."""
    assert ShardRuntime(rollback_s=3).autosave_s == 3
    assert ShardRuntime(durability=Durability.LOGGED).autosave_s == 0


def test_a_factor_on_the_rate() -> None:
    """Shards or workers apply it, as the strategy wants it; one with a rate of its own among its
    options refuses it."""
    for factor in (0, -1.0, 2e6, float("nan")):
        with pytest.raises(BadInput, match="rate_factor: expected more than 0"):
            TrainingPlan(rate_factor=factor)
    with pytest.raises(BadInput, match="strategy diloco has a rate of its own"):
        TrainingPlan(strategy="diloco:inner_lr=0.1", rate_factor=0.5)
    plain = ones_job(steps=1, workers=2)
    gradients, _ = apply_strategy(msgspec.structs.replace(plain, rate_factor=0.5))
    (spec,) = gradients.specs(gradients.tables_of(TABLE))[:1]
    assert (spec.rate_factor, spec.local_rate, spec.deltas) == (0.5, False, False)
    windows = ones_job(steps=1, workers=2, strategy=LocalSGD(h=2), bound=0)
    differences, _ = apply_strategy(msgspec.structs.replace(windows, rate_factor=0.5))
    (spec,) = differences.specs(differences.tables_of(TABLE))[:1]
    assert (differences.plan.rate_factor, spec.local_rate, spec.deltas) == (0.5, True, True)
