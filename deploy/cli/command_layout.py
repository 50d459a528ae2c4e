"""The layout of the command line's help: groups of commands in the order of their use, and flags.

Typer lists commands as they were added, shows a type for options that take no value, and cuts words
that do not fit into 80 columns.
"""

import copy
from functools import partial
from typing import Any

from typer.core import TyperGroup, TyperOption

GROUPS = {
    "Train a model and use it": (
        "train", "test", "features", "convert", "data", "snapshots",
    ),
    "While a run trains": ("plot", "set", "reshard", "doctor"),
    "Experiments": ("exp", "simulate"),
    "Jobs of a training service": (
        "submit", "list", "describe", "logs", "events", "wait", "top", "compare", "cancel",
        "pause", "resume", "clone", "snapshot", "export", "artefacts", "upload",
    ),
    "Clusters": ("pack", "deploy"),
    "Run a training service": ("serve", "service", "webhook", "run-attempt"),
    "This command": ("prepare", "version", "completion"),
}  # fmt: skip
"""The groups of the command list, each with its commands."""


def lay_out(group: TyperGroup) -> TyperGroup:
    """Sort the commands of `downpour` into their groups, and mend the help of each."""
    order = [name for names in GROUPS.values() for name in names]
    group.commands = {name: group.commands[name] for name in order}
    for panel, names in GROUPS.items():
        for name in names:
            group.commands[name].rich_help_panel = panel  # type: ignore[attr-defined]  # Typer's
    _mend_help(group)
    return group


def _mend_help(command: Any) -> None:
    command.format_help = partial(_format_help, command)
    for inner in getattr(command, "commands", {}).values():
        _mend_help(inner)


def _format_help(command: Any, context: Any, formatter: Any) -> None:
    """Format the help of a copy, as parsing needs what is not shown."""
    shown = copy.copy(command)
    shown.params = [_mend_flag(param) for param in command.params]
    help_option = shown.get_help_option(context)
    if help_option is not None:
        help_option.metavar = ""
    type(command).format_help(shown, context, formatter)


def _mend_flag(param: Any) -> Any:
    """An option as the help shows it: a flag without a type, and its opposite in the text."""
    if not isinstance(param, TyperOption) or not (param.is_flag or param.count):
        return param
    flag = copy.copy(param)
    flag.metavar = ""
    if flag.secondary_opts:
        text, default, rest = (flag.help or "").partition(r" \[default:")
        flag.help = f"{text.rstrip('.')}; {flag.secondary_opts[0]}: do not.{default}{rest}"
        flag.secondary_opts = []
    return flag
