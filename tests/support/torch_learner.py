"""A learner in PyTorch that a test runs as a process of its own, and may kill.

    python -m tests.support.torch_learner '{"job": FILE, "name": "w0", ...}'

It trains with AdamW, and writes a JSON file at its end: what its optimiser began with, and the
steps that it has taken in all its lives.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import ps
import worker
import worker.torch

ROWS = 8


def net() -> Any:
    """A small network, the same in each process."""
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def adam(model: Any) -> Any:
    """AdamW with a rate for each layer."""
    import torch

    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.005}]
    return torch.optim.AdamW(groups, lr=0.01)


def moments(model: Any, optimizer: Any) -> dict[str, str]:
    """The bytes of the optimiser's state by the names that a save gives them."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{key}": value.numpy().tobytes().hex()
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }


def train(options: dict[str, Any]) -> None:
    """Join the job, train to the last step, and report."""
    import torch

    model = net()
    own = adam(model)
    job = ps.connect(options["job"], tables=worker.torch.fragments(net(), options["fragments"]))
    schedule = torch.optim.lr_scheduler.ExponentialLR(own, 0.999)
    how = {name: options[name] for name in ("strategy", "workers", "incarnation", "steps", "keep")}
    with worker.torch.join(job, options["name"], model, own, scheduler=schedule, **how) as opt:
        began, first = moments(model, own), opt.client.step
        epochs = schedule.state_dict()
        rates = [group["lr"] for group in own.param_groups]
        dice = np.random.default_rng(first)
        for _ in range(first, options["steps"]):
            x = torch.from_numpy(dice.standard_normal((ROWS, 3)).astype(np.float32))
            loss = ((model(x)[:, 0] - x.sum(1)) ** 2).mean()
            loss.backward()
            opt.step(loss=loss, samples=ROWS)
            opt.zero_grad()
        opt.finish()
        report = {
            "began": began,
            "first": first,
            "rates": rates,
            "schedule": epochs,
            "step": opt.client.step,
            "lost": opt.lost,
        }
    Path(options["report"]).write_text(json.dumps(report))


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
