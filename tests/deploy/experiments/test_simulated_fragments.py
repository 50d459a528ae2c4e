"""Fragments in the training simulator: quorum and grace on the virtual clock, and the cut."""

from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray

from deploy.experiments.character_model import text_read
from deploy.experiments.cluster import ClusterModel, Law, StepTimes, WorkerKill
from deploy.experiments.fragment_cut import FragmentCut
from deploy.experiments.jobs import SimulatedJob
from deploy.experiments.problem import Batch, Measurement
from deploy.experiments.timing_simulation import TimingSimulation
from deploy.experiments.training_simulation import TrainingSimulation, route_of
from deploy.experiments.trials import Trial, run_trial
from deploy.experiments.workloads import workload_of
from shards.errors import BadInput
from shards.messages import Ack, Weights
from shards.tables import KeyRange, segments
from tests.support import strategy_oracles as oracles
from tests.support.pure_cluster import RATE, TABLE, bowl, start
from worker.strategies import strategy_of
from worker.strategies.base import rate_multipliers
from worker.training.fragment_machine import FragmentMachine

Floats = NDArray[np.float32]
FIXED = StepTimes(mean_s=1.0, law=Law.FIXED)
UNEVEN = {"worker-0": 6.0, "worker-1": 3.0}
SPEEDS = "speeds=worker-0/1+worker-1/2+worker-2/6"


class Bowl:
    """The problem of the oracles: batches name their worker and its step."""

    table = TABLE
    worst_error = 100.0

    def start(self, seed: int) -> Floats:
        return start()

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        yield from (np.array([[worker, step]]) for step in range(1000))

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        worker, step = batch[0].tolist()
        out[:] = bowl(worker, step, weights)
        return 1.0

    def measure(self, weights: Floats) -> Measurement:
        return Measurement(0.0, 0.0)


