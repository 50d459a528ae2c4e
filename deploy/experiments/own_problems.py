"""Problems of a user's module, as workloads: `my_module:Problem`.

The name after the colon is a class or a function. It is called with those of `batch`, `tested` and
`held_out` that it has parameters for, and returns a `Workload` (problem.py). Everything that a run
asks of it is tried once, before anything runs: each fault is one line. The module is imported from
the working directory or from an installed package.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from deploy.experiments.problem import Measurement, Workload
from shards.errors import BadInput
from shards.tables import DenseTable

_METHODS = ("start", "batches", "gradient", "measure")


def names_module(name: str) -> bool:
    """Return whether a workload's name may be that of a user's module."""
    module, _, member = name.partition(":")
    return member.isidentifier() and all(part.isidentifier() for part in module.split("."))


def make_problem(name: str, batch: int, tested: int, *, held_out: bool) -> Workload:
    """The problem that a module makes, tried once; raises BadInput."""
    label = f"workload {name}"
    make = _find_factory(name, label)
    settings: dict[str, Any] = {"batch": batch, "tested": tested, "held_out": held_out}
    known = _list_parameters(make, label)
    if held_out and not known & {"held_out", "**"}:
        raise BadInput(
            label,
            expected="a parameter held_out, for rates are chosen on training rows that are held"
            " out",
            got="none",
        )
    if "**" not in known:
        settings = {key: value for key, value in settings.items() if key in known}
    try:
        problem = make(**settings)
    except BadInput as error:
        raise error.within(label) from None
    except Exception as error:
        raise BadInput(label, expected="a problem", got=_describe(error)) from error
    _check_problem(problem, label)
    return problem  # type: ignore[no-any-return]  # checked


def digest_problem(name: str, problem: Workload) -> str:
    """The digest of a problem's module, and of its data if it has an attribute `digest`."""
    source = inspect.getsourcefile(_load_module(name.partition(":")[0], f"workload {name}"))
    digest = hashlib.sha256(Path(source).read_bytes() if source else b"")
    digest.update(str(getattr(problem, "digest", "")).encode())
    return digest.hexdigest()


def _find_factory(name: str, label: str) -> Callable[..., Any]:
    module_name, _, member = name.partition(":")
    module = _load_module(module_name, label)
    make = getattr(module, member, None)
    if not callable(make):
        raise BadInput(
            label,
            expected=f"a class or a function {member} in {module.__file__ or module_name}",
            got="nothing of that name" if make is None else type(make).__name__,
        )
    return make  # type: ignore[no-any-return]  # callable


def _load_module(name: str, label: str) -> ModuleType:
    directory = str(Path.cwd())
    if directory not in sys.path and "" not in sys.path:
        sys.path.append(directory)  # last: a file of the user's hides no library
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if not name.startswith(error.name or "-"):
            raise BadInput(label, expected="a module to import", got=error) from None
        raise BadInput(
            label, expected=f"a module {name} in {directory} or installed", got="none"
        ) from None
    except Exception as error:
        raise BadInput(label, expected="a module to import", got=_describe(error)) from error


def _list_parameters(make: Callable[..., Any], label: str) -> set[str]:
    """The names of the parameters; ** if it takes any."""
    try:
        parameters = inspect.signature(make).parameters.values()
    except (TypeError, ValueError) as error:
        raise BadInput(label, expected="a class or a function", got=error) from None
    any_name = {"**"} if any(entry.kind is entry.VAR_KEYWORD for entry in parameters) else set()
    return any_name | {entry.name for entry in parameters}


def _check_problem(problem: Any, label: str) -> None:
    """Try all that a run asks of a problem; raises BadInput for the first fault."""
    lacking = [name for name in _METHODS if not callable(getattr(problem, name, None))]
    if lacking:
        raise BadInput(
            label, expected=f"methods {', '.join(_METHODS)}", got=f"no {' and no '.join(lacking)}"
        )
    table, worst = getattr(problem, "table", None), getattr(problem, "worst_error", None)
    if not isinstance(table, DenseTable):
        raise BadInput(label, expected="an attribute table, a DenseTable", got=type(table).__name__)
    if isinstance(worst, bool) or not isinstance(worst, int | float) or not np.isfinite(worst):
        raise BadInput(label, expected="an attribute worst_error, in percent", got=repr(worst))
    try:
        _try_problem(problem, table, label)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(label, expected="a gradient and a test", got=_describe(error)) from error


def _try_problem(problem: Any, table: DenseTable, label: str) -> None:
    weights = problem.start(0)
    _check_arena(weights, table, f"{label}: start(0)")
    if problem.start(0).tobytes() != weights.tobytes():
        raise BadInput(f"{label}: start(0)", expected="equal weights each time", got="others")
    batches = problem.batches(0, 0)
    batch = next(batches, None) if hasattr(batches, "__next__") else None
    if batch is None:
        raise BadInput(
            f"{label}: batches(0, 0)", expected="an iterator without end", got=repr(batches)
        )
    first, second = (np.full(table.size, fill, np.float32) for fill in (np.nan, 1.0))
    before = weights.copy()
    loss = problem.gradient(weights, batch, first)
    problem.gradient(weights, batch, second)
    if weights.tobytes() != before.tobytes():
        raise BadInput(
            f"{label}: gradient", expected="weights that only the shards change", got="changed ones"
        )
    if not (np.isscalar(loss) and np.isfinite(loss)):
        raise BadInput(f"{label}: gradient", expected="a finite loss", got=repr(loss))
    _check_arena(first, table, f"{label}: gradient at start(0)")
    if first.tobytes() != second.tobytes():
        raise BadInput(
            f"{label}: gradient",
            expected="all of `out` written, the same for the same weights and batch",
            got="what differs between two calls",
        )
    measured = problem.measure(weights)
    if not (isinstance(measured, Measurement) and np.isfinite(measured).all()):
        raise BadInput(
            f"{label}: measure", expected="a Measurement of finite figures", got=repr(measured)
        )


def _check_arena(arena: Any, table: DenseTable, label: str) -> None:
    """Raise BadInput unless these are finite float32 in the table's form, with zeros as padding."""
    if not isinstance(arena, np.ndarray) or arena.dtype != np.float32:
        got = f"{arena.dtype}" if isinstance(arena, np.ndarray) else type(arena).__name__
        raise BadInput(label, expected="an array of float32", got=got)
    if arena.shape != (table.size,):
        raise BadInput(label, expected=f"the shape ({table.size},), table.size", got=arena.shape)
    if not np.isfinite(arena).all():
        raise BadInput(label, expected="finite values", got="values that are not")
    padding = np.ones(table.size, bool)
    for tensor, start in zip(table.tensors, table.offsets, strict=True):
        padding[start : start + tensor.size] = False
    if arena[padding].any():
        raise BadInput(label, expected="zeros between the tensors", got="other values")


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]
