"""Options declared once: their checks, their defaults in words, and functions that take them."""

import inspect
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import worker
from shards.errors import BadInput
from worker.job.option_fields import Options, Parsed, keyword_options, list_options, option


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class Paint(Options):
    colour: Parsed[Colour, str] = option("Which one.", default=Colour.RED)
    coats: int = option("How many.", default=1, least=1, most=9)
    dries_s: float = option("How long.", default=0.5, least=0)
    glossy: bool = option("Whether it shines.", default=False)


class Wall(Options):
    place: Path = option("Where it is.")
    owner: str | None = option("Who.", default=None, shown="nobody")

    def check(self) -> None:
        super().check()
        if self.owner == "":
            raise BadInput(f"{self.label_option('owner')}: expected a name, got an empty one")


class Painting(Paint, Wall):
    note: str = "not an option"

    @classmethod
    def label_option(cls, name: str) -> str:
        return f"--{name}"


def test_a_class_has_the_options_of_its_bases() -> None:
    """With the types, defaults and help texts that they have there; other fields are none."""
    assert set(list_options(Painting)) == {*list_options(Paint), *list_options(Wall)}
    for base in (Paint, Wall):
        assert list_options(base).items() <= list_options(Painting).items()
    assert [each.name for each in list_options(Painting).values() if each.is_required] == ["place"]
    assert list_options(Painting)["owner"].option.text == "Who."


def test_defaults_in_words() -> None:
    """As a user writes them; the words for None are the option's own."""
    shown = {name: each.default_text for name, each in list_options(Painting).items()}
    assert shown == {
        "place": None,
        "owner": "nobody",
        "colour": "red",
        "coats": "1",
        "dries_s": "0.5",
        "glossy": "no",
    }


def test_values_are_converted() -> None:
    """Names become members, NumPy's numbers Python's, paths absolute; a part is the base's own."""
    painting = Painting(
        colour="blue",
        coats=np.int64(2),  # type: ignore[arg-type]
        dries_s=np.float32(2),  # type: ignore[arg-type]
        place=Path("here"),
    )
    assert painting.part(Paint) == Paint(colour=Colour.BLUE, coats=2, dries_s=2.0)
    assert [type(painting.coats), type(painting.dries_s)] == [int, float]
    assert painting.colour is Colour.BLUE
    assert painting.place == Path.cwd() / "here"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"colour": "green"}, "--colour: expected red or blue, got 'green'"),
        ({"coats": 0}, "--coats: expected at least 1, got 0"),
        ({"coats": 10}, "--coats: expected at most 9, got 10"),
        ({"coats": 1.0}, "--coats: expected a whole number, got 1"),
        ({"coats": True}, "--coats: expected a whole number, got True"),
        ({"dries_s": -0.5}, "--dries_s: expected at least 0, got -0.5"),
        ({"dries_s": "1"}, "--dries_s: expected a number, got '1'"),
        ({"glossy": 1}, "--glossy: expected True or False, got 1"),
        ({"owner": 3}, "--owner: expected a text, got 3"),
        ({"owner": ""}, "--owner: expected a name, got an empty one"),
        ({"place": None}, "--place: expected a path, got None"),
    ],
)
def test_wrong_values(options: dict[str, Any], line: str) -> None:
    """The error names the option as its user writes it, also when a copy is changed."""
    with pytest.raises(BadInput) as made:
        Painting(**{"place": Path("/"), **options})
    with pytest.raises(BadInput) as changed:
        Painting(place=Path("/")).replace(**options)
    assert str(made.value) == str(changed.value) == line


def test_options_are_frozen() -> None:
    """A run's options do not change under it."""
    with pytest.raises(AttributeError):
        Paint().coats = 2


def test_options_are_read_by_msgspec() -> None:
    """From a file of all options a subject reads its own, and checks them."""
    plain = {"colour": "blue", "owner": "me"}
    assert msgspec.convert(plain, Paint) == Paint(colour=Colour.BLUE)
    with pytest.raises(BadInput, match="coats: expected at least 1, got 0"):
        msgspec.convert({"coats": 0}, Paint)


def test_a_function_takes_options_as_keywords() -> None:
    """It is called with one value of all; its signature lists each, the required ones first."""

    @keyword_options(Painting)
    def paint(brush: str, options: Painting) -> tuple[str, Painting]:
        """Paint it."""
        return brush, options

    assert paint("b", place=Path("/"), coats=3) == ("b", Painting(place=Path("/"), coats=3))
    names = list(inspect.signature(paint).parameters)
    assert names[:2] == ["brush", "place"]
    assert set(names[1:]) == {*list_options(Painting), "note"}
    assert paint.__doc__ == "Paint it."
    cases: list[tuple[dict[str, Any], str]] = [
        (
            {"place": Path("/"), "coat": 3},
            "paint: expected coats, or another known name, got 'coat'",
        ),
        ({}, "paint: place: expected this argument, got none"),
    ]
    for options, line in cases:
        with pytest.raises(BadInput) as caught:
            paint("b", **options)
        assert str(caught.value) == line
    with pytest.raises(
        BadInput, match="paint: expected the options as keyword arguments, got 1 mo"
    ):
        paint("b", 5)  # type: ignore[call-arg,arg-type]


def test_keywords_are_checked_by_name() -> None:
    """An unknown argument is named with the most similar one, or all; a missing one as missing."""
    assert Painting.of("paint", {"place": Path("/")}) == Painting(place=Path("/"))
    with pytest.raises(
        BadInput, match=r"^paint: expected coats, or another known name, got 'coat'$"
    ):
        Painting.of("paint", {"place": Path("/"), "coat": 3})
    with pytest.raises(BadInput, match=r"^paint: expected place, owner, .*coats.*, got 'zzz'$"):
        Painting.of("paint", {"place": Path("/"), "zzz": 3})
    with pytest.raises(BadInput, match=r"^paint: place: expected this argument, got none$"):
        Painting.of("paint", {})


def test_editors_see_the_options_of_run_and_stream() -> None:
    """Each is a parameter of the signature, with its default; the required ones have none."""
    for function, required in (
        (worker.run, {"params"}),
        (worker.stream, {"checkpoint", "workers"}),
    ):
        parameters = inspect.signature(function).parameters
        assert [*parameters][1:3] == ["train", "args"]
        assert {"strategy", "staleness", "shards", "max_iter"} <= parameters.keys()
        named = [one for one in parameters.values() if one.kind is one.KEYWORD_ONLY]
        assert required <= {one.name for one in named if one.default is one.empty}
    assert {"callbacks", "progress", "evaluate"} <= inspect.signature(worker.run).parameters.keys()
