"""REST routes of tokens, projects and the audit."""

from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from pydantic import Field

from deploy.service.access import Sender, note
from deploy.service.access_store import AccessStore, ProjectLimits
from deploy.service.strict_requests import TOKEN_NAME, RequestBody
from deploy.service.submissions import check_project_name
from deploy.service.tokens import Principal, TokenRole

DAY_S = 86400.0


class NewToken(RequestBody):
    """The body of a new token. No `projects`: all of them."""

    name: str = Field(pattern=TOKEN_NAME, description="Its user.")
    role: TokenRole = Field(strict=False)  # JSON has it as text
    projects: list[str] | None = Field(default=None, min_length=1, max_length=100)
    days: float = Field(default=90.0, gt=0, le=366, description="Days until it expires.")


class LimitsRequest(RequestBody):
    """The body of a project's limits; what is not given is unlimited."""

    running: int | None = Field(default=None, ge=0, le=1 << 20)
    queued: int | None = Field(default=None, ge=0, le=1 << 20)
    workers: int | None = Field(default=None, ge=0, le=1 << 20)
    uploads: int | None = Field(default=None, ge=0, le=1 << 20, description="In progress.")
    upload_bytes: int | None = Field(default=None, ge=0, le=1 << 60, description="Of all uploads.")


Usage = Callable[[str], ProjectLimits]
"""What a project uses now, in the terms of its limits."""


def add_routes(router: APIRouter, store: AccessStore, usage: Usage) -> None:
    """Add the routes."""

    @router.get("/whoami")
    def whoami(sender: Sender) -> dict[str, Any]:
        """The name, the role and the projects of the token of this request."""
        return _show_sender(sender)

    @router.get("/tokens")
    def tokens() -> dict[str, Any]:
        """Every token without its secret, the newest first."""
        return {"tokens": [msgspec.to_builtins(row) for row in store.tokens()]}

    @router.post("/tokens", status_code=201)
    def create(request: Request, body: NewToken) -> dict[str, Any]:
        """Create a token. `token` is in this answer only."""
        projects = body.projects and [check_project_name(project) for project in body.projects]
        row, text = store.create_token(body.name, body.role, projects, body.days * DAY_S)
        note(request, detail=f"{row.name} {row.id} {row.role}")
        return {**msgspec.to_builtins(row), "token": text}

    @router.delete("/tokens/{token}")
    def revoke(
        request: Request, token: Annotated[str, Path(max_length=64, description="Its id or name.")]
    ) -> dict[str, Any]:
        """Revoke a token, and end its sessions."""
        row = store.revoke(token)
        note(request, detail=f"{row.name} {row.id}")
        return {"id": row.id, "name": row.name}

    @router.get("/projects")
    def projects(sender: Sender) -> dict[str, Any]:
        """The projects with limits or with the right to submit, with what they use now."""
        limits = store.limits()
        names = {*limits, *(sender.projects if sender.projects is not None else {"default"})}
        return {
            "projects": [
                {
                    "name": name,
                    "limits": msgspec.to_builtins(limits.get(name, ProjectLimits())),
                    "use": msgspec.to_builtins(usage(name)),
                }
                for name in sorted(names)
                if sender.sees(name)
            ]
        }

    @router.put("/projects/{project}")
    def limit(
        request: Request, project: Annotated[str, Path(max_length=64)], body: LimitsRequest
    ) -> dict[str, Any]:
        """Set the limits of a project, in place of those that it had."""
        limits = ProjectLimits(**body.model_dump())
        store.set_limits(check_project_name(project), limits)
        plain: dict[str, Any] = msgspec.to_builtins(limits)
        note(request, project=project, detail=" ".join(f"{n}={v}" for n, v in plain.items()))
        return {"name": project, "limits": plain}

    @router.get("/audit")
    def audit(
        cursor: Annotated[int | None, Query(ge=0, le=1 << 62)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        actor: Annotated[str | None, Query(max_length=100)] = None,
        job: Annotated[str | None, Query(max_length=64)] = None,
    ) -> dict[str, Any]:
        """Changes and failed logins, the newest first. `cursor` of an answer continues it."""
        entries = store.audit(limit, cursor, actor, job)
        more = entries[-1].id if len(entries) == limit else None
        return {"entries": [msgspec.to_builtins(entry) for entry in entries], "cursor": more}


def _show_sender(sender: Principal) -> dict[str, Any]:
    projects = sorted(sender.projects) if sender.projects is not None else None
    return {"name": sender.name, "role": sender.role, "projects": projects}
