"""`deploy.experiments.load`: results as tables of pandas."""

import re
import sys
from pathlib import Path

import pytest

from deploy.experiments import load, trials
from deploy.experiments.report import write_report
from deploy.experiments.runner import Folder, run_sweep
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trials import Trial, run_trial
from shards.errors import BadInput
from tests.support.shape_outcomes import keep_outcome

SWEEP = """
name = "tables"
seeds = [0, 1]
workload = "quad"
strategy = "easgd"
gradients = 40
look_every = 10
[cluster]
workers = 2
[grid]
tau = [1, 5]
"cluster.link" = ["", "rtt=2s"]
"""


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the results of the sweep."""
    folder = tmp_path_factory.mktemp("swept")
    (folder / "tables.toml").write_text(SWEEP)
    run_sweep(read_sweep(folder / "tables.toml"), folder / "out", note=lambda _: None)
    return folder / "out"


def test_a_sweep_is_two_tables(swept: Path) -> None:
    """Every figure of every trial, and every look at it, is that of its result."""
    results = load(swept)
    sweep, folder = read_sweep(swept / "sweep.toml"), Folder(swept)
    assert set(results.trials["name"]) == {trial.id for trial in sweep.trials}
    for trial in sweep.trials:
        result = folder.load(trial)
        assert result is not None
        (row,) = results.trials[results.trials["name"] == trial.id].to_dict("records")
        assert row["point"] == f"tau {row['tau']}, cluster.link {row['link'] or 'none'}"
        assert row["strategy"] == trial.strategy == f"easgd:tau={row['tau']}"
        assert (row["error"], row["seconds"]) == (result.error, result.seconds)
        curve = results.curves[results.curves["name"] == trial.id]
        assert (curve["seed"] == trial.seed).all()
        assert curve["error"].tolist() == [look.error for look in result.curve]
        assert curve["gradients"].tolist() == [look.gradients for look in result.curve]
    assert "cluster.link" not in results.trials


def test_a_shape_has_the_settings_of_its_levels_as_points(tmp_path: Path) -> None:
    levels = [Trial(workload="quad", gradients=8, rate=rate) for rate in (0.01, 0.02)]
    keep_outcome(tmp_path, 3, [run_trial(level) for level in levels], registration=2)
    results = load(str(tmp_path))
    assert results.trials["from"].tolist() == ["shape 3.2"] * 2
    assert results.curves["point"].nunique() == 2
    assert results.curves["point"][0].startswith("asp, rate 0.01, 8 workers; quad, batch 4")


def test_a_folder_of_another_version_is_one_line(
    swept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Results of another build, an outcome with other fields, and folders without results."""
    with monkeypatch.context() as patched:
        patched.setattr(trials, "build_id", lambda: "another")
        with pytest.raises(BadInput, match="expected results of this build, got 8 of another"):
            load(swept)
    (tmp_path / "shape-01-ci.msgpack").write_bytes(b"\x81\xa6number\x01")
    for read in (load, lambda folder: write_report(folder, tmp_path / "page.html")):
        with pytest.raises(BadInput, match=r"shape-01-ci.msgpack: expected a shape's") as refused:
            read(tmp_path)
        assert "\n" not in str(refused.value)
    (tmp_path / "none").mkdir()
    for name, got in (("none", "another"), ("nowhere", "no folder there")):
        with pytest.raises(BadInput, match=rf"imported runs, got {got}"):
            load(tmp_path / name)
    Folder(tmp_path / "new").create(read_sweep(swept / "sweep.toml"))
    with pytest.raises(BadInput, match="expected an experiment with trials, got none"):
        load(tmp_path / "new")


def test_without_pandas_the_extra_is_named(swept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BadInput, match=re.escape('expected pandas (pip install "/path/to/downpo')):
        load(swept)
