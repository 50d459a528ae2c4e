"""`downpour service token` and `downpour service project`: who may use a service, and how much.

They change the home of a service on this machine, also while it runs. Whoever can write to that
home could change it in any case.
"""

import getpass
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from deploy.cli.connection import require_service
from shards.errors import BadInput
from worker.job.options import parse_time

if TYPE_CHECKING:
    from deploy.service.access_store import AccessStore

_HELP = {"help_option_names": ["-h", "--help"]}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/@-]{0,62}")
_MAX, _ANY = 1 << 20, "any number"
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

token_commands = typer.Typer(
    help="The tokens of a service: create, list, revoke.",
    no_args_is_help=True,
    context_settings=_HELP,
)
project_commands = typer.Typer(
    help="The projects of a service: their limits.", no_args_is_help=True, context_settings=_HELP
)


@token_commands.command("create")
def create_token(
    name: Annotated[str, typer.Option(help="The user, as the audit names it.", show_default=False)],
    role: Annotated[
        str, typer.Option(help="viewer, submitter, operator or administrator.", show_default=False)
    ],
    project: Annotated[
        list[str] | None,
        typer.Option(help="A project that it may see. Repeatable.", show_default="all"),
    ] = None,
    expires: Annotated[str, typer.Option(help="How long it is good, 366d at most.")] = "90d",
    as_json: AsJson = False,
) -> None:
    """Create a token and print it. It is shown this once: the service stores a digest."""
    with require_service():
        from deploy.service.submissions import check_project_name
        from deploy.service.tokens import TokenRole
    if role not in list(TokenRole):
        raise BadInput("--role", expected=", ".join(TokenRole), got=f"{role[:80]!r}")
    _check_name(name)
    projects = [check_project_name(name) for name in project] if project else None
    with _store() as store:
        row, text = store.create_token(
            name, TokenRole(role), projects, parse_time("--expires", expires)
        )
        _record(store, "token create", f"{row.name} {row.id} {row.role}")
    typer.echo(_json({**msgspec.to_builtins(row), "token": text}) if as_json else text)


@token_commands.command("list")
def list_tokens(as_json: AsJson = False) -> None:
    """List all tokens, the newest first, without their secrets."""
    with _store() as store:
        rows = store.tokens()
    if as_json:
        typer.echo(_json({"tokens": [msgspec.to_builtins(row) for row in rows]}))
        return
    now = time.time()
    for row in rows:
        state = "revoked" if row.revoked else "expired" if row.expires < now else "live"
        until = time.strftime("%Y-%m-%d", time.gmtime(row.expires))
        projects = ",".join(row.projects) if row.projects is not None else "all projects"
        typer.echo(f"{row.id}  {state:<7}  until {until}  {row.role:<13}  {row.name}  {projects}")


@token_commands.command("revoke")
def revoke_token(
    token: Annotated[str, typer.Argument(help="The id or the name.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Revoke a token: its next request, its sessions and its streams are refused."""
    with _store() as store:
        row = store.revoke(token)
        _record(store, "token revoke", f"{row.name} {row.id}")
    text = f"{row.id}  revoked  {row.name}"
    typer.echo(_json(msgspec.to_builtins(row)) if as_json else text)


@project_commands.command("set")
def set_project(
    project: Annotated[str, typer.Argument(help="The name of the project.", show_default=False)],
    running: Annotated[
        int | None, typer.Option(min=0, max=_MAX, help="Jobs at the same time.", show_default=_ANY)
    ] = None,
    queued: Annotated[
        int | None, typer.Option(min=0, max=_MAX, help="Jobs that wait.", show_default=_ANY)
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=0, max=_MAX, help="Workers of its running jobs.", show_default=_ANY),
    ] = None,
    uploads: Annotated[
        int | None,
        typer.Option(min=0, max=_MAX, help="Uploads in progress.", show_default=_ANY),
    ] = None,
    upload_gb: Annotated[
        float | None,
        typer.Option(min=0, max=1e6, help="Size of all its uploads, in GB.", show_default=_ANY),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Set the limits of a project, in place of those that it had."""
    with require_service():
        from deploy.service.access_store import ProjectLimits
        from deploy.service.submissions import check_project_name
    limits = ProjectLimits(
        running=running,
        queued=queued,
        workers=workers,
        uploads=uploads,
        upload_bytes=int(upload_gb * 1e9) if upload_gb is not None else None,
    )
    with _store() as store:
        store.set_limits(check_project_name(project), limits)
        _record(store, "project set", _limits(project, limits))
    plain = {project: msgspec.to_builtins(limits)}
    typer.echo(_json(plain) if as_json else _limits(project, limits))


@project_commands.command("list")
def list_projects(as_json: AsJson = False) -> None:
    """List the projects that have limits."""
    with _store() as store:
        projects = store.limits()
    if as_json:
        typer.echo(_json(msgspec.to_builtins(projects)))
        return
    for project, limits in projects.items():
        typer.echo(_limits(project, limits))


def _limits(project: str, limits: msgspec.Struct) -> str:
    values = msgspec.to_builtins(limits).items()
    shown = (f"{name} {'any' if value is None else value}" for name, value in values)
    return f"{project}  {'  '.join(shown)}"


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name):
        raise BadInput(
            "--name", expected="letters, digits and ._/@-, 63 at most", got=f"{name[:80]!r}"
        )


@contextmanager
def _store() -> "Iterator[AccessStore]":
    with require_service():
        from deploy.service import server
    with server.access_of(server.home()) as store:
        yield store


def _record(store: "AccessStore", action: str, detail: str) -> None:
    store.record_command(getpass.getuser(), action, detail)


def _json(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)
