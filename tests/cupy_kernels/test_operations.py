"""The same operations on both backends: NumPy, and the kernels on emulated arrays."""

from collections import defaultdict
from importlib import import_module
from inspect import getclosurevars, signature
from pkgutil import iter_modules
from types import ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from cupy_kernels import compilation, ops
from cupy_kernels.backends import HOST, Backend, EmulatorBackend, as_host, backend_of, copy_to
from cupy_kernels.emulator import Emulator
from cupy_kernels.emulator.array import Emulated
from cupy_kernels.ops.convolution import gpu
from cupy_kernels.types import AnyArray
from cupy_kernels.workspace import Workspace
from tests.cupy_kernels.operations import Operation, every_operation

OPERATIONS = every_operation()
KERNELS = EmulatorBackend(Emulator())

pytestmark = pytest.mark.usefixtures("emulated")


@pytest.mark.parametrize(
    ("place", "compiled"),
    [(HOST, compilation.COMPILED), (HOST, False), (KERNELS, False)],
    ids=["host", "NumPy", "kernels"],
)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_an_operation_equals_its_float64_reference(
    operation: Operation, place: Backend, compiled: bool
) -> None:
    """On the device of its arrays, compiled or in NumPy, and its results are there, too."""
    with patch.object(compilation, "COMPILED", compiled):
        found = operation.run(lambda array: copy_to(array, place), defaultdict(Workspace))
    assert found.keys() == operation.expected.keys()
    for name, values in found.items():
        assert backend_of(values) == place
        np.testing.assert_allclose(
            as_host(values),
            operation.expected[name],
            rtol=operation.relative,
            atol=operation.absolute,
            err_msg=f"{operation.name}: {name}",
        )


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_a_second_call_allocates_nothing(operation: Operation) -> None:
    """In kernels, with the same workspaces and sizes: all memory is the caller's or used again."""
    brought = 0

    def there(array: AnyArray) -> Any:
        nonlocal brought
        brought += 1
        return copy_to(array, KERNELS)

    works: defaultdict[str, Workspace] = defaultdict(Workspace)
    operation.run(there, works)
    before, brought = Emulated.allocations, 0
    operation.run(there, works)
    assert Emulated.allocations - before == brought


def test_weights_are_packed_for_large_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that read quadruples of channels give what those give that read them one by one."""
    monkeypatch.setattr(gpu, "PACKED_PIXELS", 1)
    packed = [one for one in OPERATIONS if one.name.startswith("convolution")]
    for operation in packed:
        test_an_operation_equals_its_float64_reference(operation, KERNELS, compiled=False)


SUBJECTS = [
    import_module(f"{ops.__name__}.{folder.name}")
    for folder in iter_modules(ops.__path__)
    # Codecs and updates prepare their arguments first; rows are in the host's memory alone.
    if folder.name not in {"codecs", "updates", "rows"}
]


def operations_of(subject: ModuleType) -> dict[str, Any]:
    """The functions of a subject that select one of two implementations, by name."""
    return {name: value for name, value in vars(subject).items() if hasattr(value, "__wrapped__")}


def test_the_suite_above_leaves_no_operation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that there is has been called."""
    called: set[str] = set()

    def record(label: str, operation: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            called.add(label)
            return operation(*arguments, **options)

        return call

    labels = set()
    for subject in SUBJECTS:
        for name, value in operations_of(subject).items():
            label = f"{subject.__name__}.{name}"
            labels.add(label)
            monkeypatch.setattr(subject, name, record(label, value))
    for operation in OPERATIONS:
        operation.run(np.array, defaultdict(Workspace))
    assert len(labels) > 40
    assert called == labels


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_both_bodies_of_an_operation_have_one_signature(subject: ModuleType) -> None:
    """They have the operation's name, and the same parameters, defaults, types and result."""
    assert operations_of(subject)
    for name, operation in operations_of(subject).items():
        bodies = {side: getattr(vars(subject)[side], name) for side in ("cpu", "gpu")}
        assert getclosurevars(operation).nonlocals == bodies
        assert signature(bodies["cpu"]) == signature(bodies["gpu"]), name
        assert operation.__doc__, name
