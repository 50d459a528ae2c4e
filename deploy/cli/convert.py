"""`downpour convert`: files of Caffe from one format into another."""

from pathlib import Path
from typing import Annotated

import typer

from shards.plurals import format_count


def convert(
    source: Annotated[Path, typer.Argument(help="The file to read.", show_default=False)],
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    net: Annotated[
        Path | None,
        typer.Option(
            help="A prototxt with layers that weights must fit; a .caffemodel then contains it.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that exists.")] = False,
) -> None:
    """Convert weights, a solver state or a net into the format of the target's suffix.

    Weights: .caffemodel, .h5, .safetensors. Solver states: .solverstate, .solverstate.h5. Nets:
    .prototxt, of an older version into the present one.
    """
    from worker.caffe.convert import convert as converted

    done = converted(source, target, net, force=force)
    width = max((len(name) for name, _ in done.parts), default=0)
    for name, description in done.parts:
        typer.echo(f"{name:{width}}  {description}")
    if done.copied is not None:
        typer.echo(str(done.copied))
    numbers = f", {done.numbers:,} numbers" if done.numbers else ""
    typer.echo(f"{target}: {format_count(len(done.parts), 'entry')}{numbers} from {source}")
