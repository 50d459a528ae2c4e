"""The same operations on both backends: NumPy, and the kernels on emulated arrays."""

from collections import defaultdict
from importlib import import_module
from inspect import signature
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from cupy_kernels import backends, compilation
from cupy_kernels.backends import HOST, Backend, EmulatorBackend, as_host, backend_of, copy_to
from cupy_kernels.emulator import Emulator
from cupy_kernels.emulator.array import Emulated
from cupy_kernels.ops import (
    activation,
    batch_norm,
    channels,
    convolution,
    dropout,
    eltwise,
    embedding,
    image_layout,
    inner_product,
    losses,
    lrn,
    mvn,
    pooling,
    recurrent,
    reduction,
    softmax,
)
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


SUBJECTS = (
    activation, batch_norm, channels, convolution, dropout, eltwise, embedding, image_layout,
    inner_product, losses, lrn, mvn, pooling, recurrent, reduction, softmax,
)  # fmt: skip


def test_the_suite_above_leaves_no_operation_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What chooses between two bodies is asked once for every operation that there is."""
    asked: set[object] = set()

    def watched(array: object, host: object, kernels: object) -> object:
        asked.add(host)
        return backends.pick(array, host, kernels)

    for subject in SUBJECTS:
        monkeypatch.setattr(subject, "pick", watched)
    for operation in OPERATIONS:
        operation.run(np.array, defaultdict(Workspace))
    bodies = {body for subject in SUBJECTS for body in public(vars(subject)["cpu"])}
    assert asked == bodies


@pytest.mark.parametrize("subject", SUBJECTS, ids=lambda subject: subject.__name__)
def test_both_bodies_of_an_operation_have_one_signature(subject: ModuleType) -> None:
    """The same parameters by name and kind."""
    for body in public(vars(subject)["cpu"]):
        other = getattr(vars(subject)["gpu"], body.__name__)
        assert [*signature(body).parameters.items()] == [*signature(other).parameters.items()]


def public(module: ModuleType) -> list[FunctionType]:
    """The operations' bodies of a module: its functions that are an operation's name."""
    subject = import_module(module.__name__.rpartition(".")[0])
    found = [value for value in vars(module).values() if isinstance(value, FunctionType)]
    return [body for body in found if body.__name__ in vars(subject)]
