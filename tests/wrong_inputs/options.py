"""Wrong options of the command line: the rows of tests/support/wrong_options.py, in this process.

Each command must end with status 2 and one line on standard error that begins as all of them do.
"""

import contextlib
import importlib
import importlib.util
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deploy.cli import app as cli
from shards.errors import BadInput
from tests.support import tiny_job
from tests.wrong_inputs.rows import Row

_MODULE = "tests.support.wrong_options"


def rows(folder: Path) -> Iterator[Row]:
    """A row for each wrong command in `folder`; none where there is no such list."""
    if importlib.util.find_spec(_MODULE) is None:
        return
    tiny_job.write_job(folder)
    (folder / "broken.safetensors").write_bytes(b"\x08garbage")
    (folder / "empty.json").write_text("{}")
    (folder / "empty").mkdir()
    for arguments, names in importlib.import_module(_MODULE).ROWS:
        listed = arguments.split() if isinstance(arguments, str) else [*map(str, arguments)]
        yield Row("options", f"downpour {' '.join(listed)}", _run(listed), names)


def _run(arguments: Sequence[str]) -> Callable[[], object]:
    def act() -> object:
        status, out, err = _ended(arguments)
        if status != 2 or out or not err.startswith("downpour: error: "):
            raise AssertionError(f"status {status}, output {out[:80]!r}, error {err[:200]!r}")
        raise BadInput(err.removesuffix("\n"))  # judged as an error of the SDK is

    return act


def _ended(arguments: Sequence[str]) -> tuple[int, str, str]:
    """The exit status of a command, its output and its error."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    sys.argv = ["downpour", *arguments]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as ended:
        return int(ended.code or 0), out.getvalue(), err.getvalue()
    finally:
        sys.argv = before
    return 0, out.getvalue(), err.getvalue()
