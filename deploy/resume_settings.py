"""The settings of a resumed run: the options given now, on top of the earlier run's settings.

An option that is not given now keeps the earlier run's value, with two exceptions: it is unset, or
it has no effect together with the options given now, such as the address of a Ray for shards in
processes. It then returns to its default, and the run reports it. An option that is given now and
has no effect is an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.settings import TrainSettings, misplaced, option_name, written
from shards.errors import BadInput
from worker.option_fields import declared
from worker.strategies import strategy_named

_DEFAULTS = {
    name: each.default for name, each in declared(TrainSettings).items() if not each.required
}


def resumed(
    earlier: TrainSettings, given: Mapping[str, Any], unset: Sequence[str]
) -> tuple[TrainSettings, list[str]]:
    """The settings, and a line for each option of the earlier run that no longer applies.

    `unset` lists options by name, without the leading dashes. Raises BadInput for an option that
    does not exist, or that is both given and unset.
    """
    merged = {**earlier.asdict(), **given}
    # Staleness comes last, because its default depends on the strategy.
    for name in sorted(_names(unset, given), key="staleness".__eq__):
        merged[name] = _default(name, merged)
    dropped = []
    for name, why in misplaced(merged).items():
        if name not in given:
            dropped.append(f"dropped {written(name, merged[name])} from the earlier run: {why}")
            merged[name] = _default(name, merged)
    return TrainSettings(**merged), dropped


def _names(unset: Sequence[str], given: Mapping[str, Any]) -> list[str]:
    """The names of the settings to unset; raises BadInput."""
    names = [name.replace("-", "_") for name in unset]
    for text, name in zip(unset, names, strict=True):
        if name not in _DEFAULTS:
            raise BadInput(f"--unset {text}: expected an option that has a default, as ray")
        if name in given:
            raise BadInput(f"{option_name(name)}: expected it or --unset {text}, got both")
    return names


def _default(name: str, settings: Mapping[str, Any]) -> object:
    """The default of a setting; that of `staleness` depends on the strategy in `settings`."""
    if name == "staleness":
        return strategy_named(settings["strategy"]).usual_bound
    return _DEFAULTS[name]
