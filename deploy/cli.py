"""The command `downpour`. Each subcommand reads its options, calls one function, and prints.

An error of ours is one line on standard error and exit status 1; a wrong option is Typer's, with 2.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from deploy.settings import NO_BOUND, TrainSettings, parse_staleness
from ps.build import build_id
from shards.errors import BadInput, DownpourError
from worker.strategies import STRATEGIES

if TYPE_CHECKING:
    from deploy.summary import Summary

app = typer.Typer(
    name="downpour",
    help="Asynchronous parameter servers: Ray shards, Spark workers, bounded staleness.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Net = Annotated[Path, typer.Option(help="The network, a Caffe prototxt.", show_default=False)]
Weights = Annotated[
    Path, typer.Option(help="A .caffemodel or .safetensors file.", show_default=False)
]
Data = Annotated[
    Path,
    typer.Option(
        help="A folder of MNIST IDX files, or a Parquet file or folder with the columns label and"
        " image or data.",
        show_default=False,
    ),
]


@app.command()
def train(
    solver: Annotated[
        Path | None, typer.Option(help="The solver, a Caffe prototxt.", show_default=False)
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="A folder of MNIST IDX files, or a Parquet file or folder with the columns label"
            " and image or data.",
            show_default=False,
        ),
    ] = None,
    test_data: Annotated[
        Path | None, typer.Option(help="What to test on, where --data holds no test set.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The run folder to make.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="A run folder to go on from, with its settings, from its newest snapshot."
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights to start from, by layer name: fine-tuning.", show_default=False),
    ] = None,
    shards: Annotated[int | None, typer.Option(help="Parameter servers.  [default: 1]")] = None,
    workers: Annotated[int | None, typer.Option(help="Model replicas.  [default: 2]")] = None,
    staleness: Annotated[
        str | None,
        typer.Option(
            help=f"Steps the fastest worker may be ahead, or {NO_BOUND}.  [default: 4; bsp: 0]"
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(sorted(STRATEGIES))}.  [default: downpour]"),
    ] = None,
    n_push: Annotated[
        int | None, typer.Option(help="Steps a worker accumulates before it pushes.  [default: 1]")
    ] = None,
    n_fetch: Annotated[
        int | None, typer.Option(help="Steps between a worker's fetches.  [default: 1]")
    ] = None,
    warm_steps: Annotated[
        int | None, typer.Option(help="Steps one replica takes alone at first.  [default: 0]")
    ] = None,
    prefetch: Annotated[
        bool | None,
        typer.Option(
            "--prefetch/--no-prefetch",
            help="Ask for the next weights while computing, for slow links.",
            show_default=False,
        ),
    ] = None,
    shuffle: Annotated[
        bool | None,
        typer.Option(
            "--shuffle/--no-shuffle", help="Shuffle every epoch by seed.", show_default=False
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Decides all that is random.  [default: 1]")
    ] = None,
    max_iter: Annotated[
        int | None, typer.Option(help="Steps a worker takes, in place of the solver's.")
    ] = None,
    lease_s: Annotated[
        float | None,
        typer.Option(help="Seconds a silent worker is still waited for.  [default: 10]"),
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="A running Ray, HOST:PORT, in place of an embedded one.")
    ] = None,
    spark: Annotated[
        str | None,
        typer.Option(help="A running Spark: spark://HOST:PORT, yarn, k8s://..., sc://HOST:PORT."),
    ] = None,
    bind: Annotated[
        str | None, typer.Option(help="The host shards listen on.  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(help="The first shard's port, the next one's is one higher.  [default: any]"),
    ] = None,
    plaintext: Annotated[
        bool | None,
        typer.Option("--plaintext", help="Allow --bind beyond loopback without encryption."),
    ] = None,
) -> None:
    """Train a network: starts the shards and the workers, shows progress, leaves a run folder.

    Ctrl-C stops cleanly and leaves a snapshot.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    given.pop("resume", None)
    from deploy.train import run

    settings = _settings(given, resume)
    summary = run(settings, resuming=resume is not None)
    if summary is None:
        typer.echo(f"stopped; go on with: downpour train --resume {settings.out}")
        raise typer.Exit(130)
    typer.echo(_result(summary, settings.out))


@app.command()
def test(
    solver: Annotated[Path, typer.Option(help="The solver, a Caffe prototxt.", show_default=False)],
    weights: Weights,
    data: Data,
) -> None:
    """Print the loss and the accuracy of a network on the whole test set."""
    from deploy.infer import run_test

    figures = run_test(solver, weights, data)
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
    split: Annotated[str, typer.Option(help="Which part of the data: train or test.")] = "test",
    batch_size: Annotated[int, typer.Option(help="Rows a forward pass.", min=1)] = 100,
) -> None:
    """Write a network's inner blobs for every row: a Parquet file with a column a blob."""
    from deploy.infer import run_features

    names = [name for name in blobs.split(",") if name]
    path, rows = run_features(net, weights, data, names, output, split, batch_size)
    typer.echo(f"{rows} rows of {', '.join(names)} in {path}")


@app.command()
def version() -> None:
    """Print the version and the build id, which all parts of a cluster must share."""
    from importlib.metadata import version as installed

    typer.echo(f"downpour {installed('downpour-sgd')} build {build_id()}")


def _result(summary: "Summary", out: Path) -> str:
    """What a run came to, in one line."""
    tested = summary.test_accuracy is not None
    accuracy = f"test accuracy {summary.test_accuracy:.2%}, " if tested else ""
    return f"{accuracy}{summary.updates} updates in {summary.seconds:.0f} s; see {out}"


def _settings(given: dict[str, object], resume: Path | None) -> TrainSettings:
    """What the options say, over what the run to resume was told, over the defaults."""
    if "staleness" in given:
        given["staleness"] = parse_staleness(str(given["staleness"]))
    elif given.get("strategy") == "bsp":
        given["staleness"] = 0
    given |= {name: value.absolute() for name, value in given.items() if isinstance(value, Path)}
    if resume is not None:
        from deploy.run_folder import SETTINGS

        earlier = TrainSettings.load(resume / SETTINGS)
        return msgspec.structs.replace(earlier, **({"out": resume.absolute()} | given))
    for name in ("solver", "data", "out"):
        if name not in given:
            raise BadInput(
                f"train: expected --{name}, or --resume with an earlier run; got neither"
            )
    return TrainSettings(**given)  # type: ignore[arg-type]


def main() -> None:
    """The entry point."""
    try:
        app()
    except DownpourError as error:
        sys.stderr.write(f"downpour: error: {error}\n")
        sys.exit(1)
