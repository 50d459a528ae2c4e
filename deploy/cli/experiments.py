"""`downpour exp`: the staleness experiments. They are loaded when a command runs."""

from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ps.launch.launcher import Placement
from shards.errors import BadInput

if TYPE_CHECKING:
    from deploy.experiments.sweeps import Sweep

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
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Print the number of trials and minutes, and what a sweep leaves out, and end.",
    ),
]


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
    registration: Annotated[
        int | None,
        typer.Option(help="Which of its registrations to run, from 1.", show_default="the newest"),
    ] = None,
    jobs: Jobs = 1,
    out: Annotated[
        Path | None,
        typer.Option(
            help="A folder to keep the outcome in, for `exp report`, and each trial as soon as it"
            " is done: the same command continues there.",
            show_default=False,
        ),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Run a shape of the literature; the last line is its verdict and the published figure.

    With --control the exit status is 1 if it does not come out as not reproduced.
    """
    from deploy.experiments.shapes import shape_numbered
    from deploy.experiments.shapes.base import Preset, ShapeVerdict, keep, play
    from deploy.experiments.shapes.plan import plan_of

    shape = shape_numbered(number)
    if dry_run:
        plan = plan_of(shape, Preset(preset), control=control, registration=registration)
        more = f", about {plan.tuning} more to choose rates" if plan.tuning else ""
        minutes = plan.cpu_s / 60 / jobs
        typer.echo(f"shape {number}: {plan.trials} trials{more}, about {minutes:.1f} minutes")
        return
    outcome = play(
        shape,
        Preset(preset),
        control=control,
        jobs=jobs,
        note=typer.echo,
        out=out,
        registration=registration,
    )
    for line in outcome.lines():
        typer.echo(line)
    if out is not None:
        keep(outcome, out)
    if control and outcome.verdict is not ShapeVerdict.NOT_REPRODUCED:
        raise typer.Exit(1)


@app.command()
def real(
    number: Annotated[int, typer.Argument(help="The shape, as `exp list` numbers them.")],
    shards_in: Annotated[
        Placement, typer.Option("--shards-in", help="What the shard runs in: ray or processes.")
    ] = Placement.RAY,
    stretch: Annotated[
        float,
        typer.Option(
            min=0.1, max=100, help="Times as long steps and round trips, for a busy machine."
        ),
    ] = 1.0,
    out: Annotated[
        Path | None,
        typer.Option(help="A new run folder for the record, for `exp import`.", show_default=False),
    ] = None,
) -> None:
    """Run a small trial of a shape with a shard in Ray and workers in Spark, and simulate it.

    Prints whether staleness and error agree: distances of at most .05 (Kolmogorov) and .25
    (Wasserstein), errors within .5 points. The exit status is 1 if they do not.
    """
    from deploy.clusters.java import spark_environment
    from deploy.experiments.shapes.real_trials import real_trial
    from deploy.experiments.spark_runs import compare_with_spark, write_run
    from worker import spark

    trial = real_trial(number, stretch)
    if out is not None and out.exists():
        raise BadInput(out, expected="a new folder", got="one that is there")
    with ExitStack() as stack:
        if shards_in is Placement.RAY:
            from deploy.clusters.ray_cluster import connect

            stack.enter_context(connect(None, cpus=trial.cluster.shards))
        session = stack.enter_context(
            spark.start_session(None, trial.cluster.workers, app="exp", env=spark_environment())
        )
        comparison = compare_with_spark(trial, session, shards_in)
    typer.echo(f"shape {number}, {trial.strategy}: {comparison}")
    if out is not None:
        write_run(comparison, out)
    if not comparison.agrees:
        raise typer.Exit(1)


@app.command("list")
def show_shapes() -> None:
    """List the shapes."""
    from deploy.experiments.shapes import SHAPES

    for number, shape in sorted(SHAPES.items()):
        typer.echo(f"{number:3}  {shape.title} ({shape.source})")


SweepFile = Annotated[Path, typer.Argument(help="The sweep, a TOML file.", show_default=False)]
SweepFolder = Annotated[Path, typer.Argument(help="The folder of a sweep.", show_default=False)]


@app.command()
def run(
    sweep: SweepFile,
    out: Annotated[
        Path | None,
        typer.Option(help="The folder of its results.", show_default="runs/experiments/NAME"),
    ] = None,
    jobs: Jobs = 1,
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Allow more than 10,000 trials.")] = False,
) -> None:
    """Run a sweep; one that was killed continues with the trials that are not done.

    The exit status is 1 if a trial failed or one of the sweep's rules, `[[expect]]`, did not hold.
    """
    from deploy.experiments.runner import estimate_s
    from deploy.experiments.sweeps import read_sweep

    experiment = read_sweep(sweep, consent=yes)
    folder = out or Path("runs") / "experiments" / experiment.name
    if dry_run:
        minutes = estimate_s(experiment, folder) / 60 / jobs
        rates = f", rates of {len(experiment.levels)} levels to choose" if experiment.levels else ""
        count = sum(len(point.trials) for point in experiment.points)
        for combination in experiment.left_out:
            typer.echo(f"left out: {combination.label}: {combination.reason}")
        typer.echo(f"{count} trials in {folder}, about {minutes:.1f} minutes to go{rates}")
        return
    if experiment.left_out:
        typer.echo(
            f"{len(experiment.left_out)} of"
            f" {len(experiment.left_out) + len(experiment.points)} combinations are left out,"
            " which --dry-run lists"
        )
    _finish(experiment, folder, jobs)


@app.command()
def resume(folder: SweepFolder, jobs: Jobs = 1) -> None:
    """Continue a sweep from its folder; the exit status is that of `exp run`."""
    from deploy.experiments.runner import Folder
    from deploy.experiments.sweeps import read_sweep

    _finish(read_sweep(Folder(folder).sweep, consent=True), folder, jobs)


def _finish(sweep: "Sweep", folder: Path, jobs: int) -> None:
    """Run what is left of a sweep, and judge its rules."""
    from deploy.experiments.accept_rules import ExpectationVerdict
    from deploy.experiments.runner import judge_sweep, run_sweep
    from deploy.experiments.sweep_tuning import tune_sweep

    sweep = tune_sweep(sweep, folder, jobs=jobs, note=typer.echo)
    status = run_sweep(sweep, folder, jobs=jobs, note=typer.echo)
    judged = judge_sweep(sweep, folder)
    for judgement in judged:
        typer.echo(judgement)
    typer.echo(f"{folder}: {status}")
    if status.failed or any(
        judgement.verdict is not ExpectationVerdict.HELD for judgement in judged
    ):
        raise typer.Exit(1)


@app.command()
def status(folder: SweepFolder) -> None:
    """Print how many trials of a sweep are done, failed and left."""
    from deploy.experiments.runner import Folder
    from deploy.experiments.sweeps import read_sweep

    sweep_folder = Folder(folder)
    typer.echo(f"{folder}: {sweep_folder.status(read_sweep(sweep_folder.sweep, consent=True))}")


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="The folder of a sweep, of shapes or of imported runs.", show_default=False
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="The page to write.", show_default="FOLDER/report.html")
    ] = None,
    table: Annotated[
        Path | None,
        typer.Option(help="A CSV file for the trials, a row each.", show_default=False),
    ] = None,
    figures: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="A folder for the pictures, an SVG file each.", show_default=False
        ),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="The error in percent that the points of a sweep are timed to.",
            show_default="until_error, or 1.2 times the least at the end",
        ),
    ] = None,
) -> None:
    """Write one HTML page with tables, curves, verdicts and every trial.

    The best points of a sweep stand at its top, by the time to an error.
    """
    from deploy.experiments.report import write_report
    from deploy.experiments.trial_table import write_table

    page = out or folder / "report.html"
    size = write_report(folder, page, figures=figures, target=target)
    typer.echo(f"{page}: {size / 1e6:.2f} MB")
    if table is not None:
        typer.echo(f"{table}: {write_table(folder, table)} trials")


@app.command()
def compare(
    first: Annotated[
        Path,
        typer.Argument(help="The folder of a sweep or of imported runs.", show_default=False),
    ],
    second: Annotated[
        Path | None,
        typer.Argument(help="The folder of another; none: FIRST's real runs.", show_default=False),
    ] = None,
) -> None:
    """Print what the second of two experiments changes, for each point that both have.

    With one folder: how its real runs differ from its simulated trials.
    """
    from deploy.experiments.comparison import compare_experiments

    for line in compare_experiments(first, second):
        typer.echo(line)


@app.command("import")
def import_run(
    run: Annotated[
        Path, typer.Argument(help="A run folder, or its updates.parquet.", show_default=False)
    ],
    folder: Annotated[
        Path, typer.Argument(help="The experiment's folder, new or not.", show_default=False)
    ],
    point: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE", help="A value of its point; repeatable.", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Its name there.", show_default="that of the run folder")
    ] = None,
) -> None:
    """Make a finished run a trial of an experiment, with its record, for compare, report and fit.

    In the folder of a sweep, the values select one of its points.
    """
    from deploy.experiments.imported_runs import import_run as imported
    from deploy.experiments.imported_runs import point_values

    imported_run = imported(run, folder, point_values(point or []), name)
    result = imported_run.result
    typer.echo(
        f"{folder}: {imported_run.name}: {result.updates} updates of {result.trial.cluster.workers}"
        f" workers, staleness {result.mean_staleness:.2f}, {result.seconds:.1f} s"
    )


@app.command()
def fit(
    run: Annotated[
        Path,
        typer.Argument(
            help="A run folder, its updates.parquet, or an imported run's.", show_default=False
        ),
    ],
) -> None:
    """Fit step times and links to a real run; prints how well, and a sweep's cluster section."""
    from deploy.experiments.calibration import fit_run

    fit = fit_run(run)
    typer.echo(f"# {fit.quality}")
    typer.echo(fit.section)


@app.command()
def advise(
    run: Annotated[
        Path | None,
        typer.Argument(
            help="A run folder, its updates.parquet, or an imported run's.", show_default=False
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, max=4096, help="Without RUN: the workers.", show_default=False),
    ] = None,
    step_s: Annotated[
        float | None,
        typer.Option(min=0, help="Without RUN: the seconds of a step.", show_default=False),
    ] = None,
    link: Annotated[
        str, typer.Option(help="Without RUN: the link, as for train.", show_default="none")
    ] = "",
    workload: Annotated[
        str, typer.Option(help="The problem to compare on, also my_module:Problem.")
    ] = "mlp",
    batch: Annotated[int, typer.Option(min=1, help="Rows in a gradient.")] = 16,
    gradients: Annotated[
        int, typer.Option(min=80, help="Gradients of all workers together in a trial.")
    ] = 4000,
    seeds: Annotated[
        int, typer.Option(min=6, max=1000, help="Trials of each candidate, at first.")
    ] = 8,
    most_seeds: Annotated[
        int,
        typer.Option(help="Trials up to which they are doubled while none is surely the fastest."),
    ] = 64,
    target: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="The error in percent to reach.",
            show_default="1.2 times the least at the end",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the sweep.")] = Path(
        "runs/experiments/advice"
    ),
    jobs: Jobs = 1,
) -> None:
    """Recommend a strategy and a staleness bound for a cluster, with the evidence.

    The cluster is fitted to a real run, or given by --workers, --step-s and --link. Candidates are
    ranked by the simulated seconds to an error; nothing is advised where the runs do not separate
    them.
    """
    from deploy.experiments.calibration import fit_run
    from deploy.experiments.recommendation import AdviceSettings, describe_cluster, recommend

    settings = AdviceSettings(
        workload=workload,
        batch=batch,
        gradients=gradients,
        seeds=seeds,
        most_seeds=most_seeds,
        target=target,
    )
    if run is None:
        section = describe_cluster(workers, step_s, link)
    else:
        if workers is not None or step_s is not None or link:
            raise BadInput("exp advise", expected="a RUN, or a cluster by options", got="both")
        fit = fit_run(run)
        typer.echo(f"# {fit.quality}")
        section = fit.section
    typer.echo(section)
    for line in recommend(section, settings, out, jobs=jobs, note=lambda _: None).lines():
        typer.echo(line)


@app.command()
def replay(sweep: SweepFile) -> None:
    """Run the first trial of each point for real, and replay it: the weights must be the same.

    The real run has a shard on loopback and a thread for each worker, which sleep up to the drawn
    times of their steps. The exit status is 1 if a replay leads to other weights.
    """
    from deploy.experiments.real_runs import compare
    from deploy.experiments.sweeps import read_sweep

    differs = False
    for point in read_sweep(sweep).points:
        agreement = compare(point.trials[0])
        typer.echo(f"{point.label}: {agreement}")
        differs = differs or not agreement.equal
    if differs:
        raise typer.Exit(1)
