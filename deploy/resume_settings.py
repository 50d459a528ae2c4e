"""What a run that goes on is told: what is said now, over what it was told then.

An option that is not given now says nothing, so the earlier run's holds. Two things end one: being
unset, and meaning nothing beside what is said now, as the address of a Ray for shards in processes.
It then takes its default, and is named. One that is given now and means nothing is an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import NODEFAULT
from msgspec.structs import asdict, fields

from deploy.settings import TrainSettings, misplaced, option, written
from shards.errors import BadInput

_DEFAULTS = {
    field.name: field.default
    for field in fields(TrainSettings)
    if field.default is not NODEFAULT  # those that every run is told
}


def resumed(
    earlier: TrainSettings, given: Mapping[str, Any], unset: Sequence[str]
) -> tuple[TrainSettings, list[str]]:
    """The settings, and which of the earlier run's hold no longer, in words.

    `unset` names options as people write them, without dashes before. Raises BadInput.
    """
    told = {**asdict(earlier), **given}
    for name in sorted(_names(unset, given), key="staleness".__eq__):  # last: it goes by another
        told[name] = _default(name, told)
    words = []
    for name, why in misplaced(told).items():
        if name not in given:
            words.append(f"{written(name, told[name])} of the earlier run holds no longer: {why}")
            told[name] = _default(name, told)
    return TrainSettings(**told), words


def _names(unset: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """The settings that are unset."""
    names = [name.replace("-", "_") for name in unset]
    for text, name in zip(unset, names, strict=True):
        if name not in _DEFAULTS:
            raise BadInput(f"--unset {text}: expected an option that has a default, as ray")
        if name in given:
            raise BadInput(f"{option(name)}: expected it or --unset {text}, got both")
    return names


def _default(name: str, told: Mapping[str, Any]) -> object:
    """What a setting is where nobody has told it."""
    return 0 if name == "staleness" and told["strategy"] == "bsp" else _DEFAULTS[name]
