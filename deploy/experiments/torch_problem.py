"""A PyTorch model with its loss and its data as a problem of experiments.

PyTorch is imported when a problem is made.
"""

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from deploy.experiments.problem import BLOCK, Batch, Measurement, Places
from shards.errors import BadInput
from shards.tables import DenseTable, TensorSpec
from worker.strategies.base import Floats
from worker.torch.model_tensors import load_torch, tensors_of

_HELD_OUT = 5  # one training row in five is held out


class TorchProblem:
    """The mean loss of a `torch.nn.Module` over batches of `train`, tested on all of `test`.

    `make_model` returns a new model, with weights by PyTorch's generator, which is seeded before;
    its parameters are float32 on the CPU, and it has no buffers that a batch changes. Parameters
    without `requires_grad` stay as they are. `train` and `test` are pairs of tensors with a row for
    each example, the inputs and the targets. `loss` is called with the outputs and the targets of a
    batch, and `error` with those of `test`; it returns percent. By default the error is the share
    of wrong classes where targets are whole numbers, and otherwise the loss relative to that of the
    first weights. With `held_out` every fifth training row takes the place of `test`, and no
    gradient sees it. PyTorch is set to one thread, for trials run in several processes.
    """

    def __init__(
        self,
        make_model: Callable[[], Any],
        loss: Callable[[Any, Any], Any],
        train: tuple[Any, Any],
        test: tuple[Any, Any],
        *,
        batch: int = 4,
        held_out: bool = False,
        error: Callable[[Any, Any], float] | None = None,
    ) -> None:
        self._torch = load_torch()
        self._torch.set_num_threads(1)
        self._make_model, self._loss, self._batch = make_model, loss, batch
        self.digest = self._digest((*train, *test))
        (inputs, targets), self._test = self._check(train, "train"), self._check(test, "test")
        if held_out:
            held = self._torch.arange(len(inputs)) % _HELD_OUT == 0
            self._test = inputs[held], targets[held]
            inputs, targets = inputs[~held], targets[~held]
        self._train = inputs, targets
        self._model = self._make(0)
        trained, buffers = tensors_of("TorchProblem", self._model)
        if buffers:
            raise BadInput(
                "TorchProblem",
                expected="a model without running statistics",
                got=f"the buffer {min(buffers)}",
                hint="nn.GroupNorm has none",
            )
        self._trained = {name for name, value in trained.items() if value.requires_grad}
        specs = tuple(TensorSpec(name, tuple(value.shape)) for name, value in trained.items())
        self.table = DenseTable("torch", specs)
        self._places = Places(self.table)
        self._error, self.worst_error = error, 100.0
        self._first_loss = 1.0
        if error is None and not self._classes:
            self._first_loss = self.measure(self.start(0)).loss

    def start(self, seed: int) -> Floats:
        arena = self.table.empty()
        views = self._places.views(arena)
        for name, value in self._make(seed).named_parameters():
            views[name][...] = value.detach().numpy()
        return arena

    def batches(self, seed: int, worker: int) -> Iterator[Batch]:
        dice = np.random.default_rng((seed, worker, 2))
        while True:
            yield from dice.integers(len(self._train[0]), size=(BLOCK, self._batch))

    def gradient(self, weights: Floats, batch: Batch, out: Floats) -> float:
        torch, (inputs, targets) = self._torch, self._train
        torch.manual_seed(int(batch.sum()))  # dropout: the same for a batch, in any order of events
        rows = torch.from_numpy(batch)
        tensors = self._tensors(weights)
        trained = {name: tensors[name].requires_grad_() for name in sorted(self._trained)}
        outputs = torch.func.functional_call(self._model.train(), tensors, (inputs[rows],))
        loss = self._loss(outputs, targets[rows])
        slopes = torch.autograd.grad(loss, [*trained.values()], materialize_grads=True)
        out.fill(0)
        views = self._places.views(out)
        for name, slope in zip(trained, slopes, strict=True):
            views[name][...] = slope.numpy()
        return float(loss.detach())

    def measure(self, weights: Floats) -> Measurement:
        torch, (inputs, targets) = self._torch, self._test
        with torch.no_grad():
            model = self._model.eval()
            outputs = torch.func.functional_call(model, self._tensors(weights), (inputs,))
            loss = float(self._loss(outputs, targets))
            if not np.isfinite(loss):
                return Measurement(float("nan"), self.worst_error)
            if self._error is not None:
                return Measurement(loss, float(self._error(outputs, targets)))
            if self._classes:
                wrong = (outputs.argmax(1) != targets).float().mean()
                return Measurement(loss, 100 * float(wrong))
        return Measurement(loss, 100 * loss / self._first_loss)

    @property
    def _classes(self) -> bool:
        """True if targets are whole numbers, the numbers of classes."""
        return not self._test[1].is_floating_point()

    def _make(self, seed: int) -> Any:
        self._torch.manual_seed(seed)
        return self._make_model()

    def _tensors(self, arena: Floats) -> dict[str, Any]:
        views = self._places.views(arena)
        return {name: self._torch.from_numpy(view) for name, view in views.items()}

    def _check(self, pair: Any, name: str) -> tuple[Any, Any]:
        """Raise BadInput unless it is a pair of tensors with as many rows."""
        label = f"TorchProblem: {name}"
        if len(pair) != 2 or not all(isinstance(part, self._torch.Tensor) for part in pair):
            raise BadInput(
                label, expected="two tensors", got=[type(part).__name__ for part in pair]
            )
        inputs, targets = pair
        if len(inputs) != len(targets) or not len(inputs):
            raise BadInput(
                label,
                expected="a target for each of at least one row",
                got=f"{len(inputs)} rows and {len(targets)} targets",
            )
        return inputs, targets

    def _digest(self, parts: tuple[Any, ...]) -> str:
        digest = hashlib.sha256()
        for part in parts:
            digest.update(np.ascontiguousarray(np.asarray(part)).tobytes())
        return digest.hexdigest()
