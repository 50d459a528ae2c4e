"""The command `downpour`. Each subcommand reads its options, calls one function and prints.

Every error is one line on standard error. Exit status 2 means that the user has to change an
option, a file or an address; 1 means that something else went wrong.
"""

import errno
import os
import sys
from contextlib import suppress
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.core import TyperGroup

from deploy.cli.command_layout import lay_out
from deploy.cli.convert import convert
from deploy.cli.data import Skip
from deploy.cli.data import app as data_tools
from deploy.cli.deploy_commands import app as deploy_commands
from deploy.cli.experiments import app as experiments
from deploy.cli.jobs import add_to as add_jobs
from deploy.cli.pack import pack
from deploy.cli.plot import plot
from deploy.cli.prepare import prepare
from deploy.cli.reshard import reshard
from deploy.cli.service import add_to as add_service
from deploy.cli.simulate import simulate
from deploy.cli.snapshots import app as snapshots
from deploy.cli.train import train
from deploy.cli.usage_errors import USAGE_ERRORS, check_given, format_usage_error, in_options
from deploy.run.settings import DATA, FeatureFormat
from deploy.terminal_text import print_text
from ps import __version__
from ps.build_id import build_id
from ps.logs import LEVELS, LogSettings, set_up
from ps.transport.addresses import LAST_PORT
from shards.errors import BadInput, DownpourError
from shards.plurals import format_count
from worker.data.read_options import MAX_SKIPPED
from worker.job.options import LONGEST_S

app = typer.Typer(
    name="downpour",
    help="Asynchronous parameter servers: Ray shards, Spark workers, bounded staleness.",
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command()(train)
_COMPLETE = "_DOWNPOUR_COMPLETE"
_WRONG_PATHS = {
    errno.EACCES, errno.EISDIR, errno.ELOOP, errno.EEXIST, errno.EINVAL,
    errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS,
}  # fmt: skip
"""Error numbers of the operating system that mean that the user gave a wrong path."""


@app.callback(invoke_without_command=True)
def options(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Print the version and the build id.")
    ] = False,
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose",
            "-v",
            count=True,
            help="Log what happens; twice: in detail.",
            show_default=False,
        ),
    ] = 0,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log a JSON object a line.")] = False,
) -> None:
    set_up(LogSettings(LEVELS[min(verbose, 2)], log_json))
    if show_version:
        version()
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


Net = Annotated[Path, typer.Option(help="The network, a Caffe prototxt.", show_default=False)]
Weights = Annotated[
    Path, typer.Option(help="A .caffemodel, .h5 or .safetensors file.", show_default=False)
]
Data = Annotated[
    Path | None, typer.Option(help=DATA, show_default="the sources that the net's data layers name")
]
Device = Annotated[
    str, typer.Option(help="What to compute on: cpu, gpu, gpu:N, or auto (a GPU if one answers).")
]
Spark = Annotated[
    str | None,
    typer.Option(
        help="Compute as tasks of a Spark: local[N], spark://HOST:PORT, yarn, k8s://HOST:PORT or"
        " sc://HOST:PORT.",
        show_default="in this process",
    ),
]
Tasks = Annotated[
    int,
    typer.Option(
        "--workers",
        min=1,
        max=LAST_PORT,
        help="With --spark: tasks that read --data, each its own part.",
    ),
]


@app.command()
def test(
    solver: Annotated[Path, typer.Option(help="The solver, a Caffe prototxt.", show_default=False)],
    weights: Weights,
    data: Data = None,  # noqa: PT028  # a command called test, no test
    device: Device = "auto",  # noqa: PT028  # a command called test, no test
    spark: Spark = None,  # noqa: PT028  # a command called test, no test
    workers: Tasks = 2,  # noqa: PT028  # a command called test, no test
    skip: Skip = MAX_SKIPPED,  # noqa: PT028  # a command called test, no test
) -> None:
    """Print the loss and the accuracy of a solver's test nets on test data.

    Test data is the test part of --data, or all its rows if it has no parts. Without --data, it is
    what each test net's data layers name.
    """
    from deploy.run.infer import OnSpark, run_test
    from worker.training.evaluation import in_words

    on = None if spark is None else OnSpark(spark, workers)
    figures = run_test(solver, weights, data, device, on, skip)
    typer.echo(in_words(figures))


