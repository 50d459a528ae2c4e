"""Networks in flax for `worker.ml`, which Spark's tasks import by name."""

from typing import Any

import jax
from flax import nnx


class Perceptron(nnx.Module):  # type: ignore[misc]  # no types without flax
    """Two layers."""

    def __init__(self, size: int, classes: int, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(size, 8, rngs=rngs)
        self.last = nnx.Linear(8, classes, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.last(jax.nn.relu(self.hidden(x)))


class Normalised(Perceptron):
    """The same with state that is not trained, which `worker.ml` refuses."""

    def __init__(self, size: int, classes: int, rngs: nnx.Rngs) -> None:
        super().__init__(size, classes, rngs)
        self.norm = nnx.BatchNorm(size, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return super().__call__(self.norm(x))
