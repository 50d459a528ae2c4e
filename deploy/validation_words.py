"""Pydantic's errors in our words: the command line and the service check values with pydantic."""

from collections.abc import Mapping
from typing import Any

from shards.plurals import format_count

EXPECTED = {
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "dict_type": "an object",
    "enum": "{expected}",
    "finite_number": "a finite number",
    "float_parsing": "a number",
    "float_type": "a number",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "int_from_float": "a whole number",
    "int_parsing": "a whole number",
    "int_parsing_size": "a whole number of fewer digits",
    "int_type": "a whole number",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "list_type": "a list",
    "literal_error": "{expected}",
    "model_attributes_type": "an object",
    "model_type": "an object",
    "string_type": "a text",
    "string_unicode": "a text in Unicode",
}
"""Error types for invalid values, with the phrase that follows "expected"."""
_LENGTHS = {
    "string_too_long": ("at most", "max_length", "character"),
    "string_too_short": ("at least", "min_length", "character"),
    "too_long": ("at most", "max_length", "entry"),
    "too_short": ("at least", "min_length", "entry"),
}


def format_expected(error: Mapping[str, Any]) -> str | None:
    """The phrase that follows "expected" for one of `errors()`; None for a type without words."""
    kind, context = error["type"], error.get("ctx") or {}
    if kind in _LENGTHS:
        bound, name, noun = _LENGTHS[kind]
        return f"{bound} {format_count(context[name], noun)}"
    if kind not in EXPECTED:
        return None
    text = EXPECTED[kind].format(**context)
    return text.replace("'", "").removesuffix(".0")
