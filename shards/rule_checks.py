"""Checks of an update rule's hyperparameters, which also make a plain float of each.

An error names the rule by its tag and the field, and says which values the field may have.
"""

import msgspec
import numpy as np
from msgspec import structs

from shards import argument_checks


def check_share(rule: msgspec.Struct, field: str) -> None:
    """Raise BadInput for a value outside [0, 1)."""
    value = _number(rule, field, "[0, 1)")
    if not 0 <= value < 1:
        raise argument_checks.wrong(field_of(rule, field), "[0, 1)", value)


def check_range(rule: msgspec.Struct, field: str, most: float = argument_checks.LARGEST) -> None:
    """Raise BadInput for a value below 0 or above `most`."""
    value = argument_checks.number_from_0(field_of(rule, field), getattr(rule, field), most)
    structs.force_setattr(rule, field, value)


def check_positive(rule: msgspec.Struct, field: str = "delta") -> None:
    """Raise BadInput for a value that is not above 0 in float32."""
    # With delta 0, a weight that has only had zero gradients would become 0/0.
    expected = "more than 0 in float32"
    value = _number(rule, field, expected)
    if not np.float32(value) > 0:
        raise argument_checks.wrong(field_of(rule, field), expected, value)


def field_of(rule: msgspec.Struct, field: str) -> str:
    """A field of a rule as errors name it."""
    return f"update rule {rule.__struct_config__.tag}: {field}"


def _number(rule: msgspec.Struct, field: str, expected: str) -> float:
    """The value of a field, which is converted to a plain float in place."""
    plain = argument_checks.number(field_of(rule, field), getattr(rule, field), expected=expected)
    structs.force_setattr(rule, field, plain)
    return plain
