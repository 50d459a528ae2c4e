"""Errors as RFC 9457 problem details: what is wrong, what was expected, what to do."""

import re
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa
from fastapi.responses import JSONResponse

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
_EXPECTED = re.compile(r"(?:--)?([\w-]+)[^:]*: expected (.+?),? (?:and )?got (.*?)(?:; (.*))?$")


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


def not_found(what: str, name: str) -> Problem:
    return Problem(404, "not_found", f"{what} {name}: not found", field=what)


def of_error(error: DownpourError | OSError) -> Problem:
    """The problem that an error of this project is, with its field if the text names one."""
    text = str(error)
    if isinstance(error, StateChanged):
        return Problem(409, "wrong_state", text, got=str(error.state))
    if isinstance(error, BadInput):
        found = _EXPECTED.match(text)
        field, expected, got, hint = found.groups() if found else (None,) * 4
        name = field.replace("-", "_") if field else None
        return Problem(422, "bad_input", text, field=name, expected=expected, got=got, hint=hint)
    return Problem(503, "unavailable", text, hint="free disk space, then repeat the request")


def of_database_error(error: sa.exc.SQLAlchemyError) -> Problem:
    """The problem of a database that is locked, gone, damaged or too slow for the moment."""
    text = first_line(error) if isinstance(error, sa.exc.DBAPIError) else "no free connection"
    hint = "repeat the request; jobs train on. If this lasts: the log of downpour serve says why"
    headers = {"Retry-After": "5"}
    return Problem(503, "unavailable", f"database: {text}", hint=hint, headers=headers)
