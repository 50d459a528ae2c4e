"""What the pages show runs: every block of Python, and the commands of the tutorial, in order."""

import re
import shutil
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from unittest import SkipTest

import pytest
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser
from sybil.typing import Parser
from typer.testing import CliRunner

from deploy.cli.app import app
from tests.support.doc_pages import PAGES, ROOT, commands, fences, read
from tests.support.own_logs import own_logs
from tests.support.small_demo import SHORTER

TUTORIAL = "docs/tutorials/first-training.md"
ON_CLUSTERS = {
    "README.md",
    TUTORIAL,
    "docs/how-to/clusters.md",
    "docs/how-to/embeddings.md",
    "docs/how-to/existing-script.md",
    "docs/how-to/extending.md",
    *(page for page in PAGES if "how-to/from-" in page),
    "docs/how-to/keras.md",
    "docs/how-to/spark-loop.md",
    "docs/how-to/streaming.md",
    "docs/how-to/spark-ml.md",
    "docs/how-to/tfrecord.md",
    "docs/how-to/watch.md",
}
NEEDS = {
    "docs/tutorials/decoupled.md": ["torch"],
    "docs/how-to/from-elephas.md": ["jax", "keras"],
    "docs/how-to/from-horovod.md": ["torch"],
    "docs/how-to/jax.md": ["jax"],
    "docs/how-to/keras.md": ["jax", "keras"],
    "docs/how-to/pytorch.md": ["torch"],
    "docs/how-to/scikit-learn.md": ["sklearn"],
    "docs/how-to/watch.md": ["tensorboardX"],
}
"""The extras without which a page is skipped."""


def make_demo() -> list[str]:
    """The command behind `make demo`, as the Makefile has it."""
    recipe = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe
    (command,) = commands(recipe[1].replace("$(BIN)/", "").replace("$(OUT)", "runs/demo"))
    return command


def run_commands(example: Example) -> None:
    """Run the `downpour` commands of a block, with fewer steps; leave alone what is not ours.

    The demo's shards are actors of Ray; those of other runs are processes, which start sooner.
    """
    for command in commands(example.parsed):
        words = make_demo() if command == ["make", "demo"] else command
        if words[0] != "downpour":
            continue
        shorter = re.sub(
            r"--max-iter (\d+)",
            lambda found: f"--max-iter {int(found[1]) // SHORTER}",
            " ".join(words[1:]),
        )
        if "train" in words and words is command:
            shorter += " --shards-in processes"
        result = CliRunner().invoke(app, shorter.split(), catch_exceptions=False)
        assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"


PAGES_WITH_PYTHON = [page for page in PAGES if "```python" in read(page)]


@pytest.mark.timeout(900)  # a page may start processes, one after another
@pytest.mark.usefixtures("demo", "registries")
@pytest.mark.parametrize("page", [page for page in PAGES_WITH_PYTHON if page not in ON_CLUSTERS])
def test_snippets(page: str, tmp_path: Path) -> None:
    """The blocks of a page run one after another, as a reader would enter them."""
    run_page(page, tmp_path)


@pytest.mark.timeout(900)  # the first page on the clusters starts them
@pytest.mark.usefixtures("demo", "registries", "clusters")
@pytest.mark.parametrize("page", sorted(ON_CLUSTERS))
def test_snippets_on_clusters(page: str, tmp_path: Path) -> None:
    """So do those of a page that starts Ray or Spark."""
    run_page(page, tmp_path)


def test_a_change_of_a_program_runs() -> None:
    """The new lines of a diff are lines of a block of its page, which is executed."""
    diffs = [
        (page, fence.text)
        for page in PAGES
        for fence in fences(read(page))
        if fence.language == "diff"
    ]
    assert {page for page, _ in diffs} == {page for page in PAGES if "how-to/from-" in page}
    for page, diff in diffs:
        new = [line[1:] for line in diff.splitlines() if line[0] in "+ "]
        blocks = [fence.text for fence in fences(read(page)) if fence.language == "python"]
        assert any("\n".join(new) in block for block in blocks), page


def run_page(page: str, tmp_path: Path) -> None:
    for extra in NEEDS.get(page, []):
        pytest.importorskip(extra, reason=f"needs the extra `{extra}`")
    # A copy, for numba writes what it compiles beside the file where the code stands.
    copy = tmp_path / "page" / Path(page).name
    copy.parent.mkdir()
    shutil.copy(ROOT / page, copy)
    parsers: list[Parser] = [PythonCodeBlockParser(), SkipParser()]
    if page == TUTORIAL:
        parsers.append(CodeBlockParser("bash", run_commands))
    document = Document.parse(str(copy), *parsers)
    document.namespace["missing"] = lambda extra: find_spec(extra) is None
    with own_logs():
        for example in document.examples():
            with suppress(SkipTest):  # a block that needs what is not installed
                example.evaluate()
    shown = [fence for fence in fences(read(page)) if fence.language == "python"]
    assert len(list(document.examples())) >= len(shown) > 0
