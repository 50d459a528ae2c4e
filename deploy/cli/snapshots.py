"""`downpour snapshots`: commands for snapshots. Each calls one function and prints its result."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from worker.job.options import LONGEST_S, MAX_COUNT

app = typer.Typer(
    help="Snapshots of a run: list, verify, restore, compare or take them.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_PLACE = "A run folder, a place of snapshots, or one snapshot such as RUN@400."
Origin = Annotated[str, typer.Argument(help=_PLACE, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_them(origin: Origin, as_json: AsJson = False) -> None:
    """List snapshots with their number, state, steps, versions, time, size and alignment."""
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.snapshots import list_text, listed

    meant = origin_of(origin)
    rows = listed(meant)
    typer.echo(msgspec.json.encode(rows) if as_json else list_text(rows, meant.place))


@app.command()
def verify(origin: Origin) -> None:
    """Read every byte of one snapshot or of all in a place, and name each bad file and chunk.

    The exit status is 1 if a snapshot is bad.
    """
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.snapshots import verdict_text, verified

    good = True
    for verdict in verified(origin_of(origin)):
        typer.echo(verdict_text(verdict))
        good = good and not verdict.complaints
    if not good:
        raise typer.Exit(1)


@app.command()
def restore(
    origin: Origin,
    output: Annotated[
        Path,
        typer.Option(
            help="The .safetensors, .h5 or .caffemodel file to write.", show_default=False
        ),
    ],
    solver: Annotated[
        Path | None,
        typer.Option(
            help="The solver with the network of the .caffemodel.", show_default="the run's"
        ),
    ] = None,
) -> None:
    """Write the weights of a snapshot to a file. To continue training: downpour train --resume."""
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.snapshots import restored

    found = restored(origin_of(origin), output, solver)
    for complaint in found.passed_over:
        typer.echo(f"skipped: {complaint}", err=True)
    typer.echo(f"{output}: the weights of {found.place}")


@app.command()
def diff(
    first: Origin,
    second: Origin,
    as_json: AsJson = False,
) -> None:
    """Compare two snapshots: how far each tensor moved, and what changed in the ledger."""
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.snapshots import compared, diff_text

    found = compared(origin_of(first), origin_of(second))
    typer.echo(msgspec.json.encode(found) if as_json else diff_text(found))


@app.command()
def take(
    origin: Annotated[str, typer.Argument(help="The folder of a running job.")],
    wait_s: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds to wait for the snapshot.")
    ] = 60.0,
) -> None:
    """Take a snapshot of a run that is under way on this machine."""
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.snapshots import taken

    typer.echo(f"snapshot {taken(origin_of(origin), wait_s)}")


@app.command()
def adopt(
    state: Annotated[
        Path, typer.Argument(help="A .solverstate or .solverstate.h5 file.", show_default=False)
    ],
    place: Annotated[
        Path, typer.Argument(help="The folder in which the snapshot is made.", show_default=False)
    ],
    solver: Annotated[Path, typer.Option(help="The solver, a Caffe prototxt.", show_default=False)],
    weights: Annotated[
        Path | None,
        typer.Option(help="The file of the weights.", show_default="the one that the state names"),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="The data to train on, for a net that does not state the shape of its rows.",
            show_default=False,
        ),
    ] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=MAX_COUNT, help="Workers of the run that will continue.")
    ] = 1,
) -> None:
    """Make a snapshot of Caffe's solver state and weights, to continue training from.

    Each worker of the run counts as having taken Caffe's iterations.
    """
    from deploy.run.caffe_resume import adopt as adopted

    name = adopted(state, place, solver, weights, data, workers)
    typer.echo(f"snapshot {place}@{name}: downpour train --resume {place}@{name}")
