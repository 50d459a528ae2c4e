"""Every wrong argument of the command line gives one line of ours, before anything is started."""

import re
from pathlib import Path

import pytest

from tests.support.cli_in_process import Run
from tests.support.cli_refusals import files
from tests.support.wrong_options import ROWS


@pytest.fixture
def folder(job: Path) -> Path:
    """The working directory of the rows, with the files that they name."""
    (job / "broken.safetensors").write_bytes(b"\x08garbage")
    (job / "empty.json").write_text("{}")
    (job / "empty").mkdir()
    return job


@pytest.mark.parametrize(
    ("arguments", "line"), ROWS, ids=[" ".join(arguments)[-60:] for arguments, _ in ROWS]
)
@pytest.mark.usefixtures("no_gpu")
def test_a_wrong_argument_is_named_in_one_line(
    arguments: list[str], line: str, downpour: Run, folder: Path
) -> None:
    """The status is 2, the line names the argument and its value, and no file is left behind."""
    before = files(folder)
    status, out, err = downpour(*arguments)
    assert (status, out) == (2, "")
    assert re.fullmatch(rf"downpour: error: {line}.*\n", err), err
    assert files(folder) == before


def test_the_table_is_large() -> None:
    """Every command has rows, and there are at least 300 of them."""
    assert len(ROWS) >= 300
    first = {arguments[0] for arguments, _ in ROWS}
    assert {"train", "test", "features", "doctor", "simulate", "reshard", "snapshots"} <= first
