"""A network in PyTorch for `worker.ml`, which Spark's tasks import by name."""

from typing import Any

import torch


class Perceptron(torch.nn.Module):  # type: ignore[misc]  # no types without PyTorch
    """Two layers."""

    def __init__(self, size: int, classes: int) -> None:
        super().__init__()
        self.hidden = torch.nn.Sequential(torch.nn.Linear(size, 8), torch.nn.ReLU())
        self.last = torch.nn.Linear(8, classes)

    def forward(self, x: Any) -> Any:
        return self.last(self.hidden(x))


class Lazy(torch.nn.Module):  # type: ignore[misc]  # no types without PyTorch
    """Two layers, the first of which takes its width from the first rows."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.hidden = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.ReLU())
        self.last = torch.nn.Linear(8, classes)

    def forward(self, x: Any) -> Any:
        return self.last(self.hidden(x))
