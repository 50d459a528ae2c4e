"""The notebook on a sweep's results runs, cell by cell, on a short form of the example."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from deploy.experiments.runner import run_sweep
from deploy.experiments.sweeps import read_sweep
from tests.support.doc_pages import ROOT

NOTEBOOK = ROOT / "docs" / "how-to" / "sweep-results.ipynb"
EXAMPLE = ROOT / "deploy" / "examples" / "sweep.toml"


@pytest.fixture
def pictures() -> Iterator[None]:
    """Pictures are drawn in memory, and closed at the end."""
    mpl.use("agg")
    yield
    plt.close("all")


@pytest.mark.usefixtures("pictures")
def test_each_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tables have every trial and look of the sweep, and a line is drawn for each kind."""
    text = EXAMPLE.read_text()
    for before, after in (
        ("gradients = 4000", "gradients = 200"),
        ("look_every = 400", "look_every = 50"),
        ("seeds = [0, 2]", "seeds = [0, 1]"),
    ):
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "sweep.toml").write_text(text)
    sweep = read_sweep(tmp_path / "sweep.toml")
    run_sweep(sweep, tmp_path / "runs" / "experiments" / sweep.name, note=lambda _: None)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    looks = 5  # at the start, and after each 50 gradients
    assert len(names["results"].trials) == len(sweep.trials) == 3 * 2 * 2 * 2
    assert len(names["curves"]) == looks * len(sweep.trials)
    assert len(names["medians"]) == looks * 3
    drawn = {line.get_label(): line.get_ydata() for line in names["axis"].get_lines()}
    assert set(drawn) == {"asp", "stale_rate", "easgd:tau=5"}
    assert all(errors[-1] < errors[0] for errors in drawn.values())


def test_the_notebook_has_no_outputs() -> None:
    """Outputs of some machine would be figures that no command of ours makes."""
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert cells
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
