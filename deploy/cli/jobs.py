"""More commands of the training service: results, running jobs, and the service itself."""

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from deploy.cli.connection import ServiceAddress, add_connection_options
from deploy.cli.service import AsJson, JobArgument, app, ask, changes_of, check_job, job_line, show
from shards.errors import BadInput
from shards.plurals import format_count

webhooks = typer.Typer(help="Webhooks of a service: add, list or remove them.")
Number = Annotated[str, typer.Argument(help="The number of a snapshot.", show_default=False)]
_SET_S = 60.0
Target = Annotated[Path, typer.Option("--output", "-o", help="The file.", show_default=False)]


@add_connection_options
def artefacts(
    service: ServiceAddress,
    job: JobArgument,
    name: Annotated[
        str | None, typer.Argument(help="The artefact to download.", show_default="list them")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The file.", show_default="its name")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List what a job has left behind, with digests, or download one of these files."""
    with service.open() as client:
        answer = client.get(f"/jobs/{job}/artefacts")
        if name is None:
            lines = [f"{a['bytes']:>12}  {a['sha256']}  {a['name']}" for a in answer["artefacts"]]
            show(answer, as_json, "\n".join(lines))
            return
        known = {artefact["name"]: artefact for artefact in answer["artefacts"]}
        if name not in known:
            raise BadInput("artefacts", expected=f"one of {', '.join(known) or 'none'}", got=name)
        target = output or Path(Path(name).name)
        size = client.download(f"/jobs/{job}/artefacts/{name}", target, known[name]["sha256"])
    show(
        {"file": str(target), **known[name]},
        as_json,
        f"{target}: {format_count(size, 'byte')}",
    )


@add_connection_options
def export(
    service: ServiceAddress,
    job: JobArgument,
    number: Number,
    output: Target,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a snapshot to a .safetensors, .h5 or .caffemodel file."""
    form = output.suffix.removeprefix(".")
    with service.open() as client:
        path = f"/jobs/{job}/snapshots/{number}:export"
        size = client.download(path, output, format=form)
    show({"file": str(output), "bytes": size}, as_json, f"{output}: {format_count(size, 'byte')}")


@add_connection_options
def compare(
    service: ServiceAddress,
    context: typer.Context,
    jobs: Annotated[list[str], typer.Argument(help="The ids of jobs.", show_default=False)],
    name: Annotated[str, typer.Option(help="A column of the series, for --json.")] = "loss",
    as_json: AsJson = False,
) -> None:
    """Compare jobs: their newest figures, and the settings in which they differ."""
    for job in jobs:
        check_job(context, job)
    with service.open() as client:
        comparison = client.get("/compare", jobs=",".join(jobs), name=name)
    rows = {"job": [job["name"] for job in comparison["jobs"]]}
    rows |= {"state": [job["state"] for job in comparison["jobs"]]}
    rows |= comparison["figures"] | comparison["settings"]
    width = max(map(len, rows))
    lines = [
        f"{label:<{width}}  " + "  ".join(f"{_cell(value):>14}" for value in values)
        for label, values in rows.items()
    ]
    show(comparison, as_json, "\n".join(lines))


@add_connection_options
def top(service: ServiceAddress, as_json: AsJson = False) -> None:
    """Show the jobs under way once, with their newest figures, and the state of the service."""
    with service.open() as client:
        status = client.get("/service")
        states = [state for state, count in status["jobs"].items() if count]
        live = list(client.list_unfinished())
        for job in live:
            reading = client.get(f"/jobs/{job['id']}/reading")["reading"] if job["head"] else None
            job["links"] = reading["readings"]["links"] if reading is not None else []
    lines = [f"slots {status['slots_held']}/{status['slots']}  {status['halted'] or 'queue open'}"]
    lines += ["  ".join(f"{state} {status['jobs'][state]}" for state in states) or "no jobs"]
    for job in live:
        head = job["head"] or {}
        lines.append(
            f"{job['id']}  {job['state']:<10}  {job['name']}  loss {_cell(head.get('loss'))}"
            f"  {_cell(head.get('samples_per_s'))} samples/s  {' '.join(job['alerts'])}".rstrip()
        )
        lines += [
            f"    {link['worker_host']} -> {link['shard_host']}  RTT {_cell(link['rtt_ms'])} ms"
            f"  {_cell((link['bytes_per_s'] or 0.0) / 1e6)} MB/s pushed"
            for link in job["links"]
        ]
    show({"service": status, "jobs": live}, as_json, "\n".join(lines))


@add_connection_options
def set_options(
    service: ServiceAddress,
    context: typer.Context,
    job: Annotated[
        str, typer.Argument(help="The id of a job, or the folder of a run.", show_default=False)
    ],
    changes: Annotated[
        list[str], typer.Argument(help="Options such as staleness=8.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Change options of a job of the service, or of a run by its folder, while it trains.

    `staleness` and `rate_factor` change at once. With other options a job of the service takes a
    snapshot, and continues with them in another attempt.
    """
    settings = changes_of("set", changes)
    if not Path(job).is_dir():
        ask(check_job(context, job), "set", service, as_json, {"settings": settings})
        return
    from deploy.run.requests import ask_run
    from deploy.run.snapshot_ref import origin_of
    from worker.job.run_control import SettingsOrder

    ask_run(origin_of(job), SettingsOrder(settings), _SET_S)
    words = ", ".join(f"{name}={_cell(value)}" for name, value in settings.items())
    show({"run": job, "settings": settings}, as_json, f"{job} trains with {words}")


@app.command("reshard")
@add_connection_options
def reshard_job(
    service: ServiceAddress,
    job: JobArgument,
    shards: Annotated[int, typer.Argument(min=1, max=1024, help="Their new number.")],
    as_json: AsJson = False,
) -> None:
    """Move a job that trains to another number of shards."""
    ask(job, "reshard", service, as_json, {"shards": shards})


@app.command("adopt")
@add_connection_options
def adopt_run(
    service: ServiceAddress,
    run: Annotated[Path, typer.Argument(help="A folder of `downpour train`.", show_default=False)],
    name: Annotated[
        str | None, typer.Option(help="The job's name.", show_default="the folder's")
    ] = None,
    project: Annotated[str, typer.Option(help="The job's project.")] = "default",
    as_json: AsJson = False,
) -> None:
    """List a run that `downpour train` has made among the jobs; its folder stays where it is."""
    body = {"run": str(run.absolute()), "name": name, "project": project}
    with service.open() as client:
        job = client.post("/jobs:adopt", body)
    show(job, as_json, job_line(job))


@app.command("gc")
@add_connection_options
def collect_garbage(
    service: ServiceAddress,
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the files; without it they are only listed.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List old updates, logs, snapshots and uploads that nothing needs, or delete them."""
    with service.open() as client:
        garbage = client.post("/service:gc", {"delete": delete})
    lines = [
        f"{removal['bytes']:>12}  {removal['path']}  {removal['why']}"
        for removal in garbage["removals"]
    ]
    end = f"deleted {garbage['freed'] / 1e6:.1f} MB" if delete else "dry run: delete with --delete"
    show(garbage, as_json, "\n".join([*lines, f"{garbage['bytes'] / 1e6:.1f} MB; {end}"]))


@webhooks.command("add")
@add_connection_options
def add_webhook(
    service: ServiceAddress,
    url: Annotated[str, typer.Argument(help="Where events go.", show_default=False)],
    project: Annotated[
        str | None, typer.Option(help="Only events of this project.", show_default="all")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send alerts and the ends of jobs to a URL. The secret is printed this once."""
    with service.open() as client:
        webhook = client.post("/webhooks", {"url": url, "project": project})
    show(webhook, as_json, f"{webhook['id']}  secret {webhook['secret']}")


@webhooks.command("ls")
@add_connection_options
def list_webhooks(service: ServiceAddress, as_json: AsJson = False) -> None:
    """List the webhooks: deliveries, events given up, and the last answer."""
    with service.open() as client:
        answer = client.get("/webhooks")
    lines = [
        f"{webhook['id']}  {webhook['url']}"
        f"  delivered {webhook['delivered']}  given up {webhook['given_up']}"
        f"  {webhook['last']}".rstrip()
        for webhook in answer["webhooks"]
    ]
    show(answer, as_json, "\n".join(lines))


@webhooks.command("rm")
@add_connection_options
def remove_webhook(
    service: ServiceAddress,
    webhook: Annotated[str, typer.Argument(help="The id of a webhook.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Remove a webhook."""
    with service.open() as client:
        client.call("DELETE", f"/webhooks/{webhook}")
    show({"id": webhook, "removed": True}, as_json, f"{webhook}  removed")


@add_connection_options
def upload(
    service: ServiceAddress,
    paths: Annotated[list[Path], typer.Argument(help="Files or folders.", show_default=False)],
    project: Annotated[str, typer.Option(help="The project that they count for.")] = "default",
    as_json: AsJson = False,
) -> None:
    """Send files to the service, or continue that; prints what jobs name them by."""
    with service.open() as client:
        for path in paths:
            name = "solver" if path.suffix == ".prototxt" else "data"
            sent = client.upload_files(
                {name: str(path)}, lambda text: typer.echo(text, err=True), project
            )
            show({"file": str(path), "name": sent[name]}, as_json, sent[name])


def add_to(main: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (artefacts, compare, export, top, upload):
        main.command()(command)
    main.command("set")(set_options)
    main.add_typer(webhooks, name="webhook")


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else str(msgspec.json.encode(value), "utf-8")
