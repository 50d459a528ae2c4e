"""`worker.torch`: loops in PyTorch with every strategy; skipped without PyTorch."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import ps
import worker
import worker.torch
from shards.errors import BadInput
from worker.strategies import STRATEGIES

torch: Any = pytest.importorskip("torch", reason="needs the extra `torch`")

WANTED = torch.tensor([1.0, -2.0, 3.0])
ROWS = 16


def line() -> Any:
    """A linear model that begins at zero."""
    model = torch.nn.Linear(3, 1)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def normed() -> Any:
    """A model with BatchNorm, from a seed."""
    torch.manual_seed(4)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1)
    )


def loss_of(model: Any, dice: Any) -> Any:
    """The loss for random points on the plane through WANTED and 5."""
    x = torch.from_numpy(dice.standard_normal((ROWS, 3)).astype(np.float32))
    return (model(x)[:, 0] - x @ WANTED - 5).square().mean() / 2


def distance(model: Any) -> float:
    """How far a linear model is from WANTED and 5."""
    off = (model.weight[0] - WANTED).abs().max() + (model.bias - 5).abs().max()
    return float(off.detach())


def steps_of(model: Any, opt: Any, number: int, steps: int) -> None:
    """An ordinary loop over random points."""
    dice = np.random.default_rng(number)
    for _ in range(steps):
        loss = loss_of(model, dice)
        loss.backward()
        opt.step()
        opt.zero_grad()


SHORT = {
    "diloco": "diloco:h=10",
    "async_diloco": "async_diloco:h=10,inner_lr=0.05,momentum=0.5,weight_decay=0",
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_trains(name: str) -> None:
    """Two loops in PyTorch come near the solution with any strategy."""
    strategy = SHORT.get(name, name)
    table = worker.torch.params(line(), rate=0.1)
    options: dict[str, Any] = {"staleness": 4} if name == "ssp" else {}
    with worker.start(table, strategy=strategy, workers=2, on="threads", **options) as job:

        def train(number: int) -> int:
            model = line()
            with worker.torch.join(job, f"w{number}", model, strategy=strategy, workers=2) as opt:
                steps_of(model, opt, number, 305)  # an odd number ends within a window
                opt.finish()
                return opt.client.step

        with ThreadPoolExecutor(2) as pool:
            taken = list(pool.map(train, range(2)))
        model = worker.torch.load(line(), job.read())
    assert taken == [305, 305]
    assert distance(model) < 1.6
