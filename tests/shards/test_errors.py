"""Errors are one line of bounded length, whatever they quote."""

import copy

import pytest

from shards.errors import BadInput, Gap, NoServer, Retry, quote


@pytest.mark.parametrize("kind", [BadInput, Retry])
def test_a_long_text_loses_its_middle(kind: type[Exception]) -> None:
    """The beginning says what is wrong, the end what to do; a usual text is not shortened."""
    text = str(kind("x.prototxt: expected a number, got " + "9" * 8_000_000 + ": remove it"))
    assert len(text) < 2_100
    assert text.startswith("x.prototxt: expected a number, got 999")
    assert "characters left out" in text
    assert text.endswith("9: remove it")
    assert str(kind("plain " * 100)) == "plain " * 100


def test_other_arguments_stay() -> None:
    """An error with further attributes keeps them."""
    assert Gap("x" * 5_000, 7).expected == 7


def test_bad_input_keeps_its_parts() -> None:
    """The text is made of the parts, which stay through a context, a copy and a process border."""
    error = BadInput("--workers", expected="at least 1", got=0, hint="leave it out")
    inner = error.within("settings run.toml")
    assert str(error) == "--workers: expected at least 1, got 0; leave it out"
    assert str(inner) == f"settings run.toml: {error}"
    for each in (error, inner, copy.copy(error)):  # a process border copies it in the same way
        assert (each.expected, each.got, each.hint) == ("at least 1", "0", "leave it out")
    assert str(copy.copy(inner)) == str(inner)
    plain = BadInput("no snapshot in runs/first")
    assert (plain.what, plain.expected, plain.got, plain.hint) == (str(plain), None, None, None)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("plain", "plain"),
        ("two\nlines\x1b[2J\x00", "two?lines?[2J?"),
        ("x" * 200, "x" * 80 + "... (200 characters)"),
        (17, "17"),
        (["a", 1], "['a', 1]"),
    ],
)
def test_foreign_text_is_quoted_in_one_short_line(value: object, expected: str) -> None:
    """Control characters are replaced, and only the beginning of a long text is quoted."""
    assert quote(value) == expected


def test_an_error_about_a_part_may_pass_as_well() -> None:
    """A server that does not answer may do so later, whatever option named it."""
    error = NoServer("the master", expected="an answer", got="none").within("--spark")
    assert str(error) == "--spark: the master: expected an answer, got none"
    assert error.retryable
    assert not BadInput("x").within("--spark").retryable
