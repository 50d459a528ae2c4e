"""A source of the user's own, which a net names by its class."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import worker
from shards.errors import BadInput
from worker.caffe.net import Description
from worker.caffe.net_data import data_of
from worker.caffe.net_sources import open_net_data

NET = (
    'layer {{ name: "d" type: "MemoryData" top: "data" top: "label" source_class: "{kind}"'
    ' memory_data_param {{ source: "any/path" batch_size: 2 }} }}'
)


class Bars(worker.Source):
    """Images of one colour, which is the number of the row."""

    rows = 9

    def read(self, start: int, stop: int) -> Iterator[worker.Sample]:
        for number in range(start, stop):
            yield worker.Sample(number % 3, np.full((1, 2, 2), number, np.uint8))


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module `bars`, with the class, where a net looks for it."""
    made = ModuleType("bars")
    made.__dict__["Bars"] = Bars
    monkeypatch.setitem(sys.modules, "bars", made)


def test_a_net_names_a_class() -> None:
    """The class gets the path and what the net wants."""
    source = open_net_data(data_of(Description(NET.format(kind="bars.Bars"))), classes=3)
    assert isinstance(source, Bars)
    assert (source.path, source.options.classes, source.shape) == (Path("any/path"), 3, (1, 2, 2))
    (batch,) = source.batches(start=4, stop=6)
    assert batch["data"].to_pylist() == [b"\4\4\4\4", b"\5\5\5\5"]


@pytest.mark.parametrize(
    ("kind", "classes", "error"),
    [
        ("bars.Nothing", 3, "layer d: source_class bars.Nothing: cannot be imported"),
        ("nowhere.Bars", 3, "layer d: source_class nowhere.Bars: cannot be imported"),
        ("pathlib.Path", 3, "source_class pathlib.Path: expected a subclass of worker.Source"),
    ],
)
def test_a_class_that_makes_no_sense(kind: str, classes: int, error: str) -> None:
    """The error names the layer and the class."""
    with pytest.raises(BadInput, match=error.replace(".", r"\.")):
        open_net_data(data_of(Description(NET.format(kind=kind))), classes=classes)


def test_a_label_that_is_no_class_is_found_while_rows_are_read() -> None:
    """The error names the row."""
    source = open_net_data(data_of(Description(NET.format(kind="bars.Bars"))), classes=2)
    with pytest.raises(BadInput, match=r"any/path: row 2: expected a label in \[0, 2\), got 2"):
        list(source.batches())
