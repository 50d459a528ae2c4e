"""Which strategy, bound and rate reach a target first, by link and stragglers: simulated, kept.

The figures are made by tests/bench/choice.py from deploy/examples/choice.toml and kept in
strategy_table.json, so that `downpour doctor` can quote them.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path

import msgspec

TARGET = 8.0
"""The error in percent that seconds are counted to."""

FIGURES = Path(str(files("deploy.doctor") / "strategy_table.json"))
"""Where the figures are shipped; `keep` writes the file that `load_figures` reads."""


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy under one link and set of stragglers, at its best rate.

    `seconds` is the median over seeds of the virtual time to TARGET, None where half of the seeds
    missed it at every rate.
    """

    link: str
    straggler: bool
    strategy: str
    bound: int | None
    rate: float
    seconds: float | None
    staleness: float

    @property
    def name(self) -> str:
        return self.strategy if self.bound is None else f"{self.strategy}, bound {self.bound}"

    @property
    def place(self) -> tuple[str, bool]:
        return self.link, self.straggler

    @property
    def rank(self) -> float:
        """The seconds, infinite where the target was missed."""
        return math.inf if self.seconds is None else self.seconds


def table(choices: Sequence[Choice]) -> str:
    """The choices as a table in Markdown."""
    lines = [
        "| link | one worker 4 times slower | strategy | rate | staleness | seconds to 8 % error |",
        "|---|---|---|---|---|---|",
    ]
    for choice in choices:
        seconds = "missed" if choice.seconds is None else f"{choice.seconds:.1f}"
        slow = "yes" if choice.straggler else "no"
        lines.append(
            f"| {choice.link or 'none'} | {slow} | `{choice.name}` | {choice.rate:g}"
            f" | {choice.staleness:.2f} | {seconds} |"
        )
    return "\n".join(lines)


def quote(exchange_s: float, compute_s: float) -> str:
    """Quote the simulated times for a link on which a step's messages take `exchange_s`, next to
    `compute_s` of computing; empty without figures."""
    slow = exchange_s > compute_s
    parts = []
    for straggler in (False, True):
        ranked = [
            choice
            for choice in load_figures()
            if choice.straggler == straggler and bool(choice.link) == slow
        ]
        shown = [
            f"{choice.name} {choice.seconds:.0f} s"
            for choice in ranked
            if choice.seconds is not None
        ]
        if shown:
            kind = "one worker 4 times slower" if straggler else "equal workers"
            parts.append(f"  {kind}: {', '.join(shown)}")
    if not parts:
        return ""
    link = "a link of 100 ms and 100 Mbit" if slow else "a link that takes no time"
    return "\n".join(
        [f"Simulated time to one error, eight workers, steps of 50 ms, {link}:", *parts]
    )


@cache
def load_figures() -> list[Choice]:
    """The figures that are shipped."""
    return msgspec.json.decode(FIGURES.read_bytes(), type=list[Choice])


def keep(choices: Sequence[Choice]) -> None:
    """Write the figures where they are shipped from."""
    text = msgspec.json.format(msgspec.json.encode(choices), indent=1)
    FIGURES.write_bytes(text + b"\n")
    load_figures.cache_clear()
