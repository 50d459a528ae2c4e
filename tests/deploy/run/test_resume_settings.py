"""The settings of a resumed run: the options given now, over the earlier run's settings."""

from pathlib import Path
from typing import Any

import pytest

from deploy.run import train as training
from deploy.run.folder import RunFolder
from deploy.run.resume_settings import resume_settings
from deploy.run.settings import TrainSettings
from deploy.run.snapshot_ref import SnapshotRef
from ps.durability import Durability
from ps.launch.launcher import Placement
from shards.errors import BadInput
from tests.support.cli_in_process import Run
from tests.support.cli_refusals import refuses


def told(**more: Any) -> TrainSettings:
    return TrainSettings(solver=Path("/s"), data=Path("/d"), out=Path("/o"), **more)


def test_what_is_unset_takes_its_default() -> None:
    """Any option of the earlier run can be unset; that of the bound depends on the strategy."""
    earlier = told(ray="h:1", link="rtt=1ms", n_push=2, plaintext=True, seed=7, staleness=9)
    unset = ["ray", "link", "n-push", "plaintext", "staleness"]
    assert resume_settings(earlier, {"max_iter": 5}, unset) == (told(seed=7, max_iter=5), [])
    bsp = told(strategy="bsp")
    now = resume_settings(earlier, {"strategy": "bsp"}, unset)[0]
    assert now == told(strategy="bsp", staleness=0, seed=7)
    assert resume_settings(earlier, {"strategy": "asp"}, ["n-push"])[0].staleness is None
    assert resume_settings(bsp, {}, ["staleness"])[0] == bsp
    assert resume_settings(bsp, {}, ["staleness", "strategy"])[0] == told()


SENSELESS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"durability": Durability.REPLICATED, "silence_s": 3.0},
        {"durability": Durability.LOGGED},
        (
            "dropped --silence-s 3 from the earlier run:"
            " expected --durability replicated, got logged"
        ),
    ),
    (
        {"durability": Durability.LOGGED, "logs": Path("/l")},
        {"durability": Durability.REPLICATED},
        (
            "dropped --logs /l from the earlier run:"
            " expected --durability process or logged, got replicated"
        ),
    ),
    (
        {"ray": "h:1"},
        {"shards_in": Placement.PROCESSES},
        (
            "dropped --ray h:1 from the earlier run:"
            " expected shards in Ray, got --shards-in processes"
        ),
    ),
    (
        {"warm_steps": 4},
        {"strategy": "bsp", "staleness": 0},
        "dropped --warm-steps 4 from the earlier run: strategy bsp has no such option",
    ),
]


@pytest.mark.parametrize(("then", "now", "word"), SENSELESS)
def test_what_means_nothing_any_more_takes_its_default(
    then: dict[str, Any], now: dict[str, Any], word: str
) -> None:
    """It is reported, and all else is kept; an option given now without effect is refused."""
    assert resume_settings(told(seed=7, **then), now, []) == (told(seed=7, **now), [word])
    (name,) = then.keys() - {"durability"}
    with pytest.raises(BadInput, match=word.removeprefix("dropped ").partition(" from the")[0]):
        resume_settings(told(), now | {name: then[name]}, [])


def test_what_still_means_something_holds() -> None:
    """A setting that still has an effect is kept, even where its default would do."""
    earlier = told(durability=Durability.REPLICATED, silence_s=3.0, ray="h:1", n_fetch=2)
    settings, words = resume_settings(earlier, {"lease_s": 20.0}, [])
    assert settings.asdict() == earlier.asdict() | {"lease_s": 20.0}
    assert words == []


def test_a_conflict_is_not_settled_silently() -> None:
    """A setting that has an effect but conflicts with another is not dropped."""
    with pytest.raises(BadInput, match="--link: expected shards with one copy each"):
        resume_settings(told(link="rtt=1ms"), {"durability": Durability.REPLICATED}, [])
    settings, _ = resume_settings(
        told(link="rtt=1ms"), {"durability": Durability.REPLICATED}, ["link"]
    )
    assert settings == told(durability=Durability.REPLICATED)


@pytest.fixture
def run(job: Path) -> Path:
    """A run folder with an option that is not the default, and no snapshot yet."""
    settings = TrainSettings(
        solver=job / "solver.prototxt",
        data=job / "data",
        out=job / "run",
        durability=Durability.REPLICATED,
        silence_s=3.0,
        n_push=2,
    )
    RunFolder.create(settings.out, settings.plain()).close()
    return settings.out


@pytest.mark.usefixtures("run")
@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--resume run --unset out", "--unset out: expected an option that has a default, as ray"),
        ("--resume run --unset resume", "--unset resume: expected an option that has a default.*"),
        ("--resume run --unset seed --seed 2", "--seed: expected it or --unset seed, got both"),
        ("--resume run --unset snapshots", "train: expected --snapshots or --resume, got both"),
        ("--out new --unset seed", "--unset seed: expected --resume with an earlier run, got none"),
    ],
)
def test_what_cannot_be_unset(downpour: Run, job: Path, arguments: str, line: str) -> None:
    """Options without a default, options given now, and options without a run to resume."""
    refuses(downpour, job, f"train {arguments}", line)


def test_the_command_says_what_holds_no_longer(
    downpour: Run, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command reports dropped options on standard error, before anything begins."""
    seen: list[TrainSettings] = []

    def begun(settings: TrainSettings, *, origin: SnapshotRef) -> None:
        seen.append(settings)

    monkeypatch.setattr(training, "run", begun)
    options = ("--durability", "memory", "--unset", "n-push", "--unset", "durability")
    _, _, err = downpour("train", "--resume", run, *options[2:])
    assert err == (
        "dropped --silence-s 3 from the earlier run: expected --durability replicated, got memory\n"
    )
    _, _, said = downpour("train", "--resume", run, *options[:4])
    assert said == err
    expected = TrainSettings(solver=seen[0].solver, data=seen[0].data, out=run)
    assert seen == [expected, expected]
