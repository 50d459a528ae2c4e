"""Options that are declared once: a subject is a frozen class, and a field of it is an option.

    class LinkOptions(Options):
        transport: Parsed[Transport, str] = option("What carries the data.", default=Transport.AUTO)

The field says everything about the option: its name, type and default, its help text and the
values that it allows. The command line, the settings file and the arguments of a Python function
are read from these fields, so a new option is one line. A class with several subjects as bases has
the options of all of them; that is why these are dataclasses, as a `msgspec.Struct` has one base.
msgspec reads and writes them like its own structs.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from enum import StrEnum
from functools import partial, wraps
from numbers import Integral, Real
from pathlib import Path
from types import NoneType
from typing import (
    TYPE_CHECKING,
    Any,
    Concatenate,
    Generic,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    cast,
    dataclass_transform,
    get_args,
    get_type_hints,
    overload,
)

import msgspec

from ps import path_checks
from shards import argument_checks
from shards.errors import BadInput

Held = TypeVar("Held")
Given = TypeVar("Given")
First = TypeVar("First")
Made = TypeVar("Made")
Returned = TypeVar("Returned")
Result_co = TypeVar("Result_co", covariant=True)
Params = ParamSpec("Params")


class Parsed(Generic[Held, Given]):
    """A field that holds a `Held`, and may also be given as a `Given`, which is converted.

    A type checker sees a descriptor; at run time the field has the type that it holds.
    """

    if TYPE_CHECKING:

        def __get__(self, instance: object, owner: object = None) -> Held: ...
        def __set__(self, instance: object, value: Held | Given) -> None: ...

    else:

        def __class_getitem__(cls, types: tuple[object, object]) -> object:
            return types[0]


_NUMBERS: dict[type, Any] = {int: Integral, float: Real}  # NumPy's are among them


class Option(msgspec.Struct, frozen=True):
    """The description of an option in its field, besides type and default.

    `shown` is the default in words, where the value None stands for it. A number is at `least` and
    at `most` these. `check` replaces the check by type: it takes the option's name for an error
    and the value, and returns the value to hold. With `text` the command line passes a string,
    which `check` parses.
    """

    text: str
    shown: str | None = None
    least: float | None = None
    most: float | None = None
    check: Callable[[str, Any], object] | None = None
    is_text: bool = False


def option(text: str, *, default: Any = MISSING, **more: Any) -> Any:
    """Declare an option with this help text as a field of a subject.

    `more` are the other fields of `Option`.
    """
    return field(default=default, metadata={"option": Option(text, **more)})


class Declared(msgspec.Struct, frozen=True):
    """An option as its class declares it. `kind` is the type of a value other than None."""

    name: str
    kind: type
    optional: bool
    default: Any
    option: Option

    @property
    def is_required(self) -> bool:
        return self.default is MISSING

    @property
    def default_text(self) -> str | None:
        """The default as help and documentation show it; None for none."""
        if self.option.shown is not None or self.default is None or self.is_required:
            return self.option.shown
        if isinstance(self.default, bool):
            return "yes" if self.default else "no"
        return f"{self.default:g}" if isinstance(self.default, float) else str(self.default)

    def check_value(self, label: str, value: object) -> object:
        """The value to hold; raises BadInput naming `label`."""
        if value is None and self.optional:
            return None
        if self.option.check is not None:
            return self.option.check(label, value)
        if issubclass(self.kind, StrEnum):
            return argument_checks.choice(label, value, self.kind)
        if self.kind is bool:
            return argument_checks.flag(label, value)
        if self.kind is Path:
            return path_checks.path(label, value).absolute()
        if self.kind is str:
            return argument_checks.text(label, value, "a text")
        return self._number(label, value)

    def _number(self, label: str, value: Any) -> float:
        """A number in the option's range. Only the limit that it violates is in the error."""
        if isinstance(value, bool) or not isinstance(value, _NUMBERS[self.kind]):
            expected = "a whole number" if self.kind is int else "a number"
            raise argument_checks.wrong(label, expected, value)
        number = int(value) if self.kind is int else value
        least, most = self.option.least, self.option.most
        if least is not None and not number >= least:
            raise argument_checks.wrong(
                label, f"at least {argument_checks.describe_value(least)}", number
            )
        if most is not None and not number <= most:
            raise argument_checks.wrong(
                label, f"at most {argument_checks.describe_value(most)}", number
            )
        return number if self.kind is int else float(number)


