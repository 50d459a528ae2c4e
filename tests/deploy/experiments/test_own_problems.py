"""Experiments on problems of a user's module."""

from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from deploy.experiments.runner import Folder, run_sweep
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.trials import Trial, run_trial
from deploy.experiments.workloads import data_digest, workload_of
from shards.errors import BadInput

OWN = """
import numpy as np
from deploy.experiments.problem import Measurement
from shards.tables import DenseTable, TensorSpec

class Line:
    '''Fit a line to ten points.'''
    worst_error = 100.0

    def __init__(self, batch=4, held_out=False):
        self.table = DenseTable("line", (TensorSpec("w", (2,)),))
        self._batch = batch
        self._at = np.linspace(0, 1, 10).astype(np.float32)[int(held_out):]

    def start(self, seed):
        return self.table.empty()

    def batches(self, seed, worker):
        dice = np.random.default_rng((seed, worker))
        while True:
            yield dice.integers(len(self._at), size=self._batch)

    def gradient(self, weights, batch, out):
        at = self._at[batch]
        off = weights[0] + weights[1] * at - (1 + 2 * at)
        out[:] = 0
        out[0], out[1] = off.mean(), (off * at).mean()
        return float((off**2).mean() / 2)

    def measure(self, weights):
        off = weights[0] + weights[1] * self._at - (1 + 2 * self._at)
        loss = float((off.astype(np.float64)**2).mean() / 2)
        return Measurement(loss, min(100.0, 100 * loss))
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of a module of this test's in the working directory."""
    name = "own_" + "".join(filter(str.isalnum, request.node.name)).lower()
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_sweep_of_an_own_problem_learns(own: str, tmp_path: Path) -> None:
    """It has trials and held-out rows as any workload; its ids change with it."""
    sweep = tmp_path / "own.toml"
    sweep.write_text(
        f'name = "own"\nworkload = "{own}:Line"\nseeds = [0, 1]\ngradients = 400\nrate = 0.5\n'
        '[grid]\nstrategy = ["asp", "bsp"]\n'
    )
    experiment = read_sweep(sweep)
    run_sweep(experiment, tmp_path / "out", jobs=1, note=lambda _: None)
    results = [Folder(tmp_path / "out").load(trial) for trial in experiment.trials]
    assert len(results) == 4
    assert all(result is not None and result.error < 1 for result in results)
    held = Trial(workload=f"{own}:Line", gradients=20, held_out=True)
    assert np.isfinite(run_trial(held).error)
    before = data_digest(f"{own}:Line")
    data_digest.cache_clear()
    (tmp_path / f"{own}.py").write_text(OWN + "\n")
    assert data_digest(f"{own}:Line") != before
    assert structs.replace(held, seed=1).id != held.id


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("class Line", "class Other", "expected a class or a function Line in .*, got nothing"),
        ("def measure", "def test", "expected methods start, .*, got no measure"),
        ("import numpy as np", "import numqy as np", "got No module named 'numqy'"),
        ("class Line:", "class Line", "a module to import, got SyntaxError"),
        ("worst_error = 100.0", "worst_error = None", "worst_error, in percent, got None"),
        ("self.table = DenseTable", "self.other = DenseTable", "a DenseTable, got NoneType"),
        ("return self.table.empty()", "return np.zeros(2)", r"start\(0\): .*float32, got float64"),
        (
            "return self.table.empty()",
            "return np.zeros(2, np.float32)",
            r"start\(0\): expected the shape \(\d+,\), table.size, got \(2,\)",
        ),
        (
            "return self.table.empty()",
            "return np.random.random(self.table.size).astype(np.float32)",
            r"start\(0\): expected ",
        ),
        ("yield dice", "return iter(()) if dice else dice", "an iterator without end"),
        ("off.mean(), ", "np.nan, ", r"gradient at start\(0\): expected finite values"),
        ("        out[:] = 0\n", "", r"gradient at start\(0\): expected finite values"),
        ("out[:] = 0", "out[:] = 1", "zeros between the tensors"),
        ("return float((off**2).mean() / 2)", "return None", "a finite loss, got None"),
        ("out[:] = 0", "out[:] = 0; weights += 1", "weights that only the shards change"),
        ("out[:] = 0", "raise ValueError('no')", "a gradient and a test, got ValueError: no"),
        ("return Measurement(", "return (", "a Measurement of finite figures"),
        ("held_out=False", "**other", None),
        ("self._batch = batch", "raise OSError('no data')", "a problem, got OSError: no data"),
    ],
)
def test_a_fault_is_one_line(own: str, old: str, new: str, message: str | None) -> None:
    """Each is found before anything runs; any other parameters are the module's affair."""
    path = Path(f"{own}.py")
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new).replace("int(held_out)", "0"))
    trial = Trial(workload=f"{own}:Line", gradients=4)
    if message is None:
        trial.check()
        return
    with pytest.raises(BadInput, match=message) as caught:
        trial.check()
    assert str(caught.value).startswith(f"workload {own}:Line")
    assert "\n" not in str(caught.value)


def test_other_names_are_errors(own: str) -> None:
    """A module that is not there, and a problem without rows to hold out."""
    with pytest.raises(BadInput, match=r"expected a module nowhere in .* or installed, got none"):
        workload_of("nowhere:Problem")
    Path(f"{own}.py").write_text(OWN.replace(", held_out=False", "").replace("int(held_out)", "0"))
    with pytest.raises(BadInput, match=r"expected a parameter held_out, .*got none"):
        workload_of(f"{own}:Line", held_out=True)
