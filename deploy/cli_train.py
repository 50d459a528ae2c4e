"""`downpour train`: its options, and how they become the settings of a new or resumed run.

An option that is not given is left open: a resumed run keeps its earlier value, and a new run takes
the default.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import fields, replace

from cupy_kernels.types import Precision
from deploy.settings import NO_BOUND, TrainSettings, parse_staleness
from ps.durability import Durability
from ps.launch.launch_plan import ShardDevice
from ps.launch.launcher import Placement
from ps.session.compression import PULLS, PUSHES
from ps.transport.local_sockets import Transport
from shards.errors import BadInput
from worker.job import DEFAULT_SEED
from worker.signals import sigterm_too
from worker.strategies import STRATEGIES, Downpour, strategy_named

if TYPE_CHECKING:
    from deploy.snapshot_ref import SnapshotRef
    from deploy.summary import Summary

DATA = "A folder of MNIST IDX files, or a Parquet file or folder with columns label and image."
"""Help text: the kinds of data that a command reads."""

_RUN, _LEARN, _PLACE = "The run", "How it learns", "Where it runs"

_SEED = f"the solver's random_seed, or {DEFAULT_SEED}"
_DEFAULTS = {field.name: field.default for field in fields(TrainSettings)}
_DEFAULTS |= {field.name: field.default for field in fields(Downpour)}


def _option(text: str, panel: str, default: object = None) -> Any:
    """An option; its help text ends in the `default` that applies if it is not given.

    Typer cannot show that default itself: its own default is None, for "not given".
    """
    shown = text if default is None else rf"{text} \[default: {default}]"
    return typer.Option(help=shown, rich_help_panel=panel, show_default=False)


def train(
    solver: Annotated[Path | None, _option("The solver, a Caffe prototxt.", _RUN)] = None,
    data: Annotated[Path | None, _option(DATA, _RUN)] = None,
    out: Annotated[Path | None, _option("The run folder to make.", _RUN)] = None,
    resume: Annotated[
        str | None,
        _option(
            "A run folder: continue that run, with its settings, from its newest good snapshot."
            " With --out: start a new run from RUN@NUMBER, a place of snapshots, or one of them.",
            _RUN,
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        _option(
            "With --resume: reset this option to its default, e.g. `--unset ray`. Repeatable.",
            _RUN,
        ),
    ] = None,
    test_data: Annotated[
        Path | None, _option("Data to test on, if not the test part of --data.", _RUN)
    ] = None,
    weights: Annotated[
        Path | None,
        _option("Weights to start from, found by layer name: .caffemodel or .safetensors.", _RUN),
    ] = None,
    snapshots: Annotated[
        str | None,
        _option(
            "Where snapshots go: a folder, or a URI such as s3://bucket/run.",
            _RUN,
            "the run folder",
        ),
    ] = None,
    snapshot_every: Annotated[
        str | None,
        _option(
            "Iterations between snapshots, such as 500, or a time, such as 30s or 5m.",
            _RUN,
            "the solver's snapshot",
        ),
    ] = None,
    snapshot_aligned: Annotated[
        bool | None,
        typer.Option(
            "--snapshot-aligned/--no-snapshot-aligned",
            help=r"Quiesce the shards for a snapshot, so that all hold the same pushes."
            r" \[default: no]",
            rich_help_panel=_RUN,
            show_default=False,
        ),
    ] = None,
    snapshot_keep: Annotated[
        int | None, _option("How many of the newest snapshots to keep.", _RUN, "all")
    ] = None,
    snapshot_keep_for: Annotated[
        str | None,
        _option(
            "How long to keep snapshots, such as 12h or 7d; the newest is always kept.",
            _RUN,
            "for ever",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        _option(
            "Workers: Spark tasks, each on its own part of the data.",
            _LEARN,
            _DEFAULTS["workers"],
        ),
    ] = None,
    shards: Annotated[
        int | None, _option("Parameter servers.", _LEARN, _DEFAULTS["shards"])
    ] = None,
    staleness: Annotated[
        str | None,
        _option(
            f"Steps the fastest worker may be ahead of the slowest, or {NO_BOUND}.",
            _LEARN,
            f"{_DEFAULTS['staleness']}; 0 for a strategy in rounds",
        ),
    ] = None,
    strategy: Annotated[
        str | None,
        _option(
            f"One of {', '.join(sorted(STRATEGIES))}, with options as in diloco:h=50.",
            _LEARN,
            _DEFAULTS["strategy"],
        ),
    ] = None,
    n_push: Annotated[
        int | None,
        _option("Steps a worker accumulates before it pushes.", _LEARN, _DEFAULTS["n_push"]),
    ] = None,
    n_fetch: Annotated[
        int | None, _option("Steps between a worker's fetches.", _LEARN, _DEFAULTS["n_fetch"])
    ] = None,
    warm_steps: Annotated[
        int | None,
        _option("Steps one worker takes alone at first.", _LEARN, _DEFAULTS["warm_steps"]),
    ] = None,
    prefetch: Annotated[
        bool | None,
        typer.Option(
            "--prefetch/--no-prefetch",
            help=r"Pull the next weights while computing, for slow links. \[default: no]",
            rich_help_panel=_LEARN,
            show_default=False,
        ),
    ] = None,
    shuffle: Annotated[
        bool | None,
        typer.Option(
            "--shuffle/--no-shuffle",
            help=r"Shuffle every epoch, by the seed. \[default: yes]",
            rich_help_panel=_LEARN,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None,
        _option("The seed of everything random.", _LEARN, _SEED),
    ] = None,
    max_iter: Annotated[
        int | None, _option("Steps of each worker.", _LEARN, "the solver's max_iter")
    ] = None,
    shards_in: Annotated[
        Placement | None,
        _option(
            "Where the shards run: ray (in Ray actors), or processes (on this machine).",
            _PLACE,
            _DEFAULTS["shards_in"],
        ),
    ] = None,
    shard_device: Annotated[
        ShardDevice | None,
        _option(
            "What stores the shards' weights and updates them: cpu or gpu.",
            _PLACE,
            _DEFAULTS["shard_device"],
        ),
    ] = None,
    ray: Annotated[
        str | None,
        _option("A running Ray: HOST:PORT, ray://HOST:PORT or auto.", _PLACE, "one of its own"),
    ] = None,
    spark: Annotated[
        str | None,
        _option(
            "A running Spark: spark://HOST:PORT, yarn, k8s://HOST:PORT or sc://HOST:PORT.",
            _PLACE,
            "one of its own",
        ),
    ] = None,
    bind: Annotated[
        str | None, _option("The IPv4 address that shards listen on.", _PLACE, _DEFAULTS["bind"])
    ] = None,
    port: Annotated[
        int | None, _option("The first shard's port; each further one is 1 higher.", _PLACE, "any")
    ] = None,
    plaintext: Annotated[
        bool | None,
        typer.Option(
            "--plaintext",
            help="Leave out encryption and keys where --bind is beyond loopback.",
            rich_help_panel=_PLACE,
        ),
    ] = None,
    lease_s: Annotated[
        float | None,
        _option(
            "Seconds after which the other workers no longer wait for a silent one.",
            _PLACE,
            f"{_DEFAULTS['lease_s']:g}",
        ),
    ] = None,
    device: Annotated[
        str | None,
        _option(
            "What each worker computes on: cpu, gpu (one of its own), gpu:N, or auto (a GPU where"
            " one answers).",
            _PLACE,
            "auto; cpu with the solver's solver_mode: CPU",
        ),
    ] = None,
    precision: Annotated[
        Precision | None,
        _option(
            "What a GPU rounds the factors of products to: fp32 (not at all), tf32 or bf16.",
            _PLACE,
            _DEFAULTS["precision"],
        ),
    ] = None,
    transport: Annotated[
        Transport | None,
        _option(
            "What carries weights and gradients within one host: shm (shared memory), ipc (a Unix"
            " socket), tcp, or auto (the best that works).",
            _PLACE,
            _DEFAULTS["transport"],
        ),
    ] = None,
    link: Annotated[
        str | None,
        _option(
            "Put each worker behind an emulated slow link: rtt=100ms,jitter=10ms,rate=1Gbit,"
            "loss=0.1%,outage=2s/60s.",
            _PLACE,
        ),
    ] = None,
    compress: Annotated[
        str | None,
        _option(
            f"Compression of pushes: {PUSHES}; append ,zstd to add zstd.",
            _PLACE,
            _DEFAULTS["compress"],
        ),
    ] = None,
    compress_pull: Annotated[
        str | None,
        _option(
            f"Compression of pulled weights: {PULLS}.",
            _PLACE,
            _DEFAULTS["compress_pull"],
        ),
    ] = None,
    durability: Annotated[
        Durability | None,
        _option(
            "What survives the death of a shard. memory: its last autosave; process: every"
            " acknowledged push; logged: the same, also after a power failure; replicated: every"
            " acknowledged push, without a pause, thanks to a second copy. `process` and `logged`"
            " write logs.",
            _PLACE,
            _DEFAULTS["durability"],
        ),
    ] = None,
    silence_s: Annotated[
        float | None,
        _option(
            "Seconds of silence after which a copy of a replicated shard counts as dead; give more"
            " on a machine that sometimes stalls.",
            _PLACE,
            f"{_DEFAULTS['silence_s']:g}",
        ),
    ] = None,
    rollback_s: Annotated[
        float | None,
        _option(
            "Seconds of pushes that a shard at durability memory loses at most when it dies; 0:"
            " its death ends the run.",
            _PLACE,
            f"{_DEFAULTS['rollback_s']:g}",
        ),
    ] = None,
    logs: Annotated[
        Path | None,
        _option(
            "The folder for the log of a shard, on the shard's own machine.",
            _PLACE,
            "the run folder",
        ),
    ] = None,
) -> None:
    """Train a network: start shards and workers, show progress, and leave a run folder.

    Ctrl-C stops the run cleanly and leaves a snapshot.
    """
    given = {name: value for name, value in locals().items() if value is not None}
    for name in ("resume", "unset"):
        given.pop(name, None)
    from deploy.snapshot_ref import origin_of
    from deploy.train import Finished, run

    origin = origin_of(resume) if resume is not None else None
    settings, dropped = _settings(given, origin, unset or [])
    for line in dropped:
        typer.echo(line, err=True)
    try:
        with sigterm_too():
            summary = run(settings, origin=origin)
    except Finished as finished:
        typer.echo(str(finished))
        return
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(130) from None
    if summary is None:
        typer.echo(f"stopped; continue with: downpour train --resume {settings.out}")
        raise typer.Exit(130)
    typer.echo(_result(summary, settings.out))


def _result(summary: "Summary", out: Path) -> str:
    """The result of a run, in one line."""
    tested = summary.test_accuracy is not None
    accuracy = f"test accuracy {summary.test_accuracy:.2%}, " if tested else ""
    return f"{accuracy}{summary.updates} updates in {summary.seconds:.0f} s; see {out}"


def _settings(
    given: dict[str, object], origin: "SnapshotRef | None", unset: Sequence[str]
) -> tuple[TrainSettings, list[str]]:
    """The settings, and one line for each option of the earlier run that no longer applies.

    An option that is given wins over the earlier run's value, and that over the default.
    """
    if "staleness" in given:
        given["staleness"] = parse_staleness(str(given["staleness"]))
    elif "strategy" in given and "staleness" not in unset:
        given["staleness"] = strategy_named(str(given["strategy"])).usual_bound
    given |= {name: value.absolute() for name, value in given.items() if isinstance(value, Path)}
    where = given.get("snapshots")
    if isinstance(where, str) and "://" not in where:
        given["snapshots"] = str(Path(where).absolute())
    if unset and (origin is None or origin.run is None):
        raise BadInput(f"--unset {unset[0]}: expected --resume with an earlier run, got none")
    if origin is None:
        return _fresh(given, "or --resume with an earlier run; got neither"), []
    if "weights" in given:
        raise BadInput("train: expected --weights or --resume, got both")
    if origin.run is None:
        return _fresh(given, "as --resume names no run folder; got none"), []
    from deploy.resume_settings import resumed
    from deploy.run_folder import SETTINGS

    earlier = TrainSettings.load(origin.run / SETTINGS)
    if origin.name is not None:
        if "out" not in given:
            raise BadInput(
                f"train: expected --out for the new run that starts from {origin.place}"
                f" at {origin.name}; got none"
            )
        return resumed(replace(earlier, weights=None, snapshots=None, logs=None), given, unset)
    if "out" in given:
        raise BadInput(
            "train: expected --out or --resume, got both; start a new run with --resume RUN@NUMBER"
        )
    if "snapshots" in [*given, *unset]:
        raise BadInput("train: expected --snapshots or --resume, got both")
    return resumed(earlier, given | {"out": origin.run}, unset)


def _fresh(given: dict[str, object], otherwise: str) -> TrainSettings:
    for name in ("solver", "data", "out"):
        if name not in given:
            raise BadInput(f"train: expected --{name}, {otherwise}")
    return TrainSettings(**given)  # type: ignore[arg-type]
