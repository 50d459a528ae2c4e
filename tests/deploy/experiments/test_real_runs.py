"""Real runs agree with the simulator: their recorded turns lead it to the same weights."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from deploy.experiments import real_runs
from deploy.experiments.cluster import ClusterModel, Law, StepTimes
from deploy.experiments.real_runs import RealRun, replay_run, run_real
from deploy.experiments.trials import Trial
from deploy.experiments.workloads import workload_of
from shards.errors import BadInput
from shards.update_records import RECORD
from tests.support.cli_in_process import command

TRIAL = Trial(
    workload="quad",
    rate=0.02,
    gradients=128,
    seed=3,
    cluster=ClusterModel(workers=4, times=StepTimes(mean_s=0.002, cv=0.3)),
)

FIXED = StepTimes(mean_s=0.002, law=Law.FIXED)


def real(strategy: str, bound: int | None, rule: str = "sgd") -> RealRun:
    trial = structs.replace(TRIAL, strategy=strategy, staleness=bound, rule=rule)
    return run_real(trial, workload_of("quad"))


@pytest.mark.parametrize(
    ("strategy", "bound", "rule"),
    [
        ("asp", None, "sgd"),
        ("ssp", 2, "momentum"),
        ("bsp", 0, "sgd"),
        ("easgd:tau=4", None, "sgd"),
        ("softsync:n=2", None, "adam"),
        ("dc_asgd", None, "sgd"),
    ],
)
def test_a_replay_gives_the_same_weights(strategy: str, bound: int | None, rule: str) -> None:
    """Bit for bit: real clients, threads and a real shard, and the simulator's workers."""
    run = real(strategy, bound, rule)
    assert len(run.records) * max(1, run.job.strategy.push_period) == 128
    assert replay_run(run, workload_of("quad")).tobytes() == run.weights.tobytes()


def test_passes_of_several_pushes_are_replayed() -> None:
    """Steps of one fixed duration make pushes arrive together, and their sum rounds otherwise."""
    equal = structs.replace(TRIAL, cluster=structs.replace(TRIAL.cluster, times=FIXED))
    run = run_real(equal, workload_of("quad"))
    assert replay_run(run, workload_of("quad")).tobytes() == run.weights.tobytes()
    alone = run.records.copy()
    alone["pass_pushes"] = 0
    with pytest.raises(BadInput, match="pass_pushes: expected 1 or more, got 0"):
        replay_run(run._replace(records=alone), workload_of("quad"))


def test_other_turns_give_other_weights() -> None:
    """A replay does follow the record: with two versions read otherwise, the weights differ."""
    run = real("asp", None)
    records = run.records.copy()
    ends, place = set(), 0  # of passes: no pull is answered with a version within one
    while place < len(records):
        place += int(records["pass_pushes"][place])
        ends.add(place)
    stale = np.flatnonzero(records["staleness"] > 1).tolist()
    late = next(one for one in stale if records["read_version"][one] + 1 in ends)
    records["read_version"][late] += 1
    other = replay_run(run._replace(records=records), workload_of("quad"))
    assert other.tobytes() != run.weights.tobytes()


def test_a_record_of_another_job_is_refused() -> None:
    run = real("asp", None)
    with pytest.raises(BadInput, match="a turn that its job has not"):
        replay_run(run._replace(records=run.records[::-1]), workload_of("quad"))


def test_what_cannot_be_replayed_is_refused() -> None:
    shards = structs.replace(TRIAL, cluster=structs.replace(TRIAL.cluster, shards=2))
    with pytest.raises(BadInput, match="expected 1 shard to replay, got 2"):
        run_real(shards, workload_of("quad"))
    with pytest.raises(BadInput, match="expected a push for every pull"):
        replay_run(real("downpour:n_push=2,n_fetch=1", None), workload_of("quad"))


def test_the_command_replays_the_first_trial_of_each_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line for each point; the exit status is 1 if the weights of one differ."""
    sweep = tmp_path / "sweep.toml"
    sweep.write_text(
        'name = "two"\nworkload = "quad"\ngradients = 40\nstrategy = "{kind}"\n'
        "[cluster]\nworkers = 2\ntimes = { mean_s = 0.002, cv = 0.3 }\n"
        '[grid]\nkind = ["asp", "easgd:tau=4"]\n'
    )
    exp = command(capsys, monkeypatch, "exp")
    status, printed, _ = exp("replay", sweep)
    assert status == 0
    assert [line.partition(":")[0] for line in printed.splitlines()] == ["kind asp", "kind easgd"]
    assert printed.count("the same weights, bit for bit; staleness") == 2
    other = np.zeros(1, np.float32)
    monkeypatch.setattr(real_runs, "replay_run", lambda *_: other)
    status, printed, _ = exp("replay", sweep)
    assert status == 1
    assert "OTHER WEIGHTS" in printed


@pytest.mark.parametrize(("share", "marked"), [(0.0, False), (0.01, False), (0.02, True)])
def test_a_run_that_is_not_paced_is_marked(share: float, marked: bool) -> None:
    """More than a hundredth of the steps computed for more than half of their time."""
    run = RealRun(TRIAL.job(), np.zeros(0, RECORD), np.zeros(1, np.float32), 1.0, share)
    assert ("MARKED" in run.pacing) == marked
