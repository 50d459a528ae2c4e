"""Checks of the arguments of public functions.

Each function takes the argument's name, as its caller writes it, and the value. It returns the
value as the rest of the code needs it: Python's own int and float instead of NumPy's, an enum's
member instead of its name. Raises BadInput with one line: the argument, what was expected, what was
found.
"""

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from difflib import get_close_matches
from enum import StrEnum
from math import inf, isnan
from numbers import Real
from operator import index
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from shards.errors import BadInput

Choice = TypeVar("Choice", bound=StrEnum)
Value = TypeVar("Value")

MAX_INT = 2**62
"""The largest whole number accepted; messages cannot carry a larger one."""
MAX_SECONDS = 1e6
"""The longest time accepted, eleven days: operating systems refuse to wait for longer."""
LARGEST = float(np.finfo(np.float32).max)

_SHOWN = 60  # characters of a value that an error quotes
_PASSWORD, _OPTIONS = re.compile(r"(://)\S*:\S*@"), re.compile(r"(://[^\s?]*\?)\S+")
_LONGEST_URL = 4096
_NAMES_SHOWN = 8  # names of a long list that an error quotes
_NAME_BYTES = 128  # the length of a name in an update record


def wrong(argument: str, expected: str, value: object) -> BadInput:
    """The error for an argument that should have been something else."""
    return BadInput(argument, expected=expected, got=describe_value(value))


def describe_value(value: object) -> str:
    """A value in one short line: a plain value as Python writes it, any other by its type."""
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype} of shape {value.shape}"
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        text = _plain(value)
    elif hasattr(value, "__fspath__") and not isinstance(value, type):
        text = _plain(str(value))
    elif isinstance(value, Sequence | Mapping):
        text = f"a {type(value).__name__} of {len(value)}"
    elif isinstance(value, type):
        text = f"the class {value.__name__}"
    else:
        text = f"a {type(value).__module__.partition('.')[0]}.{type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _plain(value: object) -> str:
    if isinstance(value, int) and abs(value) > 10**_SHOWN:
        return f"a whole number of {value.bit_length()} bits"  # Python refuses to print long ones
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str | bytes):
        # Cut before `repr`, which would copy a text of any length.
        text = hide_passwords(value) if isinstance(value, str) else value
        return repr(text[: _SHOWN + 1])
    return str(value).replace("\n", " ")


def hide_passwords(text: str) -> str:
    """A text for messages, cut after 4,096 characters: URLs lose passwords and options."""
    return _OPTIONS.sub(r"\1...", _PASSWORD.sub(r"\1...@", text[:_LONGEST_URL]))


def whole(argument: str, value: object, least: int | None = None, most: int | None = None) -> int:
    """A whole number, Python's or NumPy's, from `least` to `most`; by default up to ±MAX_INT."""
    try:
        # `index` would accept a boolean: `steps=True` would silently be one step.
        if isinstance(value, bool | np.bool_):
            raise TypeError
        plain = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise wrong(argument, "a whole number", value) from None
    if least is not None and most is not None and not least <= plain <= most:
        raise wrong(argument, f"{least} to {most}", plain)
    if plain < (-MAX_INT if least is None else least):
        raise wrong(argument, f"at least {-MAX_INT if least is None else least}", plain)
    if plain > (MAX_INT if most is None else most):
        raise wrong(argument, f"at most {MAX_INT if most is None else most}", plain)
    return plain


def number(
    argument: str,
    value: object,
    *,
    least: float = -LARGEST,
    expected: str = "a finite number",
) -> float:
    """A number of at least `least` in the range of float32; `expected` is for the error."""
    plain = _real(argument, value, expected)
    if not least <= plain <= LARGEST:
        raise wrong(argument, expected, plain)
    return plain


def number_from_0(argument: str, value: object, most: float = LARGEST) -> float:
    """A number of at least 0 and at most `most`."""
    expected = "0 or more" if most == LARGEST else f"[0, {most:g}]"
    plain = number(argument, value, least=0, expected=expected)
    if plain > most:
        raise wrong(argument, expected, plain)
    return plain


def number_to_1(argument: str, value: object) -> float:
    """A number of at least 0 and at most 1."""
    return number_from_0(argument, value, 1.0)


def loss(argument: str, value: object) -> float:
    """A loss: any number, NaN and infinity included, because it is a measurement."""
    return _real(argument, value, "a number")


