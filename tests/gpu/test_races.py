"""The races are put together right: each contender of ours runs, small, in the emulator."""

import pytest

from cupy_kernels.backends import EmulatorBackend
from cupy_kernels.emulator import Emulator
from tests.bench.report import Goal
from tests.gpu import race, races, step_races
from tests.gpu.ground import Ground
from tests.gpu.race import Ceilings, Times


@pytest.mark.parametrize("group", races.ALL + step_races.ALL, ids=lambda group: group.__name__)
def test_a_race_runs_dry_and_is_judged(group: race.Races) -> None:
    """Every entry launches, and its goals follow from its times."""
    ground = Ground(EmulatorBackend(Emulator()))
    names = []
    for one in group(ground):
        race.rehearse(ground, one)
        times = {entry.name: Times(1e-3, 1e-3, 1e-3, 1e-3) for entry in one.entries}
        goals = one.judge(times, Ceilings(bandwidth=1e12))
        assert all(isinstance(goal, Goal) for goal in goals)
        names += [entry.name for entry in one.entries]
    assert names
    assert len(set(names)) == len(names)


def test_a_contender_that_did_not_run_is_not_judged() -> None:
    """Without PyTorch there is no ratio, and with it the ratio is theirs over ours."""
    judged = race.faster("ours", "theirs", 2.0)
    one, three = Times(1.0, 1.0, 1.0, 1.0), Times(3.0, 3.0, 3.0, 3.0)
    assert judged({"ours": one}) == []
    (goal,) = judged({"ours": one, "theirs": three})
    assert (goal.measured, goal.met) == (3.0, True)


def test_bandwidth_counts_the_bytes_that_must_move() -> None:
    """12 GB in 4 ms where a copy reaches 4 TB/s is three quarters."""
    goal = race.share_of_bandwidth("x", 12e9, 0.8)
    times = {"x": Times(4e-3, 4e-3, 4e-3, 4e-3)}
    assert goal(times, Ceilings(4e12)).measured == pytest.approx(0.75)
