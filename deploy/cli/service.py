"""The commands of the training service: its server, its jobs, and their runners.

Each reads its options, calls one function and prints. The libraries of the service are imported
only by the commands that need them.
"""

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deploy.cli.access import project_commands, token_commands
from deploy.cli.connection import (
    CONNECTION,
    ServiceAddress,
    add_connection_options,
    require_service,
)
from deploy.cli.serve import serve
from deploy.cli.train import declare, train_parameters
from deploy.run.folder import SETTINGS
from deploy.run.settings import TrainSettings, option_name
from deploy.service.states import JobState, QueuePosition
from deploy.terminal_text import print_text
from shards.errors import BadInput
from shards.plurals import format_count
from worker.job.option_fields import list_options
from worker.job.options import LONGEST_S

_PANEL = "The job"
_STATUS = {"SUCCEEDED": 0, "FAILED": 1, "CANCELLED": 130}

app = typer.Typer(
    help="The home of a training service: its tokens, its projects, its database.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(token_commands, name="token")
app.add_typer(project_commands, name="project")

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_JOB_ID = re.compile(r"[0-9a-f]{17}")
_OF_RUNS = {
    "resume": "downpour train --resume {run}",
    "snapshot": "downpour snapshots take {run}",
    "reshard": "downpour reshard {run}",
    "export": "downpour snapshots restore {run}",
}
"""The commands for run folders, by the name of the command that takes a job in their place."""


def check_job(context: typer.Context, job: str) -> str:
    """Raise BadInput for what is no job's id, before a service is asked for it.

    The error names the command for a run folder, which a user may have meant.
    """
    if _JOB_ID.fullmatch(job):
        return job
    if (Path(job) / SETTINGS).is_file():
        instead = _OF_RUNS.get(str(context.info_name), "downpour service adopt {run}")
        raise BadInput(
            context.info_name,
            expected="the id of a job",
            got=f"the run folder {job}",
            hint=f"for a run: {instead.format(run=job)}",
        )
    raise BadInput(
        context.info_name,
        expected="the id of a job, as `downpour list` prints it",
        got=f"{job[:80]!r}",
        hint="there is no run folder of that name either",
    )


JobArgument = Annotated[
    str, typer.Argument(help="The id of a job.", show_default=False, callback=check_job)
]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Print what is new until it ends.")]


@app.callback(invoke_without_command=True)
def options(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run_attempt(
    folder: Annotated[Path, typer.Argument(help="The folder of a job.", show_default=False)],
) -> None:
    """Run one attempt of a job of the service in this process; the service starts it for you."""
    from deploy.runner.attempt import run_attempt as run

    raise typer.Exit(run(folder))


def submit(**options: Any) -> None:
    """Submit a job to the service, with the options of `downpour train`."""
    service = ServiceAddress(
        **{parameter.name: options.pop(parameter.name) for parameter in CONNECTION}
    )
    as_json, key = options.pop("as_json"), options.pop("key")
    upload = options.pop("upload")
    solver_file, file, labels = (options.pop(name) for name in ("solver_file", "settings", "label"))
    request = {name: options.pop(name) for name in ("name", "project", "priority", "resume")}
    settings = _settings_of(file) if file is not None else {}
    settings |= {name: value for name, value in options.items() if value is not None}
    if solver_file is not None:
        if "solver" in settings:
            raise BadInput("submit", expected="SOLVER or --solver", got="both")
        settings["solver"] = solver_file
    if "solver" not in settings:
        raise BadInput("submit", expected="a solver, SOLVER or --solver", got="none")
    body = {name: value for name, value in request.items() if value is not None}
    body |= {"settings": _portable(settings), "labels": _labels(labels or [])}
    with service.open() as client:
        if upload or not client.is_local:
            body["settings"] |= client.upload_files(
                body["settings"],
                lambda text: print_text(text, err=True),
                body.get("project", "default"),
            )
        job = client.post("/jobs", body, key)
    show(job, as_json, job_line(job))


def _own(name: str, kind: Any, text: str, *names: str, **more: Any) -> inspect.Parameter:
    option = typer.Option(*names, help=text, rich_help_panel=_PANEL, show_default=False, **more)
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, option],
    )


declare(
    submit,
    [
        inspect.Parameter(
            "solver_file",
            inspect.Parameter.KEYWORD_ONLY,
            default=None,
            annotation=Annotated[
                Path | None,
                typer.Argument(
                    metavar="[SOLVER]", help="The solver, or --solver.", show_default=False
                ),
            ],
        ),
        _own("name", str, r"The job's name. \[default: that of the solver's file]"),
        _own("label", list[str], "A label NAME=VALUE. Repeatable."),
        _own("project", str, r"The job's project. \[default: default]"),
        _own("priority", int, r"Jobs of higher priority start first. \[default: 0]"),
        _own("resume", str, "A snapshot to start from, RUN@NUMBER."),
        _own("settings", Path, "A settings.json with options; those given here win."),
        _own("key", str, "An idempotency key: a repeated submission with it makes no second job."),
        *CONNECTION,
        inspect.Parameter(
            "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson
        ),
        inspect.Parameter(
            "upload",
            inspect.Parameter.KEYWORD_ONLY,
            default=False,
            annotation=Annotated[
                bool,
                typer.Option(
                    "--upload",
                    help="Send solver, nets and data to the service, as to one elsewhere.",
                    rich_help_panel=_PANEL,
                ),
            ],
        ),
        *train_parameters(),
    ],
)


