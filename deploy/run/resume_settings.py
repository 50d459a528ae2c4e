"""The settings of a resumed run: the options given now, on top of the earlier run's settings.

An option that is not given now keeps the earlier run's value, with two exceptions: it is unset, or
it has no effect together with the options given now, such as the address of a Ray for shards in
processes. It then returns to its default, and the run reports it. An option that is given now and
has no effect is an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from deploy.run.settings import TrainSettings, format_option, option_name, options_without_effect
from shards.errors import BadInput
from worker.job.option_fields import list_options

_DEFAULTS = {
    name: option.default
    for name, option in list_options(TrainSettings).items()
    if not option.is_required
}


def resume_settings(
    earlier: TrainSettings, options: Mapping[str, Any], unset: Sequence[str]
) -> tuple[TrainSettings, list[str]]:
    """The settings, and a line for each option of the earlier run that no longer applies.

    `unset` lists options by name, without the leading dashes. Raises BadInput for an option that
    does not exist, or that is both given and unset.
    """
    merged = {**earlier.asdict(), **options}
    for name in _names(unset, options):
        merged[name] = _DEFAULTS[name]
    if "strategy" in options and "staleness" not in options:
        merged["staleness"] = _DEFAULTS["staleness"]  # the earlier strategy's may not fit
    dropped = []
    for name, why in options_without_effect(merged).items():
        if name not in options:
            dropped.append(
                f"dropped {format_option(name, merged[name])} from the earlier run: {why}"
            )
            merged[name] = _DEFAULTS[name]
    return TrainSettings(**merged), dropped


def _names(unset: Sequence[str], options: Mapping[str, Any]) -> list[str]:
    """The names of the settings to unset; raises BadInput."""
    names = [name.replace("-", "_") for name in unset]
    for text, name in zip(unset, names, strict=True):
        if name not in _DEFAULTS:
            raise BadInput(f"--unset {text}", expected="an option that has a default, as ray")
        if name in options:
            raise BadInput(option_name(name), expected=f"it or --unset {text}", got="both")
    return names
