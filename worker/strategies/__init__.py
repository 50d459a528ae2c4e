"""Training strategies: each is a value, and has one file.

A strategy decides when a worker fetches and pushes, what happens to its local weights in between,
and how the shards merge pushes. A new one is a class in a file here, and an entry in `Strategy`.
"""

from typing import cast, get_args

from shards import arguments
from shards.errors import BadInput
from worker.strategies.base import Base, Local
from worker.strategies.bsp import BSP
from worker.strategies.downpour import Downpour

Strategy = Downpour | BSP

STRATEGIES: dict[str, type[Strategy]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(Strategy)
}


def strategy_named(name: str) -> type[Strategy]:
    """The strategy class called `name`; raises BadInput listing the known ones."""
    try:
        return STRATEGIES[name]
    except KeyError:
        raise BadInput(
            f"strategy: expected one of {', '.join(sorted(STRATEGIES))}, got {name!r}"
        ) from None


def strategy_of(what: str, value: object) -> Strategy:
    """`value` if it is a strategy, or the strategy of that name with its defaults.

    Raises BadInput naming `what`.
    """
    if isinstance(value, Base):  # a strategy of this project or of the user
        return cast(Strategy, value)
    if isinstance(value, str) and value.lower() in STRATEGIES:
        return STRATEGIES[value.lower()]()
    raise arguments.wrong(what, f"{', '.join(STRATEGIES)}, or a strategy such as BSP()", value)


__all__ = [
    "BSP",
    "STRATEGIES",
    "Base",
    "Downpour",
    "Local",
    "Strategy",
    "strategy_named",
    "strategy_of",
]
