"""Errors as RFC 9457 problem details: what is wrong, what was expected, what to do."""

import errno
from collections.abc import Callable, Mapping
from typing import Any

import sqlalchemy as sa
from fastapi.responses import JSONResponse
from starlette.responses import Response
from starlette.types import Scope

from deploy.service.database_tables import first_line
from deploy.service.job_store import StateChanged
from shards.errors import BadInput, DownpourError

MEDIA_TYPE = "application/problem+json"
_TEXT = {"type": "string"}
PROBLEMS: dict[str, Any] = {
    "description": "What is wrong, and what to do.",
    "content": {
        MEDIA_TYPE: {
            "schema": {
                "type": "object",
                "required": ["status", "code", "detail"],
                "properties": {
                    "status": {"type": "integer"},
                    **dict.fromkeys(("code", "detail", "field", "expected", "got", "hint"), _TEXT),
                },
            }
        }
    },
}
"""Every error, as the OpenAPI document describes it."""


class Problem(Exception):
    """An error to answer with: `code` is for programs, `detail` for people."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.headers = headers
        self.more = {name: value for name, value in more.items() if value is not None}

    def response(self) -> JSONResponse:
        body = {"status": self.status, "code": self.code, "detail": str(self), **self.more}
        return JSONResponse(body, self.status, headers=self.headers, media_type=MEDIA_TYPE)


Answer = Callable[[Problem, Scope], Response]
"""Answers a request with a problem, in the form that its sender can read."""

_WHERE = {
    "job": "the list of jobs has those that you may see",
    "snapshot": "the job's snapshots list them",
    "artefact": "the job's artefacts list them",
}
"""Where to look for the names of what was not found."""


def not_found(subject: str, name: str, hint: str | None = None) -> Problem:
    expectation = f"the name of {'an' if subject[0] in 'aeiou' else 'a'} {subject} that is there"
    hint = hint or _WHERE.get(subject, "/api/v1/openapi.json describes every route")
    return Problem(
        404, "not_found", f"{subject} {name}: not found", field=subject,
        expected=expectation, got=name, hint=hint,
    )  # fmt: skip


def of_error(error: DownpourError | OSError) -> Problem:
    """The problem that an error of this project is, with the fields that the error has."""
    text = reason_of(error)
    if isinstance(error, StateChanged):
        return Problem(
            409, "wrong_state", text, field="state", expected=error.expected,
            got=str(error.state), hint="the job may have changed meanwhile: look at its state",
        )  # fmt: skip
    if isinstance(error, BadInput):
        return Problem(
            422, "bad_input", text, field=_field(error.what) if error.expected else None,
            expected=error.expected, got=error.got, hint=error.hint,
        )  # fmt: skip
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return Problem(
            422, "bad_input", text, field="path", expected="names of at most 255 bytes",
            got="a longer one", hint="give a shorter name",
        )  # fmt: skip
    hint = "make the disk writable, or free space on it, then repeat the request"
    return Problem(503, "unavailable", text, hint=hint)


def _field(subject: str) -> str:
    """The name of a field of a request in what an error is about, which may be an option's."""
    return subject.split(maxsplit=1)[0].rstrip(":").removeprefix("--").replace("-", "_")


def reason_of(error: Exception) -> str:
    """The text of an error, in words for users."""
    if isinstance(error, sa.exc.DBAPIError):
        return f"database: {first_line(error)}"
    if isinstance(error, sa.exc.SQLAlchemyError):
        return "database: no free connection"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def of_database_error(error: sa.exc.SQLAlchemyError) -> Problem:
    """The problem of a database that is locked, gone, damaged or too slow for the moment."""
    text = reason_of(error)
    hint = "repeat the request; jobs train on. If this lasts: the log of downpour serve says why"
    headers = {"Retry-After": "5"}
    return Problem(503, "unavailable", text, hint=hint, headers=headers)
