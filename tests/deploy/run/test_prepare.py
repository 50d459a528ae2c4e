"""What a run says before it starts."""

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from google.protobuf.message import Message

from deploy.run.prepare import prepare
from deploy.run.settings import TrainSettings
from shards.errors import BadInput
from tests.support.tiny_job import write_job
from worker.caffe.net import Description, Network
from worker.caffe.phases import Phase
from worker.data import image_decoding
from worker.job import inputs


@pytest.mark.parametrize(("max_iter", "expected"), [(None, 0), (4, 0), (6, 1)])
def test_a_rate_of_0_is_announced(tmp_path: Path, max_iter: int | None, expected: int) -> None:
    """Steps beyond the end of the policy `poly` change nothing, so a notice names both numbers."""
    solver = write_job(tmp_path, max_iter=4, extra='lr_policy: "poly" power: 1')
    data, out = tmp_path / "data", tmp_path / "run"
    settings = TrainSettings(solver=solver, data=data, out=out, max_iter=max_iter)
    found = [line for line in prepare(settings, None).inputs.notices if "poly" in line]
    beyond = "poly reaches 0 at the file's max_iter, 4: nothing is learned from there to"
    assert found == [f"{solver}: lr_policy {beyond} --max-iter 6"] * expected


def test_a_net_is_described_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the Spark job, solver and net are parsed once, and a net is built for each phase."""
    parsed: list[str] = []
    built: list[str] = []
    parse, build = text_format.Parse, Network.__init__

    def count_parse(text: str, message: Message) -> Message:
        parsed.append(type(message).__name__)
        return parse(text, message)

    def count_build(network: Network, description: Description) -> None:
        built.append(description.phase)
        build(network, description)

    monkeypatch.setattr(text_format, "Parse", count_parse)
    monkeypatch.setattr(Network, "__init__", count_build)
    monkeypatch.setattr("worker.job.inputs.spark.runs_here", lambda _: True)
    solver = write_job(tmp_path, max_iter=4)
    settings = TrainSettings(solver=solver, data=tmp_path / "data", out=tmp_path / "run")
    job = prepare(settings, None).inputs.job
    inputs.prepare(object(), job, None, None, None, None)  # type: ignore[arg-type]  # not looked at
    assert parsed == ["SolverParameter", "NetParameter"]
    assert built == [Phase.TRAIN, Phase.TEST]


def _settings(folder: Path, until: str, interval: str = "test_interval: 2") -> TrainSettings:
    solver = write_job(folder, max_iter=4, extra=interval)
    return TrainSettings(solver=solver, data=folder / "data", out=folder / "run", until=until)


def test_a_figure_that_ends_training(tmp_path: Path) -> None:
    """--until is true of a test that has reached its figure, from above or from below."""
    plan = prepare(_settings(tmp_path, "accuracy>=0.9"), None).inputs.evaluation
    assert plan is not None
    assert plan.until is not None
    tests = {"accuracy": 0.9, "loss": 0.3}, {"accuracy": 0.89, "loss": 0.2}
    assert [plan.until(figures) for figures in tests] == [True, False]


@pytest.mark.parametrize(
    ("until", "interval", "got"),
    [
        ("speed>=3", "test_interval: 2", "accuracy, loss"),
        ("accuracy>=0.9", "", "no such tests: set the solver's test_interval"),
    ],
)
def test_a_figure_that_no_test_has(tmp_path: Path, until: str, interval: str, got: str) -> None:
    """It is refused before anything starts."""
    with pytest.raises(BadInput) as refused:
        prepare(_settings(tmp_path, until, interval), None)
    assert str(refused.value) == (
        f"--until {until}: expected a figure of the tests while training, got {got}"
    )


def test_classes_of_other_data_to_test_on(tmp_path: Path) -> None:
    """Both folders have the same classes, or labels would mean others in tests."""
    solver = write_job(tmp_path, max_iter=4)
    for name in ("train/ant", "train/bee", "val/bee"):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        (folder / "0.png").write_bytes(image_decoding.encode(np.zeros((1, 8, 8), np.uint8)))
    settings = TrainSettings(
        solver=solver, data=tmp_path / "train", test_data=tmp_path / "val", out=tmp_path / "run"
    )
    with pytest.raises(
        BadInput, match=r"val: expected a folder for each class .*, got none for an"
    ):
        prepare(settings, None)
    (tmp_path / "val" / "ant").mkdir()
    assert prepare(settings, None).inputs.test_rows == 1
