"""The pages about moving from other libraries: each diff is short, and its old side runs, too.

The new side is a block of the page, which test_snippets.py runs.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.doc_pages import PAGES, fences, read
from tests.support.other_libraries import (
    caffeonspark,
    elephas,
    horovod,
    installed,
    sparknet,
    tensorflowonspark,
)

MOST_CHANGED = 10


class Port(NamedTuple):
    """How the old side of a page runs: what stands in for the library, and what it must reach.

    `first` and `last` are executed before and after the old programs of the page.
    """

    modules: dict[str, dict[str, Any]]
    last: str
    first: str = ""
    needs: tuple[str, ...] = ()


PORTS = {
    "docs/how-to/from-caffeonspark.md": Port(
        caffeonspark.MODULES,
        "assert os.path.getsize('lenet.caffemodel')\n"
        "assert features.columns == ['SampleID', 'ip1', 'label'] and features.count() == 400",
    ),
    "docs/how-to/from-tensorflowonspark.md": Port(
        tensorflowonspark.MODULES,
        "assert np.abs(np.load('plane.safetensors.npy') - [3, -1]).max() < 0.5",
    ),
    "docs/how-to/from-elephas.md": Port(
        elephas.MODULES,
        "assert np.abs(model.get_weights()[0].ravel() - [3, -1]).max() < 0.5",
        needs=("keras", "jax"),
    ),
    "docs/how-to/from-horovod.md": Port(
        horovod.MODULES,
        "assert np.abs(slope - [3, -1]).max() < 0.5\n"
        "assert np.mean([abs(row.y - row.y__output[0]) for row in predicted.collect()]) < 0.5",
        needs=("torch",),
    ),
    "docs/how-to/from-sparknet.md": Port(
        sparknet.MODULES,
        "found = np.argmax(np.concatenate(features.collect()), axis=1)\n"
        "wanted = np.concatenate([[row.label for row in rows] for rows in trainDF.collect()])\n"
        "assert (found == wanted).mean() > 0.9",
        first="from tests.support.other_libraries.sparknet import Executors, repartitioned\n"
        "sc, trainDF = Executors([]), repartitioned(trainDF, 2)",
    ),
}


def diffs(page: str) -> list[str]:
    return [fence.text for fence in fences(read(page)) if fence.language == "diff"]


@pytest.mark.parametrize("page", [page for page in PAGES if "how-to/from-" in page])
def test_a_port_changes_at_most_ten_lines(page: str) -> None:
    assert diffs(page)
    for diff in diffs(page):
        for sign in "-+":
            changed = [line for line in diff.splitlines() if line.startswith(sign)]
            assert 0 < len(changed) <= MOST_CHANGED, diff


@pytest.mark.usefixtures("demo", "clusters")
@pytest.mark.parametrize("page", PORTS)
def test_the_old_program_runs(page: str, demo: Path) -> None:
    """With a stand-in of the other library, it finds what the new one finds."""
    port = PORTS[page]
    for library in port.needs:
        pytest.importorskip(library, reason=f"needs the extra `{library}`")
    first = next(fence.text for fence in fences(read(page)) if fence.language == "python")
    old = [
        "\n".join(line[1:] for line in diff.splitlines() if not line.startswith("+"))
        for diff in diffs(page)
    ]
    names: dict[str, Any] = {}
    with installed(port.modules):
        for program in (first, port.first, *old, port.last):
            exec(program, names)
