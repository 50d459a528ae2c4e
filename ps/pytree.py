"""The structure of a pytree of the user's parameters: nested dicts, lists and tuples of arrays.

A table is a flat array of float32. Users keep parameters in other shapes: a dict of arrays, a
nested dict or tuple (a JAX pytree), a PyTorch `state_dict`. A `Structure` is learned once from such
a value. From then on it writes values of the same structure into the table's tensors, and builds
such a value from them. Dtypes are converted here, at the edge; shapes stay the user's own.

PyTorch is never imported: a tensor that the user passes is a prototype that makes others like it.

A `Form` is a structure as a value that travels: containers, and the dtype of each array. It lacks
what only the user's process knows: a named tuple becomes a tuple, a tensor an array of NumPy.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import argument_checks
from shards.errors import BadInput
from shards.tables import TensorSpec

Floats = NDArray[np.float32]

_FLOAT32 = np.dtype(np.float32)
_SEPARATOR = "."


class ArrayForm(msgspec.Struct, frozen=True, tag="array"):
    """An array with this dtype; its shape is that of its tensor."""

    dtype: Annotated[str, msgspec.Meta(pattern="^[<>]f(2|4|8|16)$")]


class DictForm(msgspec.Struct, frozen=True, tag="dict"):
    """A dict with these keys, in this order."""

    keys: list[str | int]
    items: "list[Form]"


class SequenceForm(msgspec.Struct, frozen=True, tag="sequence"):
    """A tuple or list."""

    items: "list[Form]"
    is_tuple: bool


Form = ArrayForm | DictForm | SequenceForm


def zeros(form: Form, tensors: Iterator[TensorSpec]) -> Any:
    """A value of this form: arrays of zeros with the shapes of the next `tensors`.

    The arrays are read-only and of a single element that is repeated, so they take no memory.
    """
    match form:
        case ArrayForm(dtype):
            return np.broadcast_to(np.zeros((), np.dtype(dtype)), next(tensors).shape)
        case DictForm(keys, items):
            return {key: zeros(item, tensors) for key, item in zip(keys, items, strict=True)}
        case SequenceForm(items, is_tuple):
            values = [zeros(item, tensors) for item in items]
            return tuple(values) if is_tuple else values


class Leaf(msgspec.Struct, frozen=True):
    """One array of a structure: its tensor's name, its shape, and what it is converted back to.

    `prototype` is an empty PyTorch tensor on the CPU, None for arrays of NumPy and of libraries
    that accept those.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    prototype: Any = None

    @property
    def is_table_array(self) -> bool:
        """True for float32 of NumPy, which is what a table has."""
        return self.prototype is None and self.dtype == _FLOAT32

    def to_user(self, values: Floats) -> Any:
        """The values in the user's own dtype and library; a view where that is float32 of NumPy."""
        if self.prototype is not None:
            return self.prototype.new_tensor(values)
        return values.astype(self.dtype, copy=False)


class Structure:
    """The structure of a value: its containers, and its arrays in the order of iteration."""

    def __init__(self, label: str, value: object) -> None:
        """Learn the structure of `value`; raises BadInput naming `label` and the array."""
        self._label = label
        self._leaves: list[Leaf] = []
        try:
            self._shape_of = self._learn(value, ())
        except RecursionError:
            expected = "nested dicts, lists and tuples, none of which holds itself"
            raise argument_checks.wrong(label, expected, value) from None
        if not self._leaves:
            raise argument_checks.wrong(label, "at least one array", value)
        self._names = [leaf.name for leaf in self._leaves]
        self._converts = not all(leaf.is_table_array for leaf in self._leaves)

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The arrays, in the order of iteration."""
        return self._leaves

    @property
    def tensors(self) -> tuple[TensorSpec, ...]:
        """A tensor for each array, named by its path: `layer1.weight`."""
        return tuple(TensorSpec(leaf.name, leaf.shape) for leaf in self._leaves)

    @property
    def form(self) -> Form:
        """The structure as a value that travels."""
        return _form(self._shape_of, iter(self._leaves))

    def write(self, value: object, into: Mapping[str, Floats]) -> None:
        """Write a value of this structure into the tensors `into`, by name.

        None in place of an array, as PyTorch's `grad` of a parameter that was not used, writes
        zeros. An array that already is the tensor's own memory is not copied. Raises BadInput for
        another structure, shape, or a dtype that is no float; `into` may then be half written.
        """
        # A lone array needs no generator, which is a call for each array and one more.
        arrays = (value,) if self._shape_of is None else _arrays(value, self._shape_of, ())
        for leaf, array in zip(self._leaves, arrays, strict=True):
            target = into[leaf.name]
            if array is None:
                target.fill(0)
                continue
            # The usual array without a call; one with a mask is of another type.
            usual = type(array) is np.ndarray and array.dtype is _FLOAT32
            plain = array if usual else plain_array(leaf.name, array)
            if plain.shape != leaf.shape:
                raise BadInput(leaf.name, expected=f"shape {leaf.shape}", got=plain.shape)
            if plain is target:
                continue
            if usual:
                target[...] = plain
            else:
                with np.errstate(over="ignore"):  # infinity is found, and named, later
                    np.copyto(target, plain, casting="same_kind")

    def build(self, tensors: Mapping[str, Floats]) -> Any:
        """A value of this structure with the arrays `tensors`, by name; float32 is not copied."""
        if not self._converts:
            return self.views(tensors)
        restored = [leaf.to_user(tensors[leaf.name]) for leaf in self._leaves]
        return _fill(self._shape_of, iter(restored))

    def views(self, tensors: Mapping[str, Floats]) -> Any:
        """A value of this structure with the float32 `tensors` themselves as its arrays."""
        return _fill(self._shape_of, map(tensors.__getitem__, self._names))

    def _learn(self, value: object, path: tuple[str, ...]) -> Any:
        """The value's containers with None in place of each array; the arrays become leaves."""
        match value:
            case Mapping():
                return {key: self._learn(item, (*path, str(key))) for key, item in value.items()}
            case list() | tuple():
                items = [self._learn(item, (*path, str(at))) for at, item in enumerate(value)]
                return _like(value, items)
            case None:
                raise argument_checks.wrong(self._path_name(path), "an array", value)
        name = _SEPARATOR.join(path) or "value"
        plain = plain_array(self._path_name(path), value)
        prototype = None
        if hasattr(value, "new_empty"):
            prototype = value.new_empty(0, device="cpu").detach()
        self._leaves.append(Leaf(name, plain.shape, plain.dtype, prototype))
        return None

    def _path_name(self, path: tuple[str, ...]) -> str:
        return f"{self._label}: {_SEPARATOR.join(path)}" if path else self._label


