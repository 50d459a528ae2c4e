"""`downpour train`: its options, and how they become the settings of a new or resumed run.

The options are the fields of `TrainSettings`. One that is not given is left open: a resumed run
keeps its earlier value, and a new run takes the default.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deploy.run.settings import Clusters, RunFiles, TrainSettings
from shards.errors import BadInput
from shards.plurals import format_count
from worker.job.option_fields import Declared, Options, list_options
from worker.job.options import (
    LinkOptions,
    ShardRuntime,
    SnapshotPolicy,
    TrainingPlan,
    WorkerRuntime,
)
from worker.spark.signals import sigterm_too

if TYPE_CHECKING:
    from deploy.run.snapshot_ref import SnapshotRef
    from deploy.run.summary import Summary

_RUN = "The run"
_SUBJECTS = {
    RunFiles: _RUN,
    SnapshotPolicy: "Snapshots",
    TrainingPlan: "How it learns",
    Clusters: "Where it runs",
    ShardRuntime: "Where it runs",
    WorkerRuntime: "Where it runs",
    LinkOptions: "Links",
}
"""The subjects of the options in the order of the help, each with its panel there."""

_RESUME = (
    "A run folder: continue that run, with its settings, from its newest good snapshot. With --out:"
    " start a new run from RUN@NUMBER, a place of snapshots, or one of them."
)
_UNSET = "With --resume: reset this option to its default, e.g. `--unset ray`. Repeatable."


def train_parameters(*more: inspect.Parameter) -> Iterator[inspect.Parameter]:
    """The options of a run, as Typer reads them; `more` follow those of its files."""
    for subject, panel in _SUBJECTS.items():
        yield from list_parameters(subject, panel)
        if subject is RunFiles:
            yield from more


def list_parameters(
    subject: type[Options], panel: str | None = None
) -> Iterator[inspect.Parameter]:
    """The options of a subject, as Typer reads them."""
    for option in list_options(subject).values():
        yield _parameter(option.name, _kind(option), option.option.text, panel, option.default_text)


def _kind(option: Declared) -> type:
    return str if option.option.is_text else option.kind


def _parameter(
    name: str, kind: type, text: str, panel: str | None, shown: str | None = None
) -> inspect.Parameter:
    """A parameter; its help text ends in the default that applies if it is not given.

    Typer cannot show that default itself: its own default is None, for "not given".
    """
    text = text if shown is None else rf"{text} \[default: {shown}]"
    option = typer.Option(help=text, rich_help_panel=panel, show_default=False)
    annotation = Annotated[kind | None, option]  # type: ignore[valid-type]  # known at run time
    keyword = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, keyword, default=None, annotation=annotation)


def train(**options: Any) -> None:
    """Train a network: start shards and workers, show progress, and leave a run folder.

    Ctrl-C stops the run cleanly and leaves a snapshot.
    """
    resume, unset = options.pop("resume"), options.pop("unset")
    values = {name: value for name, value in options.items() if value is not None}
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.train import AlreadyFinished, run

    origin = origin_of(resume) if resume is not None else None
    settings, dropped = _settings(values, origin, unset or [])
    for line in dropped:
        typer.echo(line, err=True)
    try:
        with sigterm_too(settings.leave_s):
            summary = run(settings, origin=origin)
    except AlreadyFinished as finished:
        typer.echo(str(finished))
        return
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    if summary is None:
        typer.echo(f"stopped; continue with: downpour train --resume {settings.out}")
        raise typer.Exit(130)
    typer.echo(_result(summary, settings.out))


def declare(command: Callable[..., None], parameters: Iterable[inspect.Parameter]) -> None:
    """Give a command these parameters, which Typer reads."""
    signature = inspect.Signature(list(parameters))
    command.__signature__ = signature  # type: ignore[attr-defined]  # Typer reads both
    command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}


declare(
    train,
    train_parameters(
        _parameter("resume", str, _RESUME, _RUN), _parameter("unset", list[str], _UNSET, _RUN)
    ),
)


def _result(summary: "Summary", out: Path) -> str:
    """The result of a run, in one line."""
    tested = summary.test_accuracy is not None
    accuracy = f"test accuracy {summary.test_accuracy:.2%}, " if tested else ""
    took = f"{summary.seconds:.0f} s"
    if summary.earlier_seconds:
        latest = summary.seconds - summary.earlier_seconds
        took += f", {latest:.0f} s of them since it was resumed"
    return f"{accuracy}{format_count(summary.updates, 'update')} in {took}; see {out}"


def _settings(
    values: dict[str, Any], origin: "SnapshotRef | None", unset: Sequence[str]
) -> tuple[TrainSettings, list[str]]:
    """The settings, and one line for each option of the earlier run that no longer applies.

    An option that is given wins over the earlier run's value, and that over the default.
    """
    if unset and (origin is None or origin.run is None):
        raise BadInput(f"--unset {unset[0]}", expected="--resume with an earlier run", got="none")
    if origin is None:
        return _fresh(values, "or --resume with an earlier run; got neither"), []
    if "weights" in values:
        raise BadInput("train", expected="--weights or --resume", got="both")
    if origin.run is None:
        return _fresh(values, "as --resume names no run folder; got none"), []
    from deploy.run.folder import SETTINGS
    from deploy.run.resume_settings import resume_settings

    earlier = TrainSettings.load(origin.run / SETTINGS)
    if origin.name is not None:
        if "out" not in values:
            raise BadInput(
                "train",
                expected=(
                    f"--out for the new run that starts from {origin.place} at {origin.name}"
                ),
                got="none",
            )
        return resume_settings(
            earlier.replace(weights=None, snapshots=None, logs=None), values, unset
        )
    if "out" in values:
        raise BadInput(
            "train",
            expected="--out or --resume",
            got="both",
            hint="start a new run with --resume RUN@NUMBER",
        )
    if "snapshots" in [*values, *unset]:
        raise BadInput("train", expected="--snapshots or --resume", got="both")
    return resume_settings(earlier, values | {"out": origin.run}, unset)


def _fresh(values: dict[str, Any], otherwise: str) -> TrainSettings:
    for name, option in list_options(TrainSettings).items():
        if option.is_required and name not in values:
            raise BadInput("train", expected=f"--{name}, {otherwise}")
    return TrainSettings(**values)
