"""The workloads of experiments: small problems in NumPy, with real gradients, by name."""

import hashlib
from collections.abc import Iterator
from functools import cache

import numpy as np

from deploy.experiments.character_model import CharacterModel, text_read
from deploy.experiments.images import Mlp, mnist
from deploy.experiments.lenet import LeNetImages
from deploy.experiments.logistic import Logistic
from deploy.experiments.own_problems import digest_problem, make_problem, names_module
from deploy.experiments.problem import BLOCK, Batch, Measurement, Workload
from shards.errors import BadInput
from shards.tables import DenseTable, TensorSpec
from worker.strategies.base import Floats


class Quad:
    """loss = 1/2 sum h_i w_i^2, with h from 1/`condition` to 1, and noise on the gradient.

    Every weight starts at 1. The error is 100 times the loss, relative to the loss at the start.
    """

    worst_error = 100.0

    def __init__(self, size: int = 64, condition: float = 100.0, noise: float = 0.1) -> None:
        self.table = DenseTable("quad", (TensorSpec("w", (size,)),))
        self.steep = np.geomspace(1 / condition, 1.0, size).astype(np.float32)
        self.noise = np.float32(noise)
        self._size = size

    def start(self, seed: int) -> Floats:
        arena = self.table.empty()
        arena[: self._size] = 1.0
        return arena

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        while True:
            yield from dice.standard_normal((BLOCK, 1, self._size), np.float32)

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        size = self._size
        at = weights[:size]
        out[size:] = 0.0
        with np.errstate(over="ignore", invalid="ignore"):  # a diverging run overflows
            np.multiply(self.steep, at, out=out[:size])
            loss = 0.5 * float(at @ out[:size])
            out[:size] += self.noise * batch[0]
        return loss

    def measure(self, weights: Floats) -> Measurement:
        at = weights[: self._size].astype(np.float64)
        steep = self.steep.astype(np.float64)
        loss = 0.5 * float(steep @ at**2)
        return Measurement(loss, 100 * loss / (0.5 * float(steep @ np.ones_like(at))))


WORKLOADS = ("quad", "l1", "mlp", "deep", "lenet", "charlm")
_DEPTHS = ("1", "2", "4", "6")


@cache
def workload_of(
    name: str, batch: int = 4, tested: int = 10_000, *, held_out: bool = False
) -> Workload:
    """A workload by name: mlp, mlp:128-64 of these hidden sizes, deep:N of N times 64; or one of a
    user's module, my_module:Problem. Raises BadInput.

    With `held_out` it is measured on a part of the training data that its batches leave out; `quad`
    has no data.
    """
    kind, _, option = name.partition(":")
    match kind:
        case "quad" if not option:
            return Quad()
        case "l1" if not option:
            return Logistic(batch, tested, held_out=held_out)
        case "mlp" if not option:
            return Mlp(batch, tested=tested, held_out=held_out)
        case "mlp" if (hidden := _hidden_sizes(option)) is not None:
            return Mlp(batch, hidden, tested, held_out=held_out)
        case "mlp" if option == "digits":
            return Mlp(batch, tested=tested, own_digits=True, held_out=held_out)
        case "lenet" if not option:
            return LeNetImages(batch, tested, held_out=held_out)
        case "charlm" if not option:
            return CharacterModel(batch, tested, held_out=held_out)
        case "deep" if option in _DEPTHS:
            return Mlp(batch, (64,) * int(option), tested, held_out=held_out)
    if kind not in WORKLOADS and names_module(name):
        return make_problem(name, batch, tested, held_out=held_out)
    raise BadInput(
        "workload",
        expected=f"one of {', '.join(WORKLOADS)}, mlp:128-64 (hidden sizes), mlp:digits,"
        f" deep as deep:{', '.join(_DEPTHS)}, or my_module:Problem",
        got=f"{name!r}",
    )


def _hidden_sizes(text: str) -> tuple[int, ...] | None:
    """The hidden sizes in a text such as 128-64; None for any other text."""
    parts = text.split("-")
    if not all(part.isascii() and part.isdigit() and 1 <= int(part) <= 4096 for part in parts):
        return None
    return tuple(map(int, parts))


@cache
def data_digest(name: str) -> str:
    """The digest of the data that a workload reads, and of a user's module; empty for none."""
    match name.partition(":")[0]:
        case "l1" | "mlp" | "deep" | "lenet":
            parts = [part.tobytes() for part in mnist()]
        case "charlm":
            parts = [text_read().tobytes()]
        case _ if names_module(name):
            return digest_problem(name, workload_of(name))
        case _:
            return ""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
