"""Requests are read to the letter, and refused in our words: what was expected, what was found.

FastAPI ignores query parameters that a route lacks, so that a misspelt filter would list all jobs,
and words its refusals for programmers. `StrictRoute` refuses the former; `refusal` words the rest.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any, get_origin

from fastapi import APIRouter, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict

from deploy.service.problems import PROBLEMS, Problem
from deploy.service.route_roles import API
from deploy.validation_words import format_expected
from ps.snapshots.checked_json import refuse_repeated
from shards.errors import UNDECODABLE, BadInput

HINT = f"{API}/openapi.json describes every route"
_AS_JSON = "send a JSON object, with the header Content-Type: application/json"
_SHOWN = 80
_SUSPECT = re.compile(rb"\\u(?:[dD][89a-fA-F]|0000)")  # half a surrogate pair, NUL
CURSOR = "^[0-9a-f]{17}$"
NUMBER = "^[0-9]{1,18}$"
TOKEN_NAME = r"^[A-Za-z0-9][A-Za-z0-9._/@-]{0,62}$"
_PATTERNS = {
    CURSOR: "the cursor of an earlier answer",
    NUMBER: "a number of up to 18 digits",
    TOKEN_NAME: "letters, digits and ._/@-, 63 at most",
}
"""The patterns of fields and parameters, in words."""


class RequestBody(BaseModel):
    """A body of a request: without other fields, and with values of the very types of JSON."""

    model_config = ConfigDict(extra="forbid", strict=True)


class StrictRoute(APIRoute):
    """A route that refuses query parameters that it does not have, or that are repeated."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()
        fields = self.dependant.query_params
        known = [field.alias for field in fields]
        repeatable = {
            field.alias for field in fields if get_origin(field.field_info.annotation) is list
        }

        async def answer_strictly(request: Request) -> Response:
            for name, count in Counter(
                name for name, _ in request.query_params.multi_items()
            ).items():
                if count > 1 and name in known and name not in repeatable:
                    raise _wrong(name, "one value", f"{count}")
                if name not in known:
                    raise _wrong(
                        name[:_SHOWN],
                        f"one of the query parameters {', '.join(known)}"
                        if known
                        else "no query parameter",
                        "another" if known else "one",
                    )
            if self.body_field is not None:
                _check_text(await request.body())
            return await answer(request)

        return answer_strictly


def strict_router() -> APIRouter:
    """A router below /api/v1; its routes read requests to the letter, and answer with problems."""
    return APIRouter(
        prefix=API, responses={"4XX": PROBLEMS, "5XX": PROBLEMS}, route_class=StrictRoute
    )


def _check_text(body: bytes) -> None:
    """Raise the problem of JSON with a field twice, or text that no path or database can keep."""
    try:
        value = json.loads(body, object_pairs_hook=refuse_repeated)
    except BadInput as error:
        raise _wrong(error.what, f"{error.expected}", f"{error.got}") from None
    except UNDECODABLE:
        return  # FastAPI says so
    if _SUSPECT.search(body):
        for text in _texts(value):
            if "\0" in text:
                raise _wrong("body", "text without NUL characters", "text with one")
            try:
                text.encode()
            except UnicodeEncodeError:
                raise _wrong("body", "JSON with text in Unicode", "half a character") from None


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, the names of fields among them."""
    match value:
        case str():
            yield value
        case list():
            for item in value:
                yield from _texts(item)
        case dict():
            for name, item in value.items():
                yield name
                yield from _texts(item)


def refusal(request: Request, error: RequestValidationError) -> Problem:
    """The problem of a request that does not fit its route."""
    first = error.errors()[0]
    part, *path = first["loc"]
    field = ".".join(map(str, path)) or "body"
    input_value = first.get("input")
    match first["type"]:
        case "json_invalid":
            return _wrong("body", "JSON", "text that is none", _AS_JSON)
        case "missing" if field == "body":
            return _wrong("body", "a JSON object", "none", _AS_JSON)
        case "missing":
            return _wrong(field, f"this {_KINDS[part]}", "none")
        case "extra_forbidden":
            known = _fields(request, path)
            expectation = f"one of the fields {', '.join(known)}" if known else "no such field"
            return _wrong(field, expectation, "another")
        case "string_pattern_mismatch":
            pattern = first["ctx"]["pattern"]
            return _wrong(field, _PATTERNS.get(pattern, "another form"), show_value(input_value))
    hint = _AS_JSON if field == "body" else HINT
    return _wrong(field, format_expected(first) or "another value", show_value(input_value), hint)


def refuse_malformed(status: int) -> Problem:
    """The problem of a body that cannot be read at all, as one that is nested too deeply."""
    return _wrong("body", "JSON in UTF-8", "what cannot be read", _AS_JSON, status=status)


def show_value(value: object) -> str:
    """A value of a request in one short line, as JSON has it."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bytes):
        return "other bytes"
    if value is None or isinstance(value, bool | int | float | str):
        text = json.dumps(value)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
    return "another value"


_KINDS: Mapping[str, str] = {
    "body": "field",
    "query": "query parameter",
    "path": "part of the path",
    "header": "header",
}


def _wrong(
    field: str, expectation: str, got: str, hint: str = HINT, *, status: int = 422
) -> Problem:
    detail = f"{field}: expected {expectation}, got {got}"
    return Problem(
        status, "bad_input", detail, field=field, expected=expectation, got=got, hint=hint
    )


def _fields(request: Request, path: list[Any]) -> list[str]:
    """The fields that the body of a route has where `path` names one that it lacks."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None or len(path) != 1:
        return []
    kind = route.body_field.field_info.annotation
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return list(kind.model_fields)
    return []
