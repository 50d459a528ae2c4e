"""The first values of a sparse table's rows, each a value that a table is described with.

A row's first values follow from its table's seed, its id and the column alone, by integer
arithmetic. So a row that nobody has pushed yet has the same values at every pull, on every shard
and in every copy, although none of them stores it.
"""

from typing import cast

import msgspec
import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from cupy_kernels.ops import rows
from cupy_kernels.ops.rows import Ids
from shards import argument_checks
from shards.named_fields import NamedFields

Floats = NDArray[np.float32]


class FirstValues(msgspec.Struct, frozen=True, tag_field="init", metaclass=NamedFields):
    """The base of all kinds of first values."""

    def make_rows(self, ids: Ids, dim: int, seed: int) -> Floats:
        """The first values of these ids, a new array of shape (n, dim)."""
        raise NotImplementedError


class Zeros(FirstValues, frozen=True, tag="zeros"):
    """Every row begins at zero."""

    def make_rows(self, ids: Ids, dim: int, seed: int) -> Floats:
        return np.zeros((len(ids), dim), np.float32)


class Constant(FirstValues, frozen=True, tag="constant"):
    """Every row begins at `value`."""

    value: float

    def __post_init__(self) -> None:
        value = argument_checks.number("Constant: value", self.value)
        structs.force_setattr(self, "value", value)

    def make_rows(self, ids: Ids, dim: int, seed: int) -> Floats:
        return np.full((len(ids), dim), self.value, np.float32)


class Uniform(FirstValues, frozen=True, tag="uniform"):
    """Values in [-`scale`, `scale`), each as likely as any other."""

    scale: float

    def __post_init__(self) -> None:
        structs.force_setattr(self, "scale", _scale("Uniform: scale", self.scale))

    def make_rows(self, ids: Ids, dim: int, seed: int) -> Floats:
        return rows.draw_uniform(ids, dim, seed) * np.float32(self.scale)


class Normal(FirstValues, frozen=True, tag="normal"):
    """Nearly normal values of mean 0 and standard deviation `deviation`, at most six times it."""

    deviation: float

    def __post_init__(self) -> None:
        structs.force_setattr(self, "deviation", _scale("Normal: deviation", self.deviation))

    def make_rows(self, ids: Ids, dim: int, seed: int) -> Floats:
        return rows.draw_normal(ids, dim, seed) * np.float32(self.deviation)


Init = Zeros | Constant | Uniform | Normal


def init_of(argument: str, value: object) -> Init:
    """First values, given as themselves or as "zeros", which has no settings; raises BadInput."""
    if isinstance(value, FirstValues):
        return cast(Init, value)
    if isinstance(value, str) and value.lower() == "zeros":
        return Zeros()
    expected = 'first values such as Uniform(0.01) or "zeros"'
    raise argument_checks.wrong(argument, expected, value)


def _scale(argument: str, value: object) -> float:
    expected = "a number of at least 0"
    scale = argument_checks.number(argument, value, least=0, expected=expected)
    if scale > argument_checks.LARGEST / 8:  # six deviations have to be finite
        raise argument_checks.wrong(argument, f"at most {argument_checks.LARGEST / 8:g}", value)
    return scale
