"""A scenario: one run as a value, and as a file that a person can read.

The file is TOML: a paragraph on what it is about, the seed and the profile, the cluster, and the
faults at their times. Played again it comes to the same end (simulation.py).
"""

import tomllib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec

from deploy.simulation.config import SimulationConfig
from deploy.simulation.faults import AnyFault
from shards.errors import BadInput


class Profile(StrEnum):
    """How much goes wrong: what the system promises to survive, or more than that.

    Beyond it, pushes may be lost and progress may end; what is applied is still applied once,
    versions do not go back, and nobody commits beside a primary.
    """

    WITHIN = "within"
    BEYOND = "beyond"


class Scenario(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One run. `story` tells what went wrong; `bug` names a planted bug that it is about."""

    story: str = ""
    bug: str = ""
    seed: int
    profile: Profile = Profile.WITHIN
    setting: SimulationConfig
    faults: tuple[AnyFault, ...] = ()


def load(path: Path) -> Scenario:
    """Read a scenario file; raises BadInput naming it."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Scenario)
    except OSError as error:
        raise BadInput(f"scenario {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"scenario {path}: {error}") from None


def written(scenario: Scenario) -> str:
    """The text of a scenario's file; `load` reads it back."""
    plain: dict[str, Any] = msgspec.to_builtins(scenario)
    setting, faults, story = plain.pop("setting"), plain.pop("faults", ()), plain.pop("story", "")
    told = fill(story, 100).replace("\\", "\\\\").replace('"', '\\"')
    lines = [f'story = """\n{told}\n"""'] if story else []
    lines += [*_pairs(plain), "", "[setting]", *_pairs(setting)]
    for fault in faults:
        # When and what first, as it is read.
        ordered = {name: fault.pop(name) for name in ("at", "fault")} | fault
        lines += ["", "[[faults]]", *_pairs(ordered)]
    return "\n".join(lines) + "\n"


def _pairs(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        # JSON's strings, numbers and truth values are TOML's.
        yield f"{name} = {msgspec.json.encode(value).decode()}"
