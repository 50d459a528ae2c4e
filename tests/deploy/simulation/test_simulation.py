"""The protocol under everything that a network, its processes and their clocks can do wrong.

A failing seed is printed, and alone reproduces its run: `downpour simulate --seed N`. What was
found is kept as a scenario in scenarios/, each with its story; tests/mutants plays them.
"""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy.simulation import runner, scenarios
from deploy.simulation.config import SimulationConfig
from deploy.simulation.fault_generator import RULES_WITH_SLOTS, SPARSE, swarm
from deploy.simulation.faults import (
    CoordinatorCrash,
    Crash,
    Delay,
    Double,
    Kill,
    Lose,
    Mangle,
    ReshardFault,
    Restart,
)
from deploy.simulation.invariants import Violation
from deploy.simulation.scenarios import Scenario
from deploy.simulation.shrink import shrink
from deploy.simulation.simulation import Simulation, play
from deploy.simulation_kinds import ClusterConfig, Profile
from shards.errors import BadInput

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "200"))
LOST_PUSHES = (
    Path(__file__).parent / "scenarios/a_new_incarnation_names_the_shard_that_lost_pushes.toml"
)
LOSSY = (Lose(at=0.0, for_s=99.0, share=0.3), Double(at=0.0, for_s=99.0, share=0.3))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_promises_hold_under_all_faults() -> None:
    """No seed breaks a promise: three of four within the fault budget, the fourth beyond it."""
    whole = runner.together(list(runner.run(runner.batches(0, SEEDS))))
    print(f"{whole.runs} seeds, {whole.cluster_s:.0f} s of cluster, {whole.cpu_s:.0f} CPU seconds")
    assert whole.runs == SEEDS
    assert whole.violations == []


def test_the_seed_alone_decides_a_run() -> None:
    """Two runs of one seed end at the same moment, after the same messages; another seed's do
    not."""
    for cluster in ClusterConfig:
        ends = [play(swarm(seed, cluster=cluster)) for seed in (7, 7, 8)]
        results = [(end.seconds, end.counted, end.noted) for end in ends]
        assert results[0] == results[1] != results[2]


@pytest.mark.parametrize("bound", [0, 1, 4, None])
def test_a_bad_network_alone_loses_nothing(bound: int | None) -> None:
    """With a third of the messages lost and a third doubled, all pushes count once and no lease
    expires."""
    setting = SimulationConfig(shards=2, workers=3, bound=bound, steps=12, lease_s=60.0)
    world = Simulation(Scenario(seed=11, setting=setting, faults=LOSSY))
    world.run()
    assert world.calm, "no lease ran out"
    assert world.counted.lost > 50
    for host in world.hosts:
        assert host.shard.version == host.shard.status().pushes == 3 * 12
        assert [entry.takeovers for entry in host.shard.ledger.entries.values()] == [0, 0, 0]
        assert 0 < host.shard.metrics.max_clock_gap <= (12 if bound is None else bound + 1)


@pytest.mark.parametrize("seed", [1, 2, 17])
def test_nobody_waits_for_a_dead_learner(seed: int) -> None:
    """With a quorum of two of four, the others train on while one is dead, until only one is left.

    A late learner once got its fragment with the next merge. If that merge needed its report, all
    waited until the dead one's lease ran out; or for ever, where two fragments' rounds needed each
    other's late learners.
    """
    setting = SimulationConfig(
        shards=1 + seed % 2,
        workers=4,
        bound=None,
        steps=24,
        merge="quorum",
        quorum=2,
        second="sgd",
        lease_s=300.0,
    )
    death = Kill(at=4.0, target="w1", back_s=100.0)
    world = Simulation(Scenario(seed=seed, setting=setting, faults=(death,)))
    departed: list[bool] = []
    world.clock.at(100.0, lambda: departed.extend(w.departed for w in world.workers.values()))
    world.run()
    assert sum(departed) >= 2


def test_undisturbed_copies_agree() -> None:
    """Without faults every push is held twice before it is acknowledged, and no copy is
    replaced."""
    setting = SimulationConfig(cluster=ClusterConfig.REPLICATED, shards=2, workers=3, bound=2)
    world = Simulation(Scenario(seed=1, setting=setting))
    world.run()
    assert all(group.in_sync for group in world.coordinator.record.values())
    assert [len(host.copies) for host in world.coordinator._groups] == [2, 2]


@pytest.mark.parametrize("push", ["none,zstd", "fp16,zstd", "topk:0.002,zstd"])
def test_promises_hold_for_packed_pushes(push: str) -> None:
    """zstd on top changes nothing; the swarm leaves it out, because not every install has it."""
    for seed in range(100, 106):
        drawn = swarm(seed, cluster=ClusterConfig.COMPRESSED)
        sparse = push.partition(",")[0] in SPARSE or push.startswith("topk")
        plain: dict[str, Any] = {"pull": "none", "merge": "each", "rule": "sgd", "second": ""}
        plain |= {"stale_after": None, "changes_rate": False} if sparse else {}
        setting = msgspec.structs.replace(drawn.setting, push=push, **plain)
        kept = tuple(f for f in drawn.faults if not (sparse and type(f).__name__ in _ENDING))
        scenario = msgspec.structs.replace(drawn, setting=setting, faults=kept)
        assert play(scenario).violation == "", f"seed {seed}"


