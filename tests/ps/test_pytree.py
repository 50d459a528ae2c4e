"""Structures: a user's nested arrays to a table's tensors and back."""

from collections import namedtuple
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ps.pytree import Structure
from shards.errors import BadInput
from shards.tables import DenseTable

Layer = namedtuple("Layer", "weight bias")  # as libraries define their pytrees

LEAVES = st.builds(
    lambda shape, dtype: np.arange(np.prod(shape), dtype=dtype).reshape(shape) + 1,
    st.lists(st.integers(1, 3), max_size=3).map(tuple),
    st.sampled_from([np.float16, np.float32, np.float64]),
)
NAMES = st.text("abc", min_size=1, max_size=3)
VALUES = st.recursive(
    LEAVES,
    lambda inner: (
        st.dictionaries(NAMES, inner, min_size=1, max_size=3)
        | st.lists(inner, min_size=1, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(Layer, inner, inner)
    ),
    max_leaves=8,
)


def tensors(structure: Structure) -> dict[str, NDArray[np.float32]]:
    table = DenseTable("t", structure.tensors)
    return table.views(table.empty())


def same(a: Any, b: Any) -> bool:
    """Whether two values have the same containers, dtypes, shapes and numbers."""
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return bool(a.dtype == b.dtype and a.shape == b.shape and (a == b).all())


@given(VALUES)
def test_what_is_written_is_built_again(value: Any) -> None:
    """Containers, order, shapes, dtypes and values survive the way through a table."""
    structure = Structure("params", value)
    held = tensors(structure)
    structure.write(value, held)
    assert same(structure.build(held), value)


def test_float32_is_not_copied() -> None:
    """Float32 arrays are views of the table; those of another dtype are copies."""
    structure = Structure("params", {"a": np.ones(3, np.float32), "b": np.ones(3)})
    held = tensors(structure)
    built = structure.build(held)
    assert np.shares_memory(built["a"], held["a"])
    assert not np.shares_memory(built["b"], held["b"])
    views = structure.views(held)
    views["b"][:] = 2
    assert held["b"].tolist() == [2, 2, 2]


def test_names() -> None:
    """An array is named by its path; a value that is one array has a name, too."""
    value = {"conv": Layer(np.zeros(2), np.zeros(1)), "heads": [np.zeros(()), 1.5]}
    names = [leaf.name for leaf in Structure("params", value).leaves]
    assert names == ["conv.0", "conv.1", "heads.0", "heads.1"]
    assert [leaf.name for leaf in Structure("params", np.zeros(3)).leaves] == ["value"]


def test_none_is_a_zero_gradient() -> None:
    """None in place of an array writes zeros, as PyTorch's `grad` of an unused parameter."""
    structure = Structure("params", {"a": np.ones(2), "b": np.ones(2)})
    held = tensors(structure)
    held["a"][:] = 7
    structure.write({"a": None, "b": np.array([1.0, 2.0])}, held)
    assert held["a"].tolist() == [0, 0]
    assert held["b"].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": np.ones(2)}, "the value: expected the keys a, b, got the keys a"),
        ({"a": np.ones(3), "b": [np.ones(1)]}, r"a: expected shape (2,), got (3,)"),
        ({"a": np.ones(2), "b": np.ones(1)}, "b: expected a list of 1, got an array of float64"),
        ({"a": np.ones(2), "b": []}, "b: expected a list of 1, got a list of 0"),
        ({"a": np.ones(2, int), "b": [np.ones(1)]}, "a: expected an array of floats, got int64"),
        ({"a": "text", "b": [np.ones(1)]}, "a: expected an array of floats, got <U4"),
        (None, "the value: expected the keys a, b, got None"),
    ],
)
def test_another_structure_is_refused(value: object, message: str) -> None:
    """The error names the array, what was expected and what was found."""
    structure = Structure("params", {"a": np.ones(2), "b": [np.ones(1)]})
    with pytest.raises(BadInput) as caught:
        structure.write(value, tensors(structure))
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("empty", [{}, [], {"a": {}}, None])
def test_no_array_is_refused(empty: object) -> None:
    """A value without arrays describes no table."""
    with pytest.raises(BadInput, match=r"^params: (a: )?expected (at least one|an) array"):
        Structure("params", empty)


def test_tensors_of_pytorch() -> None:
    """A state_dict of PyTorch comes back as one, in its own dtypes, and requires no gradients."""
    torch = pytest.importorskip("torch")
    state = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).state_dict()
    state["1.bias"] = state["1.bias"].to(torch.bfloat16)
    structure = Structure("params", state)
    held = tensors(structure)
    structure.write(state, held)
    built = structure.build(held)
    assert list(built) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for name, tensor in built.items():
        assert torch.equal(tensor, state[name])
        assert tensor.dtype == state[name].dtype
        assert not tensor.requires_grad
