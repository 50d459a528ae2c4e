"""Every mutant is detected by the simulator, and by the check of the promise that it breaks."""

import subprocess
import sys
from pathlib import Path

import pytest

from deploy.simulation import scenarios
from deploy.simulation.invariants import Promise
from deploy.simulation.simulation import play
from deploy.simulation_kinds import ClusterConfig
from shards.errors import BadInput
from tests.mutants.catalogue import MUTANTS, SCENARIOS, caught, find, planted
from tests.mutants.patching import Patch

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_detected(name: str) -> None:
    """Some run breaks the mutant's promise, and only because of the mutant."""
    outcome = caught(name)
    assert outcome is not None, f"{name} is not detected"
    print(f"{name}: detected by seed {outcome.scenario.seed}: {outcome.violation}")
    assert outcome.violation.startswith(f"{find(name).promise}: ")
    assert play(outcome.scenario).violation == ""


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_what_was_found_once_is_repaired(path: Path) -> None:
    """A scenario keeps every promise; with its mutant in the code it does not."""
    scenario = scenarios.load(path)
    assert len(scenario.story) > 100, "it says what went wrong"
    assert play(scenario).violation == ""
    with planted(scenario.mutant):
        assert play(scenario).violation != ""


def test_every_promise_is_guarded() -> None:
    """A mutant breaks each promise, and there are some of each kind of cluster."""
    assert {mutant.promise for mutant in MUTANTS.values()} == set(Promise)
    assert {mutant.cluster for mutant in MUTANTS.values()} == set(ClusterConfig)


def test_a_patch_is_undone() -> None:
    """Own and inherited attributes are restored."""

    class Base:
        kept = 1

    class Derived(Base):
        own = 2

    patch = Patch()
    patch.setattr(Derived, "own", 3)
    patch.setattr(Derived, "kept", 4)
    patch.setattr(Derived, "own", 5)
    assert (Derived.own, Derived.kept) == (5, 4)
    patch.undo()
    assert (Derived.own, Derived.kept) == (2, 1)
    assert "kept" not in vars(Derived)


def test_an_unknown_name_is_refused() -> None:
    """The error says how to list the names."""
    with pytest.raises(BadInput, match=r"expected a name that `python -m tests\.mutants` prints"):
        find("none such")


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "tests.mutants", *arguments]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)


def test_the_command_lists_the_mutants() -> None:
    """Each line names a mutant, its cluster and its promise."""
    done = command()
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[-1] for line in done.stdout.splitlines()] == list(MUTANTS)


def test_the_command_writes_a_scenario(tmp_path: Path) -> None:
    """The run that detects a mutant is reduced to a file, which fails with the mutant alone."""
    out = tmp_path / "found.toml"
    done = command("the_gate_opens_a_step_early", "--out", str(out))
    assert (done.returncode, done.stderr) == (0, "")
    assert f"violation: {Promise.BOUND}" in done.stdout
    scenario = scenarios.load(out)
    assert scenario.mutant == "the_gate_opens_a_step_early"
    assert scenario.faults == ()
    assert play(scenario).violation == ""
    again = command("--scenario", str(out))
    assert again.returncode == 0
    assert f"violation: {Promise.BOUND}" in again.stdout
