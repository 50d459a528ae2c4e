"""`downpour exp advise`: a ranking by seconds, and advice where it has the evidence."""

import math
import tomllib
from pathlib import Path

import pytest

from deploy.experiments import recommendation
from deploy.experiments.recommendation import AdviceSettings, Candidate, rank_candidates
from deploy.experiments.statistics import TargetTimes
from deploy.experiments.training_simulation import CurvePoint
from deploy.experiments.trials import Trial, TrialResult
from shards.errors import BadInput
from tests.support.cli_in_process import command
from tests.support.real_records import recorded

FAST = (50.0, 52.0, 51.0, 53.0, 50.5, 52.5, 51.5, 49.0)


def candidate(name: str, times: tuple[float, ...], bound: int | None = None) -> Candidate:
    return Candidate(name, bound, 0.1, 2.0, TargetTimes(times))


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * seconds for seconds in FAST)


def test_a_clear_winner_is_advised_with_its_options() -> None:
    """The order of the candidates does not count; one within a tenth is named as near."""
    levels = [
        candidate("bsp", scaled(2)),
        candidate("ssp", FAST, 4),
        candidate("asp", scaled(1.04)),
    ]
    ranking = rank_candidates(levels, 9.0)
    assert ranking.choice == levels[1]
    assert [one.candidate.strategy for one in ranking.ranked] == ["ssp", "asp", "bsp"]
    assert [one.near for one in ranking.ranked] == [1.0, 1.0, 0.0]
    assert ranking.lines()[-1] == "advised: --strategy ssp --staleness 4; as near: asp"
    assert ranking.lines()[1].split()[:3] == ["ssp,", "bound", "4"]


def test_candidates_that_are_not_separated_have_no_advice() -> None:
    """Either is 30 % faster in half of the seeds: the runs do not say which is."""
    one = tuple(seconds * (1.0 if at % 2 else 1.3) for at, seconds in enumerate(FAST))
    other = tuple(seconds * (1.3 if at % 2 else 1.0) for at, seconds in enumerate(FAST))
    ranking = rank_candidates(
        [candidate("asp", one), candidate("bsp", other), candidate("easgd", scaled(3))], 9.0
    )
    assert ranking.choice is None
    last = ranking.lines()[-1]
    assert last.startswith("nothing is advised: these runs do not separate ")
    assert "asp" in last
    assert "bsp" in last
    assert "easgd" not in last


def test_a_target_that_nobody_reaches_has_no_advice() -> None:
    """Missed targets are infinite; a candidate that misses it in some runs says so."""
    missed = (math.inf,) * 8
    ranking = rank_candidates([candidate("asp", missed), candidate("bsp", missed)], 1.0)
    assert ranking.choice is None
    assert "no candidate reaches the target" in ranking.lines()[-1]
    some = rank_candidates([candidate("asp", (*FAST[:7], math.inf)), candidate("bsp", missed)], 9.0)
    assert some.choice is not None
    assert "(1 missed)" in some.lines()[1]


def test_a_run_is_fitted_swept_and_ranked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On three workers, one of them three times slower, rounds take longest; a second call reads
    the same trials."""
    monkeypatch.setattr(recommendation, "_CANDIDATES", (("bsp", None), ("ssp", 1), ("asp", None)))
    run = recorded(tmp_path, pushes=60)
    words = ["--workload", "quad", "--gradients", 160, "--target", 30]
    words += ["--seeds", 6, "--most-seeds", 6]
    call = command(capsys, monkeypatch, "exp")
    status, printed, _ = call("advise", run, *words, "--out", tmp_path / "out")
    assert status == 0
    lines = printed.splitlines()
    assert lines[0].startswith("# 180 records of 3 workers")
    assert "stragglers = { worker-2 = " in printed
    assert lines[-2].startswith("bsp  ")
    assert lines[-1].startswith(("advised: --strategy asp", "advised: --strategy ssp"))
    assert call("advise", run, *words, "--out", tmp_path / "out")[1] == printed


@pytest.mark.parametrize(("most_seeds", "counts"), [(6, (6, 6, 6)), (24, (12, 12, 6))])
def test_more_seeds_for_candidates_that_are_not_separated(
    most_seeds: int, counts: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six seeds do not say which of two is faster; twelve do. The slow third needs no more."""

    def seconds_of(strategy: str, seed: int) -> float:
        early = seed < recommendation.FIRST_SEED + 6
        return {"bsp": 30, "asp": 10, "ssp": 7 if early and seed % 2 else 13}[strategy]

    def run(text: str, *_: object) -> list[list[TrialResult]]:
        settings = tomllib.loads(text)
        first, last = settings["seeds"]
        return [
            [reached(name, seed, seconds_of(name, seed)) for seed in range(first, last + 1)]
            for name in (entry["strategy"] for entry in settings["list"])
        ]

    monkeypatch.setattr(recommendation, "_CANDIDATES", (("bsp", None), ("ssp", 1), ("asp", None)))
    monkeypatch.setattr(recommendation, "_run_candidates", run)
    settings = AdviceSettings(seeds=6, most_seeds=most_seeds, target=5)
    ranking = recommendation.recommend("[cluster]\nworkers = 3", settings, tmp_path)
    assert tuple(len(entry.candidate.times.values) for entry in ranking.ranked) == counts
    assert (ranking.choice is None) == (most_seeds == 6)
    if ranking.choice is not None:
        assert ranking.choice.strategy == "asp"
    assert ranking.ranked[-1].candidate.strategy == "bsp"


def reached(strategy: str, seed: int, seconds: float) -> TrialResult:
    """A trial that reaches an error of 5 % after these seconds."""
    points = [CurvePoint(0, 0, 0.0, 2.0, 90.0), CurvePoint(100, 100, seconds, 0.2, 5.0)]
    return TrialResult(trial=Trial(strategy=strategy, seed=seed), curve=points, staleness=[100])


def test_wrong_calls_are_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = command(capsys, monkeypatch, "exp")
    with pytest.raises(BadInput, match="expected a RUN, or --workers and --step-s, got neither"):
        recommendation.describe_cluster(4, None, "")
    status, _, printed = call("advise", "run", "--workers", 3)
    assert status != 0
    assert "expected a RUN, or a cluster by options, got both" in printed
