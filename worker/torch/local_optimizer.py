"""A `torch.optim.Optimizer` that takes a worker's local steps, and its state as bytes."""

import json
from math import isfinite, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput
from worker.torch.arena import Arena
from worker.torch.model_tensors import load_torch
from worker.training.optimizer_state import OptimizerState, TensorForm

Floats = NDArray[np.float32]
_SCHEDULER = "scheduler"


class TorchOptimizer:
    """An optimiser over parameters of a model, which are in an arena.

    A tensor of its state is named by its parameter and its key, as `0.weight/exp_avg`. The options
    of parameter groups, such as the rate, are among the values, and so is the state of a
    `scheduler` of these. It takes its step with the optimiser: a state that is saved with a push
    has both or neither.
    """

    def __init__(self, optimizer: Any, model: Any, arena: Arena, scheduler: Any = None) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._arena = arena
        by_id = {id(parameter): name for name, parameter in model.named_parameters()}
        self._names = [
            [by_id[id(parameter)] for parameter in group["params"]]
            for group in optimizer.param_groups
        ]
        shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        # A new optimiser has no tensors to compare with, so its parameters have to be the same.
        self._parameters = [[[name, shapes[name]] for name in names] for names in self._names]

    def step(self) -> Floats:
        """The weights after a step of the optimiser, in the arena of the model."""
        self._optimizer.step()
        if self._scheduler is not None:
            self._scheduler.step()
        return self._arena.read()

    def begin(self, saved: OptimizerState | None) -> None:
        """Continue with `saved`; raises BadInput if it is of another optimiser or model.

        Of another worker's state neither the options of parameter groups nor the scheduler's state
        are taken.
        """
        if saved is None:
            return
        for field, expected, got in (
            ("kind", self._kind, saved.kind),
            ("parameters", self._parameters, saved.values.get("parameters")),
        ):
            if expected != got:
                if field == "parameters":
                    expected, got = "those of this optimizer, in its groups", "others"
                raise BadInput(f"its state: {field}", expected=expected, got=got)
        schedule = None if saved.worker else self._read_schedule(saved.values.get(_SCHEDULER))
        tensors = {
            name: _to_tensor(name, saved.arrays[name], form) for name, form in saved.forms.items()
        }
        state: dict[int, dict[str, Any]] = {}
        numbers = {name: number for number, name in enumerate(self._ordered)}
        plain = {tuple(key.rsplit("/", 1)): value for key, value in saved.values["plain"].items()}
        for (name, key), value in (
            *((tuple(label.rsplit("/", 1)), tensor) for label, tensor in tensors.items()),
            *plain.items(),
        ):
            state.setdefault(numbers[name], {})[key] = value
        present = self._optimizer.state_dict()
        groups = present["param_groups"]
        if not saved.worker:
            for group, options in zip(groups, saved.values["groups"], strict=True):
                group.update(
                    (key, tuple(value) if isinstance(value, list) else value)
                    for key, value in options.items()
                )
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        if schedule is not None:
            self._scheduler.load_state_dict(schedule)

    def save(self) -> OptimizerState:
        """The present state; its arrays are copies."""
        saved = self._optimizer.state_dict()
        torch = load_torch()
        forms, arrays, plain = {}, {}, {}
        for number, name in enumerate(self._ordered):
            for key, value in saved["state"].get(number, {}).items():
                label = f"{name}/{key}"
                if torch.is_tensor(value):
                    dtype = str(value.dtype).removeprefix("torch.")
                    forms[label] = TensorForm(dtype, tuple(value.shape))
                    flat = value.detach().cpu().clone().reshape(-1)
                    arrays[label] = flat.view(torch.uint8).numpy()
                elif _is_plain(value):
                    plain[label] = value
        groups = [
            {key: value for key, value in group.items() if key != "params" and _is_plain(value)}
            for group in saved["param_groups"]
        ]
        values = {"parameters": self._parameters, "plain": plain, "groups": groups}
        if self._scheduler is not None:
            # As text: some schedulers have an infinity, which the file's JSON cannot hold.
            state = json.dumps(_keep_plain(self._scheduler.state_dict()))
            values[_SCHEDULER] = {"kind": type(self._scheduler).__name__, "state": state}
        return OptimizerState(self._kind, forms, arrays, values)

    def _read_schedule(self, saved: Any) -> Any:
        """The state that the scheduler continues with; None without a saved one, or a scheduler."""
        if self._scheduler is None or saved is None:
            return None
        kind = type(self._scheduler).__name__
        if saved["kind"] != kind:
            raise BadInput("its state: scheduler", expected=kind, got=saved["kind"])
        return _merge(self._scheduler.state_dict(), json.loads(saved["state"]))

    @property
    def _kind(self) -> str:
        return type(self._optimizer).__name__

    @property
    def _ordered(self) -> list[str]:
        """The names of its parameters, as PyTorch numbers them."""
        return [name for names in self._names for name in names]


def _is_plain(value: object) -> bool:
    """Return whether a value can be written as JSON, to the bit."""
    if isinstance(value, float):
        return isfinite(value)
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, bool | int | str)


def _keep_plain(value: Any) -> Any:
    """A scheduler's state without what its constructor has been given, such as functions."""
    if isinstance(value, dict):
        return {
            key: _keep_plain(inner)
            for key, inner in value.items()
            if isinstance(key, str) and (isinstance(inner, float) or _is_nested(inner))
        }
    return [_keep_plain(inner) for inner in value] if isinstance(value, tuple | list) else value


def _is_nested(value: object) -> bool:
    """Return whether a value is plain, or has plain ones in dicts by name."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value)
    if isinstance(value, tuple | list):
        return all(map(_is_nested, value))
    return isinstance(value, float) or _is_plain(value)


def _merge(present: Any, saved: Any) -> Any:
    """The present state with the values of the saved one."""
    if isinstance(present, dict) and isinstance(saved, dict):
        return {**present, **{key: _merge(present.get(key), saved[key]) for key in saved}}
    if isinstance(present, list) and isinstance(saved, list) and len(present) == len(saved):
        return [_merge(*pair) for pair in zip(present, saved, strict=True)]
    return saved


def _to_tensor(name: str, content: Any, form: TensorForm) -> Any:
    torch = load_torch()
    dtype = getattr(torch, form.dtype, None)
    if not isinstance(dtype, torch.dtype) or content.nbytes != prod(form.shape) * dtype.itemsize:
        raise BadInput(
            f"its state: {name}", expected=f"{form.dtype}{list(form.shape)}", got="other bytes"
        )
    return torch.from_numpy(content.copy()).view(dtype).reshape(form.shape)
