"""A PyTorch model as a problem of experiments; skipped without PyTorch."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deploy.experiments.cluster import ClusterModel
from deploy.experiments.own_problems import make_problem
from deploy.experiments.problem import Places
from deploy.experiments.runner import run_sweep
from deploy.experiments.sweeps import read_sweep
from deploy.experiments.torch_problem import TorchProblem
from deploy.experiments.trials import Trial, run_trial
from deploy.experiments.workloads import workload_of
from shards.errors import BadInput
from tests.support.doc_pages import fences, read

torch: Any = pytest.importorskip("torch", reason="needs the extra `torch`")

NAME = f"{__name__}:circle"


def points(seed: int, count: int) -> tuple[Any, Any]:
    """Points of the plane, and whether they are within a circle."""
    at = torch.from_numpy(np.random.default_rng(seed).standard_normal((count, 2), np.float32))
    return at, (at.norm(dim=1) < 1.2).long()


def make_model() -> Any:
    """A small model, with dropout."""
    layers = torch.nn.Linear(2, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1)
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 2))


def circle(batch: int = 16, *, held_out: bool = False) -> TorchProblem:
    """The problem of this module."""
    parts = points(0, 400), points(1, 200)
    cross_entropy = torch.nn.functional.cross_entropy
    return TorchProblem(make_model, cross_entropy, *parts, batch=batch, held_out=held_out)


def test_a_gradient_is_that_of_backward() -> None:
    """A gradient equals that of an ordinary step of PyTorch, tensor by tensor."""
    problem = make_problem(NAME, 16, 10_000, held_out=False)
    batch, out = next(problem.batches(3, 1)), problem.table.empty()
    loss = problem.gradient(problem.start(5), batch, out)
    torch.manual_seed(5)
    model = make_model().train()
    torch.manual_seed(int(batch.sum()))
    inputs, targets = (part[torch.from_numpy(batch)] for part in points(0, 400))
    expected = torch.nn.functional.cross_entropy(model(inputs), targets)
    expected.backward()
    assert loss == pytest.approx(float(expected.detach()))
    views = Places(problem.table).views(out)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(views[name], parameter.grad.numpy(), rtol=1e-6, atol=1e-8)


def test_workers_learn_the_circle() -> None:
    """Four asynchronous workers train it, the same in each run; held-out rows are a fifth."""
    trial = Trial(workload=NAME, batch=16, rate=0.5, gradients=240, cluster=ClusterModel(workers=4))
    first, again = run_trial(trial), run_trial(trial)
    assert first.error < 25
    assert first.curve == again.curve
    held = circle(held_out=True)
    assert max(int(next(held.batches(0, 0)).max()) for _ in range(9)) < 320


def test_the_page_sweeps_a_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module of the page and its sweep run, with a rate and fewer gradients: 30 lines in all.

    A frozen layer of the model stays as it is.
    """
    blocks = {
        word: fence.text
        for fence in fences(read("docs/how-to/pytorch.md"))
        for word in ("rain.csv", 'name = "rain"')
        if word in fence.text
    }
    module, sweep = blocks["rain.csv"], blocks['name = "rain"']
    assert len([line for line in (module + sweep).splitlines() if line]) <= 30
    inputs, classes = points(2, 400)
    np.savetxt(tmp_path / "rain.csv", np.c_[inputs.numpy(), classes.numpy()], delimiter=",")
    (tmp_path / "rain.py").write_text(
        module.replace("return torch.nn.Seq", "return frozen() + torch.nn.Seq").replace(
            "def make",
            "def frozen():\n    return torch.nn.Sequential(torch.nn.Linear(2, 2)"
            ".requires_grad_(False))\n\n\ndef make",
        )
    )
    sweep = "seeds = [0, 0]\n" + sweep
    shorter = sweep.replace('"best"', "0.5").replace("2000", "32") + "\n[cluster]\nworkers = 2\n"
    (tmp_path / "rain.toml").write_text(shorter)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    experiment = read_sweep(tmp_path / "rain.toml")
    status = run_sweep(experiment, tmp_path / "out", note=lambda _: None)
    assert (status.done, status.failed) == (3, 0)
    problem = workload_of("rain:problem", 16)
    weights, out = problem.start(0), problem.table.empty()
    problem.gradient(weights, next(problem.batches(0, 0)), out)
    slopes = Places(problem.table).views(out)
    assert [name for name, slope in slopes.items() if not slope.any()] == ["0.weight", "0.bias"]


def test_wrong_models_and_data_are_one_line() -> None:
    inputs, targets = points(0, 40)
    loss = torch.nn.functional.cross_entropy
    with pytest.raises(BadInput, match="train: expected a target for each of at least one row"):
        TorchProblem(make_model, loss, (inputs, targets[1:]), (inputs, targets))
    with pytest.raises(BadInput, match="test: expected two tensors, got"):
        TorchProblem(make_model, loss, (inputs, targets), (inputs.numpy(), targets))
    normed = torch.nn.BatchNorm1d
    with pytest.raises(BadInput, match=r"without running statistics, got .*; nn.GroupNorm"):
        TorchProblem(lambda: normed(2), loss, (inputs, targets), (inputs, targets))


def test_targets_that_are_no_classes_have_a_relative_loss() -> None:
    """The error is 100 at the first weights, or that of the caller's function."""
    inputs, _ = points(0, 40)
    parts = (inputs, inputs[:, :1] * 2), (inputs, inputs[:, :1] * 2)
    loss = torch.nn.functional.mse_loss
    problem = TorchProblem(lambda: torch.nn.Linear(2, 1), loss, *parts)
    assert problem.measure(problem.start(0)).error == pytest.approx(100)
    other = TorchProblem(lambda: torch.nn.Linear(2, 1), loss, *parts, error=lambda *_: 7.0)
    assert other.measure(other.start(0)).error == 7
