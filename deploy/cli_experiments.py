"""`downpour exp`: the staleness experiments. They are loaded when a command runs."""

from enum import StrEnum
from typing import Annotated

import typer

app = typer.Typer(
    help="Run experiments on a virtual clock: shapes of the literature, and sweeps of your own.",
    no_args_is_help=True,
    add_completion=False,
)


class Size(StrEnum):
    """The size of a shape's runs."""

    CI = "ci"
    SMALL = "small"


Jobs = Annotated[int, typer.Option(min=1, max=256, help="Processes that run trials.")]


@app.command()
def shape(
    number: Annotated[int, typer.Argument(help="The shape, as `exp list` numbers them.")],
    preset: Annotated[
        Size, typer.Option(help="How large its runs are: ci takes minutes, small ten times that.")
    ] = Size.CI,
    control: Annotated[
        bool,
        typer.Option("--control", help="Remove the cause: it must come out as not reproduced."),
    ] = False,
    jobs: Jobs = 1,
) -> None:
    """Run a shape of the literature; the last line is its verdict beside the published figure."""
    from deploy.experiments.shapes import shape_numbered
    from deploy.experiments.shapes.base import Preset, play

    outcome = play(
        shape_numbered(number), Preset(preset), control=control, jobs=jobs, note=typer.echo
    )
    for line in outcome.lines():
        typer.echo(line)


@app.command("list")
def show_shapes() -> None:
    """List the shapes, those that cannot be run with the reason."""
    from deploy.experiments.shapes import MISSING, SHAPES

    rows = {number: f"{one.title} ({one.source})" for number, one in SHAPES.items()}
    rows |= {number: f"missing: {reason}" for number, reason in MISSING.items()}
    for number in sorted(rows):
        typer.echo(f"{number:3}  {rows[number]}")
