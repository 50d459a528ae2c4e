"""The command `downpour`. Each subcommand reads its options, calls one function, and prints.

An error of ours is one line on standard error and exit status 1, and so is the system's, of a file
or a name that it refuses; a wrong option is Typer's, with 2.
"""

import sys
from pathlib import Path
from typing import Annotated

import typer

from deploy.cli_checkpoints import app as checkpoints
from deploy.cli_reshard import reshard
from deploy.cli_train import DATA, train
from ps.build import build_id
from ps.simulation.planting import registry
from ps.simulation.scenarios import Profile
from ps.simulation.setting import Cluster
from shards.errors import DownpourError

app = typer.Typer(
    name="downpour",
    help="Asynchronous parameter servers: Ray shards, Spark workers, bounded staleness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)

Net = Annotated[Path, typer.Option(help="The network, a Caffe prototxt.", show_default=False)]
Weights = Annotated[
    Path, typer.Option(help="A .caffemodel or .safetensors file.", show_default=False)
]
Data = Annotated[Path, typer.Option(help=DATA, show_default=False)]
Device = Annotated[
    str, typer.Option(help="What to compute on: cpu, gpu, gpu:N, or auto, a GPU if one answers.")
]


@app.command()
def test(
    solver: Annotated[Path, typer.Option(help="The solver, a Caffe prototxt.", show_default=False)],
    weights: Weights,
    data: Data,
    device: Device = "auto",  # noqa: PT028  # a command called test, no test
) -> None:
    """Print the loss and the accuracy of a network on test data.

    That is the data's test part; all its rows where it is not divided.
    """
    from deploy.infer import run_test

    figures = run_test(solver, weights, data, device)
    typer.echo("  ".join(f"{name} {value:.6g}" for name, value in figures.items()))


@app.command()
def features(
    net: Net,
    weights: Weights,
    data: Data,
    blobs: Annotated[
        str, typer.Option(help="Blob names, separated by commas.", show_default=False)
    ],
    output: Annotated[Path, typer.Option(help="The folder to make.", show_default=False)],
    split: Annotated[
        str | None,
        typer.Option(
            help="Which part of the data: train or test.", show_default="test, if it is divided"
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Rows a forward pass.")] = 100,
    device: Device = "auto",
) -> None:
    """Write a network's inner blobs for every row: a Parquet file with a column a blob."""
    from deploy.infer import run_features

    names = [name for name in blobs.split(",") if name]
    path, rows = run_features(net, weights, data, names, output, split, batch_size, device)
    typer.echo(f"{rows} rows of {', '.join(names)} in {path}")


@app.command()
def doctor(
    cluster: Annotated[
        Path,
        typer.Option(help="A running job's run folder, or its cluster file.", show_default=False),
    ],
    compute_ms: Annotated[
        float, typer.Option(min=0.001, help="Milliseconds that a worker computes for, a step.")
    ] = 100.0,
    link: Annotated[
        str | None,
        typer.Option(help="Measure behind a slow link, as for train.", show_default=False),
    ] = None,
    patience_s: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a silent shard is waited for.")
    ] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the links from here to a job's shards, and say what to set for them.

    Exit status 1 when a shard does not answer, or would refuse workers from here.
    """
    from deploy.doctor import diagnose, report
    from ps.wire.link_model import parse_link

    found = diagnose(
        cluster,
        compute_s=compute_ms / 1000,
        link=parse_link(link) if link is not None else None,
        patience_s=patience_s,
    )
    typer.echo(found.json() if as_json else report(found))
    if not found.healthy:
        raise typer.Exit(1)


@app.command()
def simulate(
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    seeds: Annotated[int, typer.Option(min=1, help="How many.")] = 1,
    profile: Annotated[
        Profile | None,
        typer.Option(
            help="How much goes wrong: what is promised to be survived, or more.",
            show_default="within; every fourth batch of several seeds is beyond",
        ),
    ] = None,
    cluster: Annotated[
        Cluster | None,
        typer.Option(help="The kind of cluster.", show_default="drawn by the seed"),
    ] = None,
    scenario: Annotated[
        Path | None, typer.Option(help="Play this file instead of seeds.", show_default=False)
    ] = None,
    bug: Annotated[
        str,
        typer.Option(help="Plant this bug; `list` names them.", show_default=False),
    ] = "",
    out: Annotated[Path, typer.Option(help="Where a failing run is written, made small.")] = Path(
        "scenario.toml"
    ),
    events: Annotated[bool, typer.Option("--events", help="Tell what happened when.")] = False,
) -> None:
    """Play the protocol on a virtual clock, with faults drawn from a seed.

    Exit status 1 when a promise is broken; the failing run is made small and written down.
    """
    from deploy.simulate import Asked, simulate

    if bug == "list":
        for name, planted in registry().items():
            typer.echo(f"{planted.cluster:10}  {name}")
        return
    asked = Asked(seed, seeds, profile, cluster, scenario, bug, out, events)
    if not simulate(asked, typer.echo):
        raise typer.Exit(1)


@app.command()
def version() -> None:
    """Print the version and the build id, which all parts of a cluster must share."""
    from importlib.metadata import version as installed

    typer.echo(f"downpour {installed('downpour-sgd')} build {build_id()}")


app.command()(reshard)
app.add_typer(checkpoints, name="checkpoints")


def main() -> None:
    """The entry point."""
    try:
        app(prog_name="downpour")
    except (DownpourError, OSError, UnicodeEncodeError) as error:
        sys.stderr.write(f"downpour: error: {_line(error)}\n")
        sys.exit(1)


def _line(error: DownpourError | OSError | UnicodeEncodeError) -> str:
    """What went wrong, and with what."""
    match error:
        case OSError(filename=str() | Path() as name):
            text = f"{name}: {error.strerror}"
        case UnicodeEncodeError():
            text = f"{error.object[:200]!r}: expected a name in UTF-8, got {error}"
        case _:
            text = str(error)
    return " ".join(text.split())