class Recorded(TrainingSimulation):
    """A simulation that keeps its events for an oracle to repeat, and the times of its merges."""

    def __init__(self, job: SimulatedJob, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[tuple[str, int]] = []
        self.merges: list[float] = []
        report, mix = FragmentMachine._report, FragmentMachine._mix

        def note_report(machine: FragmentMachine, number: int, *, requests: bool) -> Any:
            self.note("push", machine)
            yield from report(machine, number, requests=requests)

        def note_mix(machine: FragmentMachine, *arguments: Any) -> None:
            self.note("take", machine)
            mix(machine, *arguments)

        monkeypatch.setattr(FragmentMachine, "_report", note_report)
        monkeypatch.setattr(FragmentMachine, "_mix", note_mix)
        super().__init__(job, Bowl())

    def note(self, kind: str, machine: FragmentMachine) -> None:
        machines = [worker.machine for worker in self.workers]
        self.events.append((kind, machines.index(machine)))

    def gradient(self, weights: Floats, batch: Batch) -> Any:
        self.events.append(("step", int(batch[0][0])))
        return super().gradient(weights, batch)

    def answer(self, shard: int, outs: Any) -> None:
        if self.shards[0].version > len(self.merges):
            self.events.append(("merge", 0))
            self.merges.append(self.clock.now)
        pulls = [out for out in outs if isinstance(out.message, Weights)]
        self.events += [("pull", int(out.to.partition(b".")[0])) for out in pulls]
        super().answer(shard, outs)


def job(text: str, fragments: int = 1, **cluster: Any) -> SimulatedJob:
    """A job of three workers at speeds 1:2:6."""
    given: dict[str, Any] = {"workers": 3, "times": FIXED, "stragglers": UNEVEN} | cluster
    return SimulatedJob(
        strategy=strategy_of("strategy", text).for_workers(given["workers"]),
        cluster=ClusterModel(**given),
        rate=RATE,
        seed=1,
        fragments=fragments,
    )


@pytest.mark.parametrize(
    ("text", "oracle"),
    [
        ("streaming_diloco:h=5,average=mean", oracles.Fragments),
        ("streaming_diloco:h=5,overlap=0,alpha=0.5,average=mean", oracles.Fragments),
        ("decoupled_diloco:h=6,grace=0.5,average=mean", oracles.TimedFragments),
        ("decoupled_diloco:h=12,grace=1,average=mean," + SPEEDS, oracles.TimedFragments),
        ("decoupled_diloco:h=12,k=2,average=mean," + SPEEDS, oracles.TimedFragments),
        ("decoupled_diloco:h=6,grace=0,average=mean", oracles.DecoupledFragments),
    ],
)
def test_an_oracle_repeats_the_simulated_turns(
    text: str, oracle: type[oracles.Fragments], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quorum and grace on the virtual clock make the bits of a serial loop over the same events."""
    simulation = Recorded(job(text, times=StepTimes(mean_s=1.0, cv=0.3)), monkeypatch)
    simulation.run(200)
    one = rate_multipliers(segments(TABLE, KeyRange(0, TABLE.size)), TABLE.size)
    zero = np.zeros_like(one)
    repeated = oracle(start(), bowl, one, zero, workers=3, rate=RATE, decay=0.0)
    told = oracle is oracles.TimedFragments
    repeated.repeat([event for event in simulation.events if told or event[0] != "merge"])
    assert repeated.version == simulation.shards[0].version > 5
    np.testing.assert_array_equal(simulation.weights(), repeated.c)


def test_grace_is_a_share_of_the_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast worker's report comes after 6 s; with an overlap of 2 steps of 1 s and half of it as
    grace the merge is a second later, and its next one comes after its next exchange."""
    simulation = Recorded(job("decoupled_diloco:h=6,overlap=2,grace=0.5"), monkeypatch)
    simulation.run(30)
    assert simulation.merges[:2] == [7.0, 13.0]
    late = simulation.shards[0].metrics.since(0)[1]
    assert set(late["worker"][late["dropped"] > 0]) <= {b"worker-0", b"worker-1"}


def test_a_link_delays_exchanges_and_not_steps() -> None:
    """Behind a round trip shorter than the overlap the workers compute all of their time; where it
    is longer than the window, or without overlap, they wait."""
    shares = {}
    for text in ("overlap=4", "overlap=1", "overlap=0,alpha=0"):
        for link in ("rtt=2s", "rtt=20s"):
            one = Trial(
                workload="quad",
                strategy=f"decoupled_diloco:h=8,{text}",
                gradients=400,
                cluster=ClusterModel(workers=2, times=FIXED, link=link),
            )
            shares[text, link] = run_trial(one).compute_share
    assert shares["overlap=4", "rtt=2s"] > 0.95
    assert shares["overlap=1", "rtt=2s"] > 0.95
    assert shares["overlap=0,alpha=0", "rtt=2s"] == pytest.approx(0.8, abs=0.03)
    assert all(shares[text, "rtt=20s"] < 0.5 for text, _ in shares)


def test_nobody_waits_for_a_dead_worker_longer_than_its_lease() -> None:
    """With K = 1 not at all: the others' merges go on; where all have to report, until it ends."""
    seconds = {}
    for name in ("decoupled_diloco", "streaming_diloco"):
        for kill in ((), (WorkerKill(at_s=50.0, worker=2),)):
            one = job(f"{name}:h=8", kill=kill, stragglers={}, lease_s=40.0)
            simulation = TrainingSimulation(one, workload_of("quad"))
            seconds[name, bool(kill)] = simulation.run(600).seconds
    alive = 200.0
    assert seconds["decoupled_diloco", False] == pytest.approx(alive, abs=2)
    assert seconds["streaming_diloco", False] == pytest.approx(alive, abs=2)
    assert seconds["decoupled_diloco", True] == pytest.approx(50 + 450 / 2, abs=10)
    assert seconds["streaming_diloco", True] == pytest.approx(50 + 40 + 450 / 2, abs=12)


class Joined(TrainingSimulation):
    """A simulation that keeps whether each report of worker 1's second life was dropped."""

    def __init__(self, job: SimulatedJob) -> None:
        self.dropped: list[bool] = []
        super().__init__(job, Bowl())

    def answer(self, shard: int, outs: Any) -> None:
        mine = [out.message for out in outs if out.to == route_of(1, 1)]
        self.dropped += [message.dropped for message in mine if isinstance(message, Ack)]
        super().answer(shard, outs)


def test_a_joiner_contributes_within_two_exchanges() -> None:
    """At whatever time of the others' period it begins: its first report says by how much it is
    late, and its second one on the same fragment is merged."""
    exchanges = []
    for back_s in range(13, 19):
        kill = (WorkerKill(at_s=40.5, worker=1, back_s=back_s),)
        cluster = {"workers": 4, "stragglers": {}, "kill": kill, "lease_s": 5.0}
        text = "decoupled_diloco:h=6,k=2"
        simulation = Joined(job(text, 2, link="rtt=100ms,rate=1Gbit", **cluster))
        simulation.run(300)
        exchanges.append(simulation.dropped.index(False) // 2 + 1)  # of two fragments in turn
    assert set(exchanges) == {1, 2}


# --- the cut --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["charlm", "deep:4", "quad"])
def test_a_cut_keeps_each_tensor_whole(name: str) -> None:
    """Every number of fragments has all tensors, each fragment in their order, with the embedding
    apart; weights are the same there and back, and a problem without a cut is not copied."""
    table = workload_of(name).table
    weights = table.empty()
    for number, view in enumerate(table.views(weights).values()):
        view[...] = number + np.arange(view.size).reshape(view.shape) / view.size
    for count in range(1, len(table.tensors) + 1):
        cut = FragmentCut(table, count)
        assert len(cut.layout.tables) == count
        parts = [[*map(table.tensors.index, part.tensors)] for part in cut.layout.tables]
        assert sorted(chain.from_iterable(parts)) == [*range(len(table.tensors))]
        assert parts == sorted(map(sorted, parts))
        arena = cut.spread(weights)
        for part, views in cut.layout.views(arena).items():
            for tensor, view in views.items():
                assert np.array_equal(view, table.views(weights)[tensor]), part
        assert np.array_equal(cut.gather(arena), weights)
        assert (arena is weights) == (count == 1)
        assert ("embeddings" in cut.layout.names) == (name == "charlm" and count > 1)
    sizes = [part.parameters for part in FragmentCut(workload_of("deep:6").table, 2).layout.tables]
    assert sizes == [784 * 64, 64 + 5 * (64 * 64 + 64) + 650]


def test_two_fragments_train_as_far_as_one() -> None:
    """The same problem in two tables and two shards learns; the records name one table a report."""
    trial = Trial(workload="mlp", batch=16, gradients=400, tested=500, rate=0.004)
    trial = structs.replace(
        trial, strategy="streaming_diloco:h=10", cluster=ClusterModel(workers=2)
    )
    ends = [run_trial(structs.replace(trial, fragments=count)).error for count in (1, 2)]
    assert max(ends) < 30


def test_what_fragments_cannot_have_is_refused() -> None:
    """In one line, before anything runs."""
    trial = Trial(strategy="streaming_diloco:h=2,overlap=1", fragments=3)
    with pytest.raises(BadInput, match="h: expected at least 1 step for each of 3 dense tables"):
        trial.check()
    with pytest.raises(
        BadInput, match="fragments: count: expected at most 4 for a model of 4 tensors"
    ):
        structs.replace(trial, fragments=9).check()
    with pytest.raises(BadInput, match="timing: expected a strategy of whole models, got"):
        TimingSimulation(job("decoupled_diloco"))


@pytest.mark.parametrize("name", ["mlp", "mlp:digits", "charlm", "l1", "lenet"])
def test_held_out_rows_are_not_trained_with(name: str) -> None:
    """Batches leave out what is measured, and the test data are not what is measured."""
    usual = workload_of(name, 64, 500)
    held = workload_of(name, 64, 500, held_out=True)
    weights = usual.start(0)
    weights += np.linspace(-0.1, 0.1, len(weights), dtype=np.float32)  # l1 begins with zeros
    assert usual.measure(weights) != held.measure(weights)
    rows = len(text_read()) * 8 // 10 if name == "charlm" else 50_000
    largest = max(int(next(held.batches(0, worker)).max()) for worker in range(5) for _ in range(9))
    assert largest < rows