@pytest.mark.parametrize("cluster", [ClusterConfig.LOGGED, ClusterConfig.REPLICATED])
def test_promises_hold_for_a_rule_of_whole_tensors(cluster: ClusterConfig) -> None:
    """Logs, copies and reshards keep each block, which is a tensor, to the bit."""
    for seed in range(200, 204):
        drawn = swarm(seed, cluster=cluster)
        setting = msgspec.structs.replace(drawn.setting, rule="heloco")
        assert play(msgspec.structs.replace(drawn, setting=setting)).violation == "", f"seed {seed}"


# After the first two a life begins without its residual; a change of the rate needs whole pushes.
_ENDING = {"Kill", "Mangle", "SetFault"}


def test_slots_are_played_everywhere() -> None:
    """Each rule is drawn for each kind of cluster, in at least a third of the seeds."""
    for cluster in ClusterConfig:
        settings = [swarm(seed, cluster=cluster).setting for seed in range(90)]
        drawn = [setting.rule for setting in settings if setting.push not in SPARSE]
        assert set(drawn) == {"sgd", *RULES_WITH_SLOTS}
        assert 3 * drawn.count("sgd") <= 2 * len(drawn)


def test_slots_equal_those_of_the_reference_model() -> None:
    """Two pushes with momentum give Caffe's numbers; a wrong slot or weight is noticed."""
    setting = SimulationConfig(workers=1, steps=2, rule="momentum")
    world = Simulation(Scenario(seed=1, setting=setting))
    world.run()
    (host,) = world.hosts
    held = host.shard.parameters
    # h = 0.9 h + g and w -= h, for gradients of 12 and 12, and of 12 and 24.
    assert held.weights()[:2].tolist() == pytest.approx([-34.8, -46.8])
    history = held.copy()["sim/history"]
    assert history[:2].tolist() == pytest.approx([22.8, 34.8])
    host.finish()
    for array, name in ((history, "history"), (held.weights(), "weights")):
        array[7] = 0.5
        with pytest.raises(Violation, match=f"other {name} than its 2 pushes make, 0.5 at float 7"):
            host.finish()
        array[7] = 0


# --- the budget -----------------------------------------------------------------------------------


def test_beyond_the_budget_progress_may_end() -> None:
    """Both copies of a shard die: training stops, no acknowledged push is lost while a copy still
    holds it, and a worker gives up when its patience ends.

    Within the budget this is a violation, since no fault explains it.
    """
    faults = (
        Crash(at=2.0, target="backup 0", back_s=9.0, reckless=True),
        Crash(at=2.0, target="primary 0", back_s=9.0, reckless=True),
    )
    setting = SimulationConfig(cluster=ClusterConfig.REPLICATED)
    beyond = Scenario(seed=3, profile=Profile.BEYOND, setting=setting, faults=faults)
    assert play(beyond).violation == ""
    within = msgspec.structs.replace(beyond, profile=Profile.WITHIN)
    breach = play(within).violation
    assert "only errors that the faults explain are raised" in breach
    assert "NotReady: worker w0 has waited 60 s for shard 0: this copy of shard 0" in breach


def test_a_rolled_back_shard_loses_its_own_part_alone() -> None:
    """Its workers continue to their ends, without the pushes that it had not saved."""
    faults = (Restart(at=3.0, shard=0, lost_s=2.5),)
    setting = SimulationConfig(shards=2, workers=2, steps=12, bound=2)
    world = Simulation(Scenario(seed=3, setting=setting, faults=faults))
    world.run()
    short, whole = world.hosts
    lost = sum(map(len, short._forgotten.values()))
    assert lost > 3
    assert (whole.shard.version, 24 - lost) == (24, short.shard.version)
    assert [entry.seq for entry in short.shard.ledger.entries.values()] == [12, 12]


def test_a_lost_state_ends_its_workers() -> None:
    """If a shard returns without acknowledged pushes, the worker that made them detects it."""
    faults = (Restart(at=3.0, shard=0, lost_s=2.5, reported=False),)
    setting = SimulationConfig(workers=1, steps=12)
    beyond = Scenario(seed=3, profile=Profile.BEYOND, setting=setting, faults=faults)
    outcome = play(beyond)
    assert outcome.violation == ""
    assert any("resume the job from its last snapshot" in line for line in outcome.noted)


def test_a_new_incarnation_names_the_shard_that_lost_pushes() -> None:
    """An incarnation that begins after a shard lost acknowledged pushes fails, and names the
    shard.
    """
    scenario = scenarios.load(LOST_PUSHES)
    outcome = play(scenario)
    assert outcome.violation == ""
    (failure,) = [line for line in outcome.noted if "w0/1 fails" in line]
    assert "pushes of w0: shard 0 has 0, but all shards had acknowledged" in failure


