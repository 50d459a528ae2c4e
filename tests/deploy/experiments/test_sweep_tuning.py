"""A sweep that chooses its rates: on seeds of its own, once, and after a kill without repeats."""

from pathlib import Path

import pytest
from msgspec import structs

from deploy.experiments import runner
from deploy.experiments.report import write_report
from deploy.experiments.runner import Folder, run_sweep
from deploy.experiments.sweep_tuning import tune_sweep
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trials import Trial, TrialResult
from shards.errors import BadInput
from tests.support.cli_in_process import command

SWEEP = """
name = "tuned"
seeds = [0, 1]
workload = "quad"
strategy = "softsync:n={n}"
gradients = 60
look_every = 20
[cluster]
workers = 4
[grid]
n = [1, 2]
rate = ["best", "greedy", "greedy / n", "best * 0.5"]
"""


def written(path: Path, text: str = SWEEP) -> Path:
    file = path / "tuned.toml"
    file.write_text(text)
    return file


def test_a_sweep_chooses_its_rates(tmp_path: Path) -> None:
    """Best, greedy and a multiple of them, for each level without its rate; another run chooses
    none; without rates.json the search reads the trials that it has."""
    sweep, folder, notes = read_sweep(written(tmp_path)), tmp_path / "out", list[str]()
    assert len(sweep.levels) == 2
    tuned = tune_sweep(sweep, folder, note=notes.append)
    assert not tuned.levels
    assert [note.partition(":")[0] for note in notes] == ["n 1", "n 2"]
    rates = {point.label: point.trials[0].rate for point in tuned.points}
    assert rates["n 2, rate greedy / n"] == rates["n 2, rate greedy"] / 2
    assert rates["n 1, rate best * 0.5"] == rates["n 1, rate best"] / 2
    status = run_sweep(tuned, folder, note=notes.append)
    assert (status.trials, status.done, status.stale) == (len(tuned.trials), len(tuned.trials), 0)
    costs = (folder / "tuning" / "costs.csv").read_text()
    (folder / "rates.json").unlink()
    again = tune_sweep(read_sweep(Folder(folder).sweep), folder, note=notes.append)
    assert again.trials == tuned.trials
    assert (folder / "tuning" / "costs.csv").read_text() == costs, "no trial ran again"
    (folder / "tuning" / "trials").rename(tmp_path / "elsewhere")
    assert tune_sweep(again, folder, note=notes.append).trials == tuned.trials
    assert not list((folder / "tuning").glob("trials/*")), "the rates are there"
    write_report(folder, tmp_path / "page.html")
    assert "Rates chosen on seeds of their own" in (tmp_path / "page.html").read_text()


def test_the_search_has_seeds_of_its_own(tmp_path: Path) -> None:
    """None of those reported; three around the choice."""
    folder = tmp_path / "out"
    text = SWEEP.replace('["best", "greedy", "greedy / n", "best * 0.5"]', '["best"]')
    sweep = tune_sweep(read_sweep(written(tmp_path, text)), folder, note=lambda _: None)
    tried = Folder(folder / "tuning")
    for seed, wanted in ((100, True), (101, True), (102, True), (0, False)):
        trial = structs.replace(sweep.points[0].trials[0], seed=seed, look_every=0, held_out=True)
        assert (tried.load(trial) is not None) == wanted


def test_the_command_says_what_it_will_choose(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    exp = command(capsys, monkeypatch, "exp")
    printed = exp("run", written(tmp_path), "--out", tmp_path / "out", "--dry-run")[1]
    assert printed.startswith("16 trials in ")
    assert printed.endswith("minutes to go, rates of 2 levels to choose\n")
    status, printed, _ = exp("run", written(tmp_path), "--out", tmp_path / "out")
    assert status == 0
    assert "n 1: rates: best " in printed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('"best",', '"better",'), r"rate: expected a number, or best or greedy .*, got 'better'"),
        (('"greedy / n"', '"greedy / m"'), r"such as greedy / n, got 'greedy / m'"),
        (('"greedy / n"', '"greedy / 0"'), r"such as greedy / n, got 'greedy / 0'"),
        (("[0, 1]", "[99, 101]"), "seeds: expected none of 100 to 102, .*, got 100"),
    ],
)
def test_a_wrong_rate_is_one_sentence(
    change: tuple[str, str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadInput, match=message):
        read_sweep(written(tmp_path, SWEEP.replace(*change)))


def test_a_level_without_any_trial_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every trial of the search fails, there is no rate to choose."""

    def fail(trial: Trial) -> TrialResult:
        raise BadInput(f"rate {trial.rate:g} is not wanted")

    monkeypatch.setattr(runner, "run_trial", fail)
    with pytest.raises(BadInput, match=r"n 1: expected a rate to choose, got BadInput: rate .* is"):
        tune_sweep(read_sweep(written(tmp_path)), tmp_path / "out", note=lambda _: None)
