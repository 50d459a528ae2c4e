"""The pages about moving from other libraries: each diff is short, and its old side runs, too.

The new side is a block of the page, which test_snippets.py runs.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.support import tensorflowonspark_api
from tests.support.doc_pages import fences, read

MOST_CHANGED = 10
PAGES = {"docs/how-to/from-tensorflowonspark.md": tensorflowonspark_api.module}


@pytest.mark.parametrize("page", ["docs/how-to/from-caffeonspark.md", *PAGES])
def test_a_port_changes_at_most_ten_lines(page: str) -> None:
    for fence in fences(read(page)):
        if fence.language == "diff":
            for sign in "-+":
                changed = [line for line in fence.text.splitlines() if line.startswith(sign)]
                assert 0 < len(changed) <= MOST_CHANGED


@pytest.mark.usefixtures("clusters")
@pytest.mark.parametrize("page", PAGES)
def test_the_old_program_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a stand-in of the other library, it finds the plane that the new one finds."""
    stand_in: Callable[[], ModuleType] = PAGES[page]
    package = stand_in()
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.chdir(tmp_path)
    blocks = fences(read(page))
    first = next(fence.text for fence in blocks if fence.language == "python")
    diff = next(fence.text for fence in blocks if fence.language == "diff")
    old = "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
    names: dict[str, Any] = {}
    exec(first, names)
    exec(old, names)
    (model,) = tmp_path.glob("plane*")
    assert np.abs(np.load(model) - [3, -1]).max() < 0.5
