"""`downpour plot`: draws the loss of recorded runs."""

from pathlib import Path
from typing import Annotated

import typer

from shards.errors import BadInput


def plot(
    runs: Annotated[
        list[Path], typer.Argument(help="Folders of recorded runs.", show_default=False)
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="The picture to write, a .png file.", show_default="RUN/costs.png"),
    ] = None,
) -> None:
    """Draw the loss of runs against samples, seconds and bytes pushed.

    A run is recorded by `downpour train`, or by a program of yours with `deploy.record` or
    `deploy.Recorder`. It may be under way: its last minute is not drawn. Of one run each update is
    a point, of several each run is a curve.
    """
    from deploy.run.folder import COSTS_PLOT
    from deploy.run.plots import plot_costs

    picture = runs[0] / COSTS_PLOT if out is None else out
    if picture.suffix != ".png":
        raise BadInput("--out", expected="a .png file", got=str(picture))
    names = [run.name for run in runs]
    unique = len(set(names)) == len(names)
    plot_costs({run.name if unique else str(run): run for run in runs}, picture)
    typer.echo(f"drawn: {picture}")
