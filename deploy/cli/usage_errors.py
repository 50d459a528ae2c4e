"""Formats errors of the command line: the option, what was expected, and what was found.

Typer reports a wrong value, a missing option or an unknown command in its own style, over several
lines; and a Python function names its argument in an error, where the user gave an option.
"""

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import typer

from deploy.validation_words import format_expected
from shards.errors import BadInput

# The errors that Typer raises. By version they are from Click or from Typer's own copy of it, so
# they are found by the base classes of one that Typer exports.
USAGE_ERRORS: tuple[type[Exception], ...] = tuple(
    kind for kind in typer.BadParameter.__mro__ if issubclass(kind, Exception)
)[:-1]
_OPTIONS = {
    "compressed pull": "--compress-pull",
    "compression": "--compress",
    "topk": "--compress topk",
    "threshold": "--compress threshold",
    "staleness bound": "--staleness",
    "strategy": "--strategy",
    "prefetch": "--prefetch",
    "shard device": "--shard-device",
    "device": "--device",
    "link": "--link",
    "n_push": "--n-push",
    "n_fetch": "--n-fetch",
    "warm_steps": "--warm-steps",
    "Ray address": "--ray",
    "Spark URL": "--spark",
    "durability": "--durability",
}
"""The names that open the errors of Python functions, with the option that each stands for."""
_OPENING = re.compile(rf"({'|'.join(_OPTIONS)})(?=[: ])")
_ANYWHERE = re.compile(r"(?<![-\w])(n_push|n_fetch|staleness bound)\b")
_IN_STRATEGY = re.compile(r"(?:--)?strategy \w+: (unknown option|\w+: )")
"""How an error of a strategy's own options opens: downpour:n_push=2 has no dashes."""


def in_options(text: str) -> str:
    """Replace names of Python arguments in an error's text by the command-line options."""
    is_strategy = _IN_STRATEGY.match(text) is not None
    if opening := _OPENING.match(text):
        text = _OPTIONS[opening[1]] + text[opening.end() :]
    return text if is_strategy else _ANYWHERE.sub(lambda match: _OPTIONS[match[1]], text)


def check_given(arguments: Sequence[str]) -> None:
    """Raise BadInput for an empty argument, which as a path would mean the working directory."""
    for before, word in pairwise(("downpour", *arguments)):
        name, equals, value = word.partition("=")
        if not word or (name.startswith("--") and equals and not value):
            raise BadInput(name or before, expected="a value", got="an empty one")


def format_usage_error(error: Any) -> str:
    """Format an error of Typer in one line."""
    path = error.ctx.command_path if getattr(error, "ctx", None) is not None else "downpour"
    command = path.removeprefix("downpour").strip()
    where = f"{command}: " if command else ""
    message = " ".join(str(error.message).split())
    match type(error).__name__:
        case "MissingParameter":
            return f"{where}expected {_name(error.param)}, got none"
        case "NoSuchOption":
            near = "".join(f", perhaps {name}" for name in error.possibilities or ())
            return (
                f"{where}expected an option that `{path} --help` lists{near};"
                f" got {error.option_name}"
            )
        case "BadOptionUsage":
            without = "requires an argument" in message
            return f"{error.option_name}: expected {'a value, got none' if without else 'no value'}"
        case "BadParameter" if error.param is not None:
            return f"{_name(error.param)}: {_format_expected(error, message)}"
    if unknown := re.match(r"No such command '(.*?)'\.(?: Did you mean (.*)\?)?", message):
        near = f", perhaps {unknown[2].replace(chr(39), '')}" if unknown[2] else ""
        return f"{where}expected a command that `{path} --help` lists{near}; got {unknown[1]!r}"
    if extra := re.match(r"Got unexpected extra argument\S* \((.*)\)", message):
        return f"{where}expected no further argument, got {extra[1]!r}"
    return f"{where}{message}"


def _name(param: Any) -> str:
    """The name of an option with its dashes, or of an argument in capitals as in the help."""
    is_option = param.param_type_name == "option"
    return str(max(param.opts, key=len) if is_option else param.name.upper())


def _format_expected(error: Any, message: str) -> str:
    """The phrase "expected X, got Y" for an invalid value."""
    if choice := re.match(r"(?:Value error, )?(.+) is not one of (.+?)\.?$", message):
        return f"expected one of {choice[2].replace(chr(39), '')}, got {choice[1]}"
    try:
        first = error.__cause__.errors()[0]
        phrase = format_expected(first)
    except (AttributeError, LookupError):  # an older Typer, which checks values with Click
        return message
    return message if phrase is None else f"expected {phrase}, got {first['input']!r}"