def test_crashes_wait_until_their_group_is_whole() -> None:
    """Within the budget, the second death waits until the first one's successor is in sync."""
    faults = tuple(Crash(at=2.0, target="primary 0", back_s=0.5) for _ in range(2))
    setting = SimulationConfig(cluster=ClusterConfig.REPLICATED, workers=3, steps=20)
    outcome = play(Scenario(seed=5, setting=setting, faults=faults))
    assert (outcome.violation, outcome.counted.deaths) == ("", 2)


# --- what is allowed ------------------------------------------------------------------------------


def test_pushes_that_follow_a_move_may_be_far_ahead_of_a_newcomer() -> None:
    """A worker that joins the new shards first begins at the clock that the former ones exported.
    Reads that those served later lack nothing of it, though pushes made from them are beyond it."""
    setting = SimulationConfig(workers=3, bound=1, steps=4, lease_s=4.0, delay_s=0.3)
    faults = (
        Mangle(at=0.454, for_s=1.379, share=0.3),
        Delay(at=1.03, for_s=0.645, by_s=0.3),
        Delay(at=1.822, for_s=2.331, by_s=0.3),
        ReshardFault(at=4.672, shards=2),
        Mangle(at=4.8, for_s=0.517, share=0.3),
        Mangle(at=5.224, for_s=1.138, share=0.3),
    )
    world = Simulation(Scenario(seed=20249, setting=setting, faults=faults))
    world.run()
    assert max(host.shard.metrics.max_clock_gap for host in world.hosts) > 2


def test_parts_of_a_read_may_be_older_than_the_shards() -> None:
    """A shard comes back with an older state while a read still waits for another shard's part. The
    next read is older there, and no worker has seen that life of the shard go back."""
    setting = SimulationConfig(
        cluster=ClusterConfig.COMPRESSED,
        shards=2,
        workers=3,
        bound=2,
        steps=3,
        in_flight=1,
        warm_steps=10,
        lease_s=2.0,
        delay_s=0.3,
        push="threshold:100",
    )
    faults = (
        Delay(at=0.7, for_s=3.844, by_s=0.3),
        Restart(at=1.1, shard=1, lost_s=1.329, reported=False),
        Restart(at=1.7, shard=0, lost_s=2.942, reported=False),
        Delay(at=5.0, for_s=1.232, a="shard 1", by_s=2.5),
        Restart(at=5.6, shard=0, lost_s=1.794, reported=False),
    )
    scenario = Scenario(seed=6989, profile=Profile.BEYOND, setting=setting, faults=faults)
    assert play(scenario).violation == ""


def test_a_dropped_push_is_lost_although_its_version_is_not() -> None:
    """A push that came too late for its round makes no version. A shard that returns at the version
    before which it came has lost it."""
    setting = SimulationConfig(
        bound=0, steps=4, in_flight=1, merge="round", backups=1, lease_s=2.0, delay_s=0.02
    )
    faults = (Delay(at=1.5, for_s=1.2, by_s=2.5), Restart(at=2.9, shard=0, lost_s=1.24))
    world = Simulation(Scenario(seed=21447, setting=setting, faults=faults))
    world.run()
    (host,) = world.hosts
    assert host._forgotten


# --- scenarios ------------------------------------------------------------------------------------


def test_a_scenario_is_a_file(tmp_path: Path) -> None:
    """A written scenario is read back unchanged, and has the same outcome."""
    for profile in Profile:
        for seed in range(20):
            story = 'It went\nwrong \\ "twice".'
            scenario = msgspec.structs.replace(swarm(seed, profile), story=story)
            path = tmp_path / "scenario.toml"
            path.write_text(scenarios.format_scenario(scenario))
            read = scenarios.load(path)
            assert read.story.split() == scenario.story.split()
            assert msgspec.structs.replace(read, story=scenario.story) == scenario


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("seed =", "Invalid value"),
        ("seed = 1", "missing required field `setting`"),
        ('seed = 1\n[setting]\n[[faults]]\nat = 1\nfault = "flood"', "Invalid value 'flood'"),
        ("seed = 1\n[setting]\nshard = 1", "unknown field `shard`"),
        ('seed = 1\n[setting]\nrule = "newton"', "expected one of sgd, momentum"),
        (None, "No such file"),
    ],
)
def test_an_invalid_file_is_refused(tmp_path: Path, text: str | None, reason: str) -> None:
    """A wrong file is refused by name, with the reason."""
    path = tmp_path / "scenario.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(BadInput, match="scenario ") as caught:
        scenarios.load(path)
    assert reason in str(caught.value)


def test_a_failing_run_is_made_small() -> None:
    """Only the faults without which the run does not fail remain, and the cluster shrinks as
    well."""
    setting = SimulationConfig(cluster=ClusterConfig.REPLICATED, workers=3, shards=2, steps=6)
    wanted = CoordinatorCrash(at=2.0, back_s=1.0)
    faults = (*LOSSY, wanted, *LOSSY, Crash(at=3.0, target="primary 0", back_s=1.0))
    scenario = Scenario(seed=1, setting=setting, faults=faults)
    small = shrink(scenario, lambda smaller: wanted in smaller.faults)
    assert small.faults == (wanted,)
    assert (small.setting.workers, small.setting.shards, small.setting.steps) == (1, 1, 2)