def loss_of(argument: str, value: object) -> float:
    """A step's loss: any number, or an array or a tensor of one, in whatever library."""
    try:
        if isinstance(value, str | bytes | bytearray):  # `float` would read them
            raise TypeError
        # PyTorch warns where a tensor that has a gradient becomes a number.
        return float(value.detach() if hasattr(value, "detach") else value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise wrong(argument, "a number", value) from None


def seconds(argument: str, value: object, *, zero: bool = False, endless: bool = False) -> float:
    """A time in seconds: above 0 (or 0 if `zero`), up to MAX_SECONDS (or inf if `endless`)."""
    least = "0 s or more" if zero else "more than 0 s"
    expected = least if endless else f"{least}, and finite"
    plain = _real(argument, value, expected)
    if plain < 0 or isnan(plain) or (plain == 0 and not zero) or (plain == inf and not endless):
        raise wrong(argument, expected, plain)
    if MAX_SECONDS < plain < inf:
        raise wrong(argument, f"at most {MAX_SECONDS:.0f} s", plain)
    return plain


def _real(argument: str, value: object, expected: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real | np.floating | np.integer):
        raise wrong(argument, expected, value)
    try:
        return float(value)
    except OverflowError:
        raise wrong(argument, expected, value) from None


def staleness_bound(argument: str, value: object) -> int | None:
    """A staleness bound in steps; None, inf and "inf" mean no bound."""
    if value is None or (isinstance(value, str | float) and value in ("inf", inf)):
        return None
    try:
        return whole(argument, value, 0)
    except BadInput as error:
        if isinstance(value, int | np.integer):
            raise
        raise wrong(argument, "a whole number of steps, or None for no bound", value) from error


def choice(argument: str, value: object, kind: type[Choice]) -> Choice:
    """A member of the enum `kind`, given as itself or by its value."""
    try:
        return kind(value)  # type: ignore[arg-type]  # any object may be looked up
    except ValueError:
        raise wrong(argument, " or ".join(kind), value) from None


def check_names(argument: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise BadInput for one of `names` that is not among the `known` ones.

    The error names the most similar known one; where none is similar the first few, or all of a
    short list, so that it stays one readable line.
    """
    known = tuple(known)
    for name in names:
        if name not in known:
            similar = get_close_matches(name, known, 1)
            expected = f"{similar[0]}, or another known name" if similar else _list_names(known)
            raise BadInput(argument, expected=expected, got=f"{name!r}")


def _list_names(names: Sequence[str]) -> str:
    rest = len(names) - _NAMES_SHOWN
    if rest < 2:
        return ", ".join(names)
    return f"{', '.join(names[:_NAMES_SHOWN])} or one of {rest} more, which help() lists"


def items(argument: str, value: object, expected: str) -> tuple[Any, ...]:
    """The items of an iterable other than a string, mapping or set."""
    return tuple(iterable(argument, value, expected))


def iterable(argument: str, value: object, expected: str) -> Iterable[Any]:
    """An iterable other than a string, mapping or set."""
    if isinstance(value, str | bytes | Mapping | Set) or not isinstance(value, Iterable):
        raise wrong(argument, expected, value)
    return value


def flag(argument: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool | np.bool_):
        raise wrong(argument, "True or False", value)
    return bool(value)


def name(argument: str, value: object, max_bytes: int = _NAME_BYTES) -> str:
    """A name: printable text, short enough for messages and update records."""
    if not isinstance(value, str) or not value or not value.isprintable():
        raise wrong(argument, "a name of printable characters", value)
    if len(value.encode(errors="replace")) > max_bytes:
        raise wrong(argument, f"a name of at most {max_bytes} bytes", value)
    return value


def text(argument: str, value: object, expected: str) -> str:
    """A string, which the caller parses further."""
    if not isinstance(value, str):
        raise wrong(argument, expected, value)
    return value


def instance(argument: str, value: object, kind: type[Value], expected: str) -> Value:
    """A value of type `kind`."""
    if not isinstance(value, kind):
        raise wrong(argument, expected, value)
    return value


def function(argument: str, value: Value, expected: str) -> Value:
    """A callable."""
    if not callable(value):
        raise wrong(argument, expected, value)
    return value


def array(argument: str, value: object, size: int) -> NDArray[np.float32]:
    """A float32 array of shape (size,): an array unchanged, a list or a tensor converted."""
    expected = f"float32 of shape ({size},)"
    if not isinstance(value, np.ndarray):
        value = _convert(argument, value, expected)
    if value.dtype != np.float32 or value.shape != (size,):
        raise BadInput(argument, expected=expected, got=f"{value.dtype} of shape {value.shape}")
    return value


def _convert(argument: str, value: object, expected: str) -> NDArray[Any]:
    numbers = isinstance(value, list | tuple)
    if not numbers and not hasattr(value, "__array__"):
        raise wrong(argument, expected, value)
    try:
        with np.errstate(over="ignore"):
            return np.asarray(value, np.float32 if numbers else None)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        raise wrong(argument, expected, value) from None
