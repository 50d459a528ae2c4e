"""How Sphinx builds these pages into a site: `make docs`.

The pages are plain Markdown that reads well in a repository browser too, so nothing here may need
a directive. Links to files outside `docs/` lead to the repository's own files. Tables that follow
from the code and would fill a page are written here, and not in the repository.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

from tests.support.reference_generator import build_page

_ROOT = Path(__file__).parents[1]

project = "Downpour"
found = re.search(r'__version__ = "(.*)"', (_ROOT / "ps" / "__init__.py").read_text())
assert found is not None
release = found[1]
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"Downpour {release}"
myst_heading_anchors = 4
exclude_patterns = ["conf.py"]


def _offer_for_download(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Make links to the repository's own files, such as the changelog, lead to a download."""
    source[0] = re.sub(r"\]\((?=(\.\./)+[A-Z]+\.md\))", "](path:", source[0])


def _add_reference(_app: Sphinx, _page: str, source: list[str]) -> None:
    """Write the parts that follow from the code."""
    source[0] = build_page(source[0])


def setup(app: Sphinx) -> None:
    app.connect("source-read", _add_reference)
    app.connect("source-read", _offer_for_download)