@add_connection_options
def list_jobs(
    service: ServiceAddress,
    state: Annotated[
        list[JobState] | None,
        typer.Option(case_sensitive=False, help="Only this state. Repeatable."),
    ] = None,
    project: Annotated[str | None, typer.Option(help="Only this project.")] = None,
    label: Annotated[str | None, typer.Option(help="Only NAME or NAME=VALUE.")] = None,
    q: Annotated[str | None, typer.Option("--query", "-q", help="A part of the name.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=200, help="At most this number.")] = 50,
    cursor: Annotated[str | None, typer.Option(help="Where an earlier list ended.")] = None,
    as_json: AsJson = False,
) -> None:
    """List jobs, the newest first."""
    with service.open() as client:
        page = client.get(
            "/jobs", state=state, project=project, label=label, q=q, limit=limit, cursor=cursor
        )
    if as_json:
        print_text(msgspec.json.encode(page))
        return
    for job in page["jobs"]:
        print_text(job_line(job))
    if not page["jobs"]:
        typer.echo("no jobs", err=True)
    if page["cursor"] is not None:
        typer.echo(f"more: --cursor {page['cursor']}")


@add_connection_options
def describe(service: ServiceAddress, job: JobArgument, as_json: AsJson = False) -> None:
    """Show a job: its state, its figures, its attempts and its settings."""
    with service.open() as client:
        description = client.get(f"/jobs/{job}")
        description["attempts"] = client.get(f"/jobs/{job}/attempts")["attempts"]
    if as_json:
        print_text(msgspec.json.encode(description))
        return
    print_text(job_line(description))
    print_text(
        f"project {description['project']}  priority {description['priority']}"
        f"  {description['reason']}"
    )
    if description["waiting"]:
        print_text(str(msgspec.convert(description["waiting"], QueuePosition)))
    for attempt in description["attempts"]:
        print_text(
            f"attempt {attempt['number']}: {attempt['cause'] or 'under way'}  {attempt['message']}"
        )
    for name, value in description["settings"].items():
        if value is not None:
            print_text(f"  {name}: {value}")


@add_connection_options
def logs(
    service: ServiceAddress,
    job: JobArgument,
    follow: Follow = False,
    part: Annotated[str | None, typer.Option(help="A part, such as driver-1.")] = None,
    tail: Annotated[int, typer.Option(min=1, max=16 << 20, help="Bytes from the end.")] = 1 << 16,
    as_json: AsJson = False,
) -> None:
    """Print the end of a job's log."""
    with service.open() as client:
        for text in client.logs(job, part, tail, follow=follow):
            print_text(msgspec.json.encode({"text": text}) if as_json else text, nl=as_json)


@add_connection_options
def events(
    service: ServiceAddress, job: JobArgument, follow: Follow = False, as_json: AsJson = False
) -> None:
    """Print what happened to a job, one event a line, with its time in UTC."""
    from time import gmtime, strftime

    with service.open() as client:
        for event in client.events(job, follow=follow):
            if as_json:
                print_text(msgspec.json.encode(event))
                continue
            at = strftime("%Y-%m-%d %H:%M:%SZ", gmtime(event["time"]))
            print_text(f"{at}  {event['kind']:<10}  {_words(event['data'])}".rstrip())


@add_connection_options
def wait(
    service: ServiceAddress,
    job: JobArgument,
    timeout_s: Annotated[
        float | None, typer.Option(min=0.0, max=LONGEST_S, help="Seconds to wait at most.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Wait until a job has ended. The exit status is 0 for SUCCEEDED, 1 FAILED, 130 CANCELLED."""
    with service.open() as client:
        ended = client.wait(job, timeout_s)
    show(ended, as_json, job_line(ended))
    raise typer.Exit(_STATUS[ended["state"]])


@add_connection_options
def cancel(
    service: ServiceAddress,
    job: JobArgument,
    now: Annotated[
        bool, typer.Option("--now", help="End it at once, without a last snapshot.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Cancel a job."""
    ask(job, "cancel", service, as_json, {"mode": "now" if now else "drain"})


@add_connection_options
def pause(service: ServiceAddress, job: JobArgument, as_json: AsJson = False) -> None:
    """Pause a job: save a snapshot, and release its slots."""
    ask(job, "pause", service, as_json)


@add_connection_options
def resume(service: ServiceAddress, job: JobArgument, as_json: AsJson = False) -> None:
    """Queue a paused job again."""
    ask(job, "resume", service, as_json)


@add_connection_options
def snapshot(service: ServiceAddress, job: JobArgument, as_json: AsJson = False) -> None:
    """Take a snapshot of a job that trains."""
    ask(job, "snapshot", service, as_json)


@add_connection_options
def clone(
    service: ServiceAddress,
    job: JobArgument,
    snapshot: Annotated[
        str | None, typer.Option(help="A snapshot to start from, or newest.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="The name of the new job.")] = None,
    change: Annotated[
        list[str] | None,
        typer.Option("--set", help="An option that changes, such as staleness=8. Repeatable."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Submit a copy of a job, with other options, perhaps from one of its snapshots."""
    changes = changes_of("--set", change or [])
    body = {"settings": changes, "name": name, "snapshot": snapshot}
    ask(job, "clone", service, as_json, {n: v for n, v in body.items() if v is not None})


@app.command("reindex")
def reindex_home(as_json: AsJson = False) -> None:
    """Rebuild the database of DOWNPOUR_HOME from the folders of its jobs; no service may run."""
    with require_service():
        from deploy.service import server
    home = server.home()
    jobs = server.reindex(home)
    show({"home": str(home), "jobs": jobs}, as_json, f"{home}: {format_count(jobs, 'job')}")


@app.command("backup")
def backup_home(
    target: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Copy the database of DOWNPOUR_HOME, also while a service runs."""
    with require_service():
        from deploy.service import server
    home = server.home()
    server.backup(home, target)
    backup = {"home": str(home), "file": str(target)}
    show(backup, as_json, f"{target}: the database of {home}")


@app.command("restore")
def restore_home(
    source: Annotated[Path, typer.Argument(help="What `backup` wrote.", show_default=False)],
) -> None:
    """Fill an empty database of DOWNPOUR_HOME with a copy; no service may run.

    The copy may be of the other kind: so a home moves from SQLite to PostgreSQL, or back.
    """
    with require_service():
        from deploy.service import server
    server.restore(server.home(), source)
    typer.echo(f"{source}: in the database of {server.home()}")


def add_to(main: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (serve, submit, describe, logs, events, wait, cancel, pause, resume, snapshot):
        main.command()(command)
    main.command("list")(list_jobs)
    main.command("clone")(clone)
    main.command("run-attempt")(run_attempt)
    main.add_typer(app, name="service")


def ask(
    job: str, verb: str, service: ServiceAddress, as_json: bool, body: dict[str, Any] | None = None
) -> None:
    with service.open() as client:
        answer = client.post(f"/jobs/{job}:{verb}", body or {})
    name = answer.get("name", "")  # of a clone; the answers to other orders have none
    show(answer, as_json, f"{answer['id']}  {answer['state']:<10}  {name}".rstrip())


def show(answer: dict[str, Any], as_json: bool, line: str) -> None:
    print_text(msgspec.json.encode(answer) if as_json else line)


def job_line(job: dict[str, Any]) -> str:
    head = job["head"]
    figures = []
    if head:
        loss = "-" if head.get("loss") is None else f"{head['loss']:.4g}"
        figures = [f"steps {head['steps']}/{head['planned']}", f"loss {loss}"]
    return "  ".join(
        [job["id"], f"{job['state']:<10}", job["name"], *figures, job["code"]]
    ).rstrip()


def _words(data: dict[str, Any]) -> str:
    """An event's data in a line, without the number that pairs an order with its answer."""
    words = []
    for name, value in data.items():
        if value not in (None, "") and name != "order_id":
            words.append(_word(value) if name in {"what", "text"} else f"{name} {_word(value)}")
    return "  ".join(words)


def _word(value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case dict():
            return ", ".join(f"{name}={_word(part)}" for name, part in value.items())
        case _:
            return str(value)


def _settings_of(file: Path) -> dict[str, Any]:
    """The options in a settings.json that differ from the defaults."""
    settings = TrainSettings.load(file)
    return {
        name: getattr(settings, name)
        for name, option in list_options(TrainSettings).items()
        if name != "out" and getattr(settings, name) != option.default
    }


def _portable(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as JSON, with absolute paths: the service has another working directory."""
    options = list_options(TrainSettings)
    checked: dict[str, Any] = {
        name: options[name].check_value(option_name(name), value)
        for name, value in settings.items()
    }
    snapshots = checked.get("snapshots")
    if snapshots is not None and "://" not in str(snapshots):
        checked["snapshots"] = str(Path(snapshots).absolute())
    plain: dict[str, Any] = msgspec.to_builtins(checked, enc_hook=str)
    return plain


def changes_of(label: str, words: Iterable[str]) -> dict[str, Any]:
    """The options in words such as staleness=8, by name; `label` is for errors."""
    changes = {}
    for word in words:
        option, separator, text = word.partition("=")
        if not separator:
            raise BadInput(label, expected="NAME=VALUE", got=word)
        changes[option.replace("-", "_")] = _value(text)
    return changes


def _labels(labels: list[str]) -> dict[str, str]:
    pairs = [label.partition("=") for label in labels]
    return {name: value for name, _, value in pairs}


def _value(text: str) -> Any:
    """A value as JSON if it is some, else as text."""
    try:
        return msgspec.json.decode(text)
    except ValueError:
        return text