@app.command()
def features(
    net: Net,
    weights: Weights,
    blobs: Annotated[
        str, typer.Option(help="Blob names, separated by commas.", show_default=False)
    ],
    output: Annotated[
        str,
        typer.Option(help="The folder to create; with --spark also a URI.", show_default=False),
    ],
    data: Data = None,
    split: Annotated[
        str | None,
        typer.Option(
            help="Which part of the data to use: train or test.",
            show_default="test, if it is divided",
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, max=2**31 - 1, help="Rows in each forward pass.")
    ] = 100,
    device: Device = "auto",
    form: Annotated[
        FeatureFormat, typer.Option("--format", help="The file's format: parquet or json.")
    ] = FeatureFormat.PARQUET,
    spark: Spark = None,
    workers: Tasks = 2,
    skip: Skip = MAX_SKIPPED,
) -> None:
    """Write a network's inner blobs for every row to a file, one column for each blob.

    With --spark each task writes a file of its own.
    """
    from deploy.run.infer import OnSpark, run_features

    names = [name for name in blobs.split(",") if name]
    on = None if spark is None else OnSpark(spark, workers)
    path, rows = run_features(
        net, weights, data, names, output, split, batch_size, device, form, on, skip
    )
    typer.echo(f"{format_count(rows, 'row')} of {', '.join(names)} in {path}")


app.command()(convert)
app.command()(plot)


@app.command()
def doctor(
    cluster: Annotated[
        Path,
        typer.Option(
            help="The run folder of a running job, or its cluster file.", show_default=False
        ),
    ],
    compute_ms: Annotated[
        list[float],
        typer.Option(
            min=0.001,
            max=1e9,
            help="Milliseconds that a worker computes for in each step; again for each worker of"
            " another speed.",
        ),
    ] = [100.0],  # noqa: B006  # Typer takes no tuple of any length
    link: Annotated[
        str | None,
        typer.Option(
            help="Measure behind an emulated slow link, as in `downpour train --link`.",
            show_default=False,
        ),
    ] = None,
    patience_s: Annotated[
        float,
        typer.Option(min=0.1, max=LONGEST_S, help="Seconds to wait for a silent shard."),
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the links from here to a job's shards, and recommend settings for them.

    The exit status is 1 if a shard does not answer, or would refuse workers from here.
    """
    from deploy.doctor.advice import diagnose, report
    from ps.transport.link_model import parse_link

    diagnosis = diagnose(
        cluster,
        compute_s=[milliseconds / 1000 for milliseconds in compute_ms],
        link=parse_link(link) if link is not None else None,
        patience_s=patience_s,
    )
    typer.echo(diagnosis.json() if as_json else report(diagnosis))
    if not diagnosis.healthy:
        raise typer.Exit(1)


app.command()(simulate)


@app.command()
def version() -> None:
    """Print the version and the build id, which the processes of a run must share."""
    typer.echo(f"downpour {__version__} build {build_id()}")


app.command()(reshard)
app.command()(pack)
app.command()(prepare)
app.add_typer(snapshots, name="snapshots")
app.add_typer(data_tools, name="data")
app.add_typer(experiments, name="exp")
app.add_typer(deploy_commands, name="deploy")
add_service(app)
add_jobs(app)


class CompletedShell(StrEnum):
    """A shell for which there is a script."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


@app.command()
def completion(
    shell: Annotated[CompletedShell, typer.Argument(help="Your shell.", show_default=False)],
) -> None:
    """Print a script with which a shell completes commands and options."""
    from typer._completion_shared import get_completion_script

    script = get_completion_script(prog_name="downpour", complete_var=_COMPLETE, shell=shell)
    typer.echo(script)


@cache
def command_line() -> TyperGroup:
    """All commands, as the help lists them; to build them takes a tenth of a second."""
    group = typer.main.get_command(app)
    assert isinstance(group, TyperGroup)
    return lay_out(group)


def main() -> None:
    """The entry point of the command `downpour`."""
    if _COMPLETE in os.environ:  # a shell asks, by the script that `completion` prints
        from typer._completion_classes import completion_init

        completion_init()
    try:
        check_given(sys.argv[1:])
        sys.exit(command_line()(prog_name="downpour", standalone_mode=False))
    except USAGE_ERRORS as error:
        _fail(format_usage_error(error), 2)
    except (DownpourError, OSError, UnicodeEncodeError) as error:
        _fail(in_options(_line(error)), 2 if _is_input(error) else 1)


def _fail(line: str, status: int) -> NoReturn:
    with suppress(OSError):  # A closed terminal.
        print_text(f"downpour: error: {' '.join(line.split())}", err=True)
    sys.exit(status)


def _is_input(error: Exception) -> bool:
    """Return whether the user can correct the error with another option, file or address."""
    return isinstance(error, BadInput | UnicodeEncodeError) or (
        isinstance(error, OSError) and error.errno in _WRONG_PATHS
    )


def _line(error: DownpourError | OSError | UnicodeEncodeError) -> str:
    """The text of an error, including the file or the name that it is about."""
    match error:
        case OSError(filename=str() | Path() as name):
            return f"{name}: {error.strerror}"
        case UnicodeEncodeError():
            return f"{error.object[:200]!r}: expected a name in UTF-8, got {error}"
        case _:
            return str(error)
