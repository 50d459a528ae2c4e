"""The command `downpour` in this very process."""

from collections.abc import Callable

import pytest

from deploy.cli import app as cli
from tests.support.own_logs import own_logs

Run = Callable[..., tuple[int, str, str]]
"""The command: its arguments; its exit status, its standard output and error."""


def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *first: str
) -> Run:
    """It, with `first` before the arguments of each call."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["downpour", *first, *map(str, arguments)])
        with own_logs(), pytest.raises(SystemExit) as ended:
            cli.main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return run