def _form(like: Any, leaves: Iterator[Leaf]) -> Form:
    match like:
        case None:
            return ArrayForm(next(leaves).dtype.str)
        case dict():
            keys = [key if type(key) in (str, int) else str(key) for key in like]
            return DictForm(keys, [_form(item, leaves) for item in like.values()])
        case _:
            return SequenceForm([_form(item, leaves) for item in like], isinstance(like, tuple))


def _arrays(value: Any, like: Any, path: tuple[str, ...]) -> Iterator[Any]:
    """The arrays of `value`, which must have the containers of `like`."""
    match like:
        case None:
            yield value
        case dict():
            is_mapping = type(value) is dict or isinstance(value, Mapping)
            if not is_mapping or value.keys() != like.keys():
                raise BadInput(_path_name(path), expected=_keys(like), got=_keys(value))
            for key, prototype in like.items():
                if prototype is None:  # tested here, too, because a generator costs a call
                    yield value[key]
                else:
                    yield from _arrays(value[key], prototype, (*path, str(key)))
        case _:
            if not isinstance(value, list | tuple) or len(value) != len(like):
                got = argument_checks.describe_value(value)
                raise BadInput(
                    _path_name(path), expected=argument_checks.describe_value(like), got=got
                )
            for at, (item, prototype) in enumerate(zip(value, like, strict=True)):
                yield from _arrays(item, prototype, (*path, str(at)))


def _path_name(path: tuple[str, ...]) -> str:
    return _SEPARATOR.join(path) or "the value"


def plain_array(label: str, value: Any) -> NDArray[Any]:
    """An array or tensor as a NumPy array of floats, without a copy where possible.

    Raises BadInput with this label for anything else, and for an array with a mask.
    """
    if isinstance(value, np.ma.MaskedArray):
        if np.ma.is_masked(value):
            hint = "(give it other values there, as value.filled(0) does)"
            raise BadInput(label, expected="an array without a mask", got=f"a masked one {hint}")
        plain = value.data
    elif isinstance(value, np.ndarray):
        plain = value
    elif hasattr(value, "detach"):
        tensor = value.detach().cpu()
        if str(tensor.layout) != "torch.strided":
            hint = "(make the layer with sparse=False, or push gradient.to_dense())"
            raise BadInput(label, expected="a dense tensor", got=f"a sparse one {hint}")
        plain = (tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy()
    else:
        numbers = type(value) in (int, float, list, tuple)
        try:
            plain = np.asarray(value, np.float32 if numbers else None)
        except (TypeError, ValueError, RuntimeError):
            raise argument_checks.wrong(label, "an array of floats", value) from None
    if plain.dtype.kind == "f":
        return plain
    # ml_dtypes' bfloat16, which JAX uses, is no kind of float to NumPy, but converts to one.
    if plain.dtype.name == "bfloat16":
        return plain.astype(np.float32)
    hint = " (parameters and gradients are floats; leave counters and masks out)"
    raise BadInput(label, expected="an array of floats", got=f"{plain.dtype}{hint}")


def _like(container: Any, items: list[Any]) -> Any:
    """A list, tuple or named tuple as `container` with other items."""
    if hasattr(container, "_fields"):
        return type(container)(*items)
    return type(container)(items)


def _fill(like: Any, arrays: Iterator[Any]) -> Any:
    """The containers of `like`, with the next of `arrays` in place of each None."""
    match like:
        case None:
            return next(arrays)
        case dict():
            filled = {}
            for key, item in like.items():
                filled[key] = next(arrays) if item is None else _fill(item, arrays)
            return filled
        case _:
            return _like(like, [_fill(item, arrays) for item in like])


def _keys(value: object) -> str:
    if not isinstance(value, Mapping):
        return argument_checks.describe_value(value)
    names = [str(key) for key in value]
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return f"the keys {', '.join(names[:6])}{more}"
