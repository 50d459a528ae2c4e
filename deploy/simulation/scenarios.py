"""A scenario: one run as a value, and as a readable file.

The file is TOML: a paragraph about the fault, the seed and the profile, the cluster, and the
injected faults with their times. Playing it always gives the same result (simulation.py).
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path
from textwrap import fill
from typing import Any

import msgspec

from deploy.simulation.config import SimulationConfig
from deploy.simulation.faults import AnyFault
from deploy.simulation_kinds import Profile
from shards.errors import BadInput


class Scenario(
    msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True
):
    """One run. `story`: what went wrong. With its `mutant` (tests/mutants) it breaks a promise."""

    story: str = ""
    mutant: str = ""
    seed: int
    profile: Profile = Profile.WITHIN
    setting: SimulationConfig
    faults: tuple[AnyFault, ...] = ()


def load(path: Path) -> Scenario:
    """Read a scenario file; raises BadInput that names the file."""
    try:
        return msgspec.convert(tomllib.loads(path.read_text()), Scenario)
    except OSError as error:
        raise BadInput(f"scenario {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise BadInput(f"scenario {path}: {error}") from None


def format_scenario(scenario: Scenario) -> str:
    """The text of a scenario file; `load` reads it back."""
    plain: dict[str, Any] = msgspec.to_builtins(scenario)
    setting, faults, story = plain.pop("setting"), plain.pop("faults", ()), plain.pop("story", "")
    quoted = fill(story, 100).replace("\\", "\\\\").replace('"', '\\"')
    lines = [f'story = """\n{quoted}\n"""'] if story else []
    lines += [*_pairs(plain), "", "[setting]", *_pairs(setting)]
    for fault in faults:
        # Time and kind come first, for the reader.
        ordered = {name: fault.pop(name) for name in ("at", "fault")} | fault
        lines += ["", "[[faults]]", *_pairs(ordered)]
    return "\n".join(lines) + "\n"


def _pairs(table: dict[str, Any]) -> Iterator[str]:
    for name, value in table.items():
        # JSON strings, numbers and booleans are valid TOML.
        yield f"{name} = {msgspec.json.encode(value).decode()}"
