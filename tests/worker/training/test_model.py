"""The interface of a user's model, and the one-line errors for what it lacks."""

from functools import partial
from typing import Any

import numpy as np
import pytest

from shards.errors import BadInput
from tests.support.ones_job import TABLE, Ones
from worker.training.model import build_model, check_loss, check_start


class NoTable:
    def initial(self, seed: int) -> Any: ...
    def gradient(self, *_: Any, step: int, seed: int) -> Any: ...


class OddTable(NoTable):
    table = "weights"


class NoGradient:
    table = TABLE

    def initial(self, seed: int) -> Any: ...


class NoStep(NoGradient):
    def gradient(self, weights: Any, batch: Any, out: Any, *, seed: int) -> Any: ...


class Sized(Ones):
    def __init__(self, size: int) -> None:
        super().__init__()


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (Ones(), "expected a function without arguments .* got an object of class Ones$"),
        (Sized, r"functools.partial\(Sized, \.\.\.\), got Sized: missing a required argument: "),
        (NoTable, "model NoTable: expected an attribute `table`, a ps.DenseTable, got none$"),
        (OddTable, "model OddTable: .* got one of class str$"),
        (
            NoGradient,
            r"a method `gradient\(weights, batch, out, \*, step, seed\)`, got none$",
        ),
        (NoStep, "model NoStep: .* got one with other parameters: .*unexpected keyword .*step"),
    ],
    ids=["object", "arguments", "no table", "odd table", "no gradient", "no step"],
)
def test_what_a_model_lacks(make: Any, line: str) -> None:
    """The error names the class, what is expected of it and what was found."""
    with pytest.raises(BadInput, match=line) as caught:
        build_model(make)
    assert "\n" not in str(caught.value)


def test_models_that_fit() -> None:
    """A class or a function that builds the model is accepted."""
    for make in (Ones, partial(Sized, 3), lambda: Ones(0.0)):
        assert build_model(make).table is TABLE


@pytest.mark.parametrize(
    ("start", "got"),
    [
        (None, "NoneType"),
        (np.zeros(3, np.float32), r"an array of shape \(3,\) of float32"),
        (np.zeros(TABLE.size), r"an array of shape \(\d+,\) of float64"),
    ],
    ids=["none", "size", "dtype"],
)
def test_a_start_that_is_no_arena(start: Any, got: str) -> None:
    """What `initial` returns is checked before anything is started."""
    with pytest.raises(BadInput, match=f"^model Ones: expected `initial` to return .* got {got}$"):
        check_start(Ones(), start)


def test_losses() -> None:
    """Any number is a loss; None, from a method without `return`, is not."""
    numbers: list[Any] = [1, 1.0, np.float32(1), np.ones(())]
    assert [check_loss(Ones(), number) for number in numbers] == [1.0] * 4
    others: list[tuple[Any, str]] = [(None, "None"), ([1.0], "a list of 1")]
    for other, got in others:
        with pytest.raises(
            BadInput, match=f"^model Ones: the loss .*: expected a number, got {got}$"
        ):
            check_loss(Ones(), other)
