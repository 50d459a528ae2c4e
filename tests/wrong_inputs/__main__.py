"""`python -m tests.wrong_inputs` tries every wrong input and prints how many end as they should."""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest import mock

from tests.wrong_inputs import data, estimators, files, options, sdk
from tests.wrong_inputs.rows import Row, fault_of


class Result(NamedTuple):
    """How many rows there are of each kind, how many end well, and what is wrong with the rest."""

    tried: Counter[str]
    good: Counter[str]
    faults: list[str]

    def __str__(self) -> str:
        kinds = [f"{kind:8} {self.good[kind]} of {count}" for kind, count in self.tried.items()]
        return "\n".join([*self.faults, *kinds, f"{self.good.total()} of {self.tried.total()}"])


def tried(*, with_options: bool) -> Result:
    """Every row, one after another, in a folder of its own for files and temporary files."""
    result = Result(Counter(), Counter(), [])
    with _folder() as root, sdk.environment(root) as env:
        commands = options.rows(root) if with_options else ()
        for row in chain(
            sdk.rows(env), estimators.rows(), files.rows(env), data.rows(env), commands
        ):
            _try(row, root, result)
    return result


def _try(row: Row, root: Path, result: Result) -> None:
    fault = fault_of(row, root)
    result.tried[row.kind] += 1
    if fault:
        result.faults.append(f"{row.title}: {fault}")
    else:
        result.good[row.kind] += 1


@contextmanager
def _folder() -> Iterator[Path]:
    """A folder that is the working directory and holds all temporary files."""
    with tempfile.TemporaryDirectory() as folder:
        environment = mock.patch.dict(os.environ, {"TMPDIR": folder})
        with environment, mock.patch("tempfile.tempdir", folder), chdir(folder):
            yield Path(folder)


if __name__ == "__main__":
    outcome = tried(with_options=True)
    print(outcome)
    sys.exit(bool(outcome.faults))
