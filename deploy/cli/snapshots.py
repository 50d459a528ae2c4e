"""`downpour snapshots`: commands for the snapshots of runs, and of jobs of a training service.

Each calls one function and prints its result.
"""

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from deploy.cli import job_snapshots
from deploy.cli.connection import ServiceAddress, add_connection_options
from deploy.cli.job_snapshots import parse_job_reference
from deploy.terminal_text import print_text
from shards.errors import BadInput
from worker.job.options import LONGEST_S, MAX_COUNT

app = typer.Typer(
    help="Snapshots of a run or a job: list, verify, restore, compare, take or pin them.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


_OF_RUNS = "A run folder, a catalog of snapshots, or one snapshot such as RUN@400."
_OF_RUNS_OR_JOBS = (
    "A run folder, a catalog of snapshots, the id of a job of a service, or one snapshot such as"
    " RUN@400 or JOB@400."
)
Origin = Annotated[str, typer.Argument(help=_OF_RUNS, show_default=False)]
RunOrJob = Annotated[str, typer.Argument(help=_OF_RUNS_OR_JOBS, show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("ls")
@add_connection_options
def list_snapshots(service: ServiceAddress, origin: RunOrJob, as_json: AsJson = False) -> None:
    """List snapshots with their number, steps and size, the oldest first.

    Those of a run with their state, versions, time and alignment, too; those of a job with a mark
    if they are pinned.
    """
    if (reference := parse_job_reference(origin)) is not None:
        snapshots = job_snapshots.fetch_snapshots(service, reference)
        text = job_snapshots.format_snapshots(snapshots)
        print_text(msgspec.json.encode(snapshots) if as_json else text)
        return
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.snapshots import list_snapshots, list_text

    run = origin_of(origin)
    rows = list_snapshots(run)
    typer.echo(msgspec.json.encode(rows) if as_json else list_text(rows, run.place))


@app.command()
@add_connection_options
def verify(service: ServiceAddress, origin: RunOrJob) -> None:
    """Read every byte of one snapshot or of all, and name each bad file and chunk.

    The exit status is 1 if a snapshot is bad.
    """
    if (reference := parse_job_reference(origin)) is not None:
        verdicts = job_snapshots.verify_snapshots(service, reference)
    else:
        from deploy.run.snapshot_ref import origin_of
        from deploy.run.snapshots import verify_snapshots

        verdicts = verify_snapshots(origin_of(origin))
    good = True
    for number, complaints in verdicts:
        lines = [f"{number}  bad: {line}" for line in complaints] or [f"{number}  good"]
        print_text("\n".join(lines))
        good = good and not complaints
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
    from deploy.run.snapshots import restore_weights

    snapshot = restore_weights(origin_of(origin), output, solver)
    for complaint in snapshot.passed_over:
        typer.echo(f"skipped: {complaint}", err=True)
    typer.echo(f"{output}: the weights of {snapshot.place}")


@app.command()
@add_connection_options
def diff(
    service: ServiceAddress, first: RunOrJob, second: RunOrJob, as_json: AsJson = False
) -> None:
    """Compare two snapshots: how far each tensor moved, and what changed in the ledger."""
    pair = parse_job_reference(first), parse_job_reference(second)
    if pair[0] is not None and pair[1] is not None:
        answer = job_snapshots.compare_snapshots(service, pair[0], pair[1])
        text = job_snapshots.format_difference(answer)
        print_text(msgspec.json.encode(answer) if as_json else text)
        return
    from deploy.run.snapshot_ref import origin_of
    from deploy.run.snapshots import compare_snapshots, diff_text

    difference = compare_snapshots(origin_of(first), origin_of(second))
    typer.echo(msgspec.json.encode(difference) if as_json else diff_text(difference))


@app.command()
def take(
    origin: Annotated[str, typer.Argument(help="The folder of a running job.")],
    wait_s: Annotated[
        float, typer.Option(min=0.1, max=LONGEST_S, help="Seconds to wait for the snapshot.")
    ] = 60.0,
) -> None:
    """Take a snapshot of a run that is under way on this machine."""
    from deploy.run.requests import ask_run
    from deploy.run.snapshot_ref import origin_of
    from worker.job.run_control import SnapshotOrder

    typer.echo(ask_run(origin_of(origin), SnapshotOrder(), wait_s))


@app.command()
@add_connection_options
def pin(
    service: ServiceAddress,
    snapshot: Annotated[
        str, typer.Argument(help="A snapshot of a job, such as JOB@400.", show_default=False)
    ],
    off: Annotated[bool, typer.Option("--off", help="Release it again.")] = False,
    as_json: AsJson = False,
) -> None:
    """Keep a snapshot of a job from `service gc`."""
    reference = parse_job_reference(snapshot)
    if reference is None:
        raise BadInput(
            "pin",
            expected="a snapshot of a job, such as 1a209de6a45345f32@400",
            got=snapshot[:80],
        )
    numbers = job_snapshots.pin_snapshot(service, reference, pinned=not off)
    line = f"pinned: {', '.join(numbers) or 'none'}"
    print_text(msgspec.json.encode({"pinned": numbers}) if as_json else line)


@app.command()
def adopt(
    state: Annotated[
        Path, typer.Argument(help="A .solverstate or .solverstate.h5 file.", show_default=False)
    ],
    folder: Annotated[
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

    name = adopted(state, folder, solver, weights, data, workers)
    typer.echo(f"snapshot {folder}@{name}: downpour train --resume {folder}@{name}")
