"""Every wrong input ends in one line of ours, in under ten seconds, with nothing left behind."""

from pathlib import Path

import pytest

from tests.wrong_inputs import sdk
from tests.wrong_inputs.__main__ import tried


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_wrong_input() -> None:
    """N of N: SDK arguments, files and data; tests/deploy tries the command line's options."""
    result = tried(with_options=False)
    print(result)
    assert not result.faults, "\n".join(result.faults)
    for kind, least in (("SDK", 2000), ("file", 100), ("data", 30)):
        assert result.tried[kind] >= least, f"{kind}: {result.tried[kind]} rows"


def test_every_parameter_is_listed(tmp_path: Path) -> None:
    """No parameter of a public function is without its wrong values, and none is made up."""
    with sdk.environment(tmp_path) as env:
        assert sdk.unlisted(env) == []
