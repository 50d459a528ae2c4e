"""How Sphinx builds these pages into a site: `make docs`.

The pages are plain Markdown that reads well in a repository browser too, so nothing here may need
a directive. Links to files outside `docs/` lead to the repository's own files.
"""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]

project = "Downpour"
release = re.search(r'__version__ = "(.*)"', (_ROOT / "ps" / "__init__.py").read_text())[1]
extensions = ["myst_parser"]
html_theme = "furo"
html_title = f"Downpour {release}"
myst_heading_anchors = 4
exclude_patterns = ["conf.py"]
# A link to a file that is not a page, such as the changelog, is offered as a download.
suppress_warnings = ["myst.xref_missing"]