def list_options(subject: type[Any]) -> dict[str, Declared]:
    """The options of a class of options, by name, in the order of its fields."""
    hints = get_type_hints(subject)
    return {
        field.name: Declared(
            field.name, *_kind(hints[field.name]), field.default, field.metadata["option"]
        )
        for field in fields(subject)
        if "option" in field.metadata
    }


def _kind(hint: Any) -> tuple[type, bool]:
    """The type of a value other than None, and whether None is one; of several the last."""
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    return kinds[-1], NoneType in get_args(hint)


@dataclass_transform(kw_only_default=True, field_specifiers=(option,))
class Options:
    """Base of the subjects: each subclass is a frozen dataclass with checked options.

    A subclass may override `check`, for what several options must satisfy together, and then calls
    that of its bases.
    """

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, declaration in list_options(type(self)).items():
            value = declaration.check_value(self.label_option(name), getattr(self, name))
            object.__setattr__(self, name, value)
        self.check()

    @classmethod
    def of(cls, function: str, keywords: Mapping[str, Any]) -> Self:
        """The options from keyword arguments of the function `function`.

        Raises BadInput for one that it does not have, and for a required one that is missing.
        """
        known = {field.name: field.default for field in fields(cls)}  # type: ignore[arg-type]
        argument_checks.check_names(function, keywords, known)
        for name in known.keys() - keywords.keys():
            if known[name] is MISSING:
                raise BadInput(f"{function}: {name}", expected="this argument", got="none")
        return cls(**keywords)

    def check(self) -> None:
        """Raise BadInput for options that contradict each other."""

    @classmethod
    def label_option(cls, name: str) -> str:
        """An option as the user of this class writes it, for errors."""
        return name

    def replace(self, **changes: Any) -> Self:
        """A copy with these options changed, checked like a new one."""
        return replace(self, **changes)  # type: ignore[type-var]  # mypy sees no dataclass here

    def asdict(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def part(self, subject: "type[Subject]") -> "Subject":
        """The options of one of the subjects that this class has as a base."""
        assert isinstance(self, subject)
        return subject(**{name: getattr(self, name) for name in list_options(subject)})


Subject = TypeVar("Subject", bound=Options)


def keyword_options(
    make: Callable[Params, Made],
) -> Callable[[Callable[[First, Made], Returned]], Callable[Concatenate[First, Params], Returned]]:
    """A decorator for a function of something and of options, a class `make` of `Options`.

    The function then takes each of the options as a keyword argument of its own, and raises
    BadInput for an unknown one, a missing one and further positional ones.
    """
    return partial(_with_keywords, make=make)


class TrainsFunction(Protocol[Params, Result_co]):
    """A function of data, a function to train with, its arguments, and options as keywords."""

    @overload
    def __call__(
        self, data: Any, train: Any, /, *_: Params.args, **options: Params.kwargs
    ) -> Result_co: ...
    @overload
    def __call__(
        self, data: Any, train: Any, args: Any, /, *_: Params.args, **options: Params.kwargs
    ) -> Result_co: ...


def training_options(
    make: Callable[Params, Made],
) -> Callable[[Callable[..., Result_co]], TrainsFunction[Params, Result_co]]:
    """As `keyword_options`, for a function of data, a function to train with, and its `args`."""
    return partial(_with_keywords, make=make)


def _with_keywords(function: Callable[..., Any], *, make: Callable[..., Any]) -> Any:
    """The function, with the options of `make` as keywords in place of its last parameter."""
    name = function.__name__
    *before, last = inspect.signature(function).parameters.values()

    @wraps(function)
    def call(*positional: Any, **options: Any) -> Any:
        if len(positional) > len(before):
            raise BadInput(
                name,
                expected="the options as keyword arguments",
                got=f"{len(positional) - len(before)} more positional ones",
            )
        return function(*positional, **{last.name: cast(type[Options], make).of(name, options)})

    options = sorted(
        inspect.signature(make).parameters.values(),
        key=lambda option: option.default is not inspect.Parameter.empty,  # required ones first
    )
    first = [parameter.replace(kind=inspect.Parameter.POSITIONAL_ONLY) for parameter in before]
    call.options = make  # type: ignore[attr-defined]  # for documentation
    call.__signature__ = inspect.Signature([*first, *options])  # type: ignore[attr-defined]
    return call
