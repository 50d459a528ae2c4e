"""The error for a library that comes with an extra of the distribution, and how to install it.

Downpour is not on PyPI: an extra is installed from a checkout, as the README shows.
"""

from shards.errors import BadInput


def install_command(extra: str) -> str:
    """The command that installs an extra; the path stands for the user's checkout."""
    return f'pip install "/path/to/downpour[{extra}]"'


def missing(feature: str, library: str, extra: str) -> BadInput:
    """The error of a feature that needs a library of an extra that is not installed."""
    return BadInput(feature, expected=f"{library} ({install_command(extra)})", got="none")
