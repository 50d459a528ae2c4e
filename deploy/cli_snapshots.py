"""`downpour snapshots`: what looks at snapshots. Each calls one function, and prints."""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from deploy.settings import LONGEST_S

app = typer.Typer(
    help="Look at a run's snapshots: list, verify, restore, diff, take.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_PLACE = "A run folder, a place of snapshots, or one of them, as RUN@400."
Origin = Annotated[str, typer.Argument(help=_PLACE, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
def list_them(origin: Origin, as_json: AsJson = False) -> None:
    """List the snapshots at a place: number, state, steps, versions, time, size, aligned or not."""
    from deploy.snapshot_ref import origin_of
    from deploy.snapshots import list_text, listed

    meant = origin_of(origin)
    rows = listed(meant)
    typer.echo(msgspec.json.encode(rows) if as_json else list_text(rows, meant.place))


@app.command()
def verify(origin: Origin) -> None:
    """Read every byte of a snapshot, or of all at a place, and name each bad file and chunk.

    Exit status 1 when one of them is bad.
    """
    from deploy.snapshot_ref import origin_of
    from deploy.snapshots import verdict_text, verified

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
        typer.Option(help="The .safetensors or .caffemodel file to write.", show_default=False),
    ],
    solver: Annotated[
        Path | None,
        typer.Option(
            help="The solver whose network a .caffemodel holds.", show_default="the run's"
        ),
    ] = None,
) -> None:
    """Write a snapshot's weights to a file; to go on training: downpour train --resume."""
    from deploy.snapshot_ref import origin_of
    from deploy.snapshots import restored

    found = restored(origin_of(origin), output, solver)
    for complaint in found.passed_over:
        typer.echo(f"passed over: {complaint}", err=True)
    typer.echo(f"{output}: the weights of {found.place}")


@app.command()
def diff(
    first: Origin,
    second: Origin,
    as_json: AsJson = False,
) -> None:
    """Compare two snapshots: how far each tensor moved, and what of the ledger changed."""
    from deploy.snapshot_ref import origin_of
    from deploy.snapshots import compared, diff_text

    found = compared(origin_of(first), origin_of(second))
    typer.echo(msgspec.json.encode(found) if as_json else diff_text(found))


@app.command()
def take(
    origin: Annotated[str, typer.Argument(help="The folder of a run under way.")],
    wait_s: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds that the snapshot is waited for.")
    ] = 60.0,
) -> None:
    """Ask a run under way on this machine for a snapshot now."""
    from deploy.snapshot_ref import origin_of
    from deploy.snapshots import taken

    typer.echo(f"snapshot {taken(origin_of(origin), wait_s)}")
