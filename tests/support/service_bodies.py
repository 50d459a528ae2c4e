"""The bodies of the service's requests and answers in Markdown, from their types."""

import json
from collections.abc import Iterator, Mapping
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from msgspec import NODEFAULT, structs
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from deploy.service import api, maintenance_api, results_api
from deploy.service.answers import ANSWERS, OTHERS, DescribedApp
from tests.support.service_examples import EXAMPLES, REQUESTS

_PLAIN = {
    str: "text", int: "whole number", float: "number", bool: "true or false", NoneType: "null",
    dict: "object", list: "list",
}  # fmt: skip
_MEDIA = {
    "": "nothing, with status 204", "text/plain": "text", "text/html": "an HTML page",
    "text/event-stream": "server-sent events", "application/octet-stream": "the file",
}  # fmt: skip


def described() -> FastAPI:
    """An application with the routes of the interface, which answers nothing."""
    absent: Any = None  # describing the routes calls none of them
    dependencies = api.RouteDependencies(absent, absent, absent, absent, absent, absent)
    service = DescribedApp()
    service.include_router(api.routes(dependencies))
    service.include_router(results_api.routes(absent, absent))
    service.include_router(maintenance_api.routes(dependencies, absent, absent, absent))
    return service


def request_models() -> dict[str, type[BaseModel]]:
    """The model of each route's body, by method and path."""
    absent: Any = None
    dependencies = api.RouteDependencies(absent, absent, absent, absent, absent, absent)
    routers = (
        api.routes(dependencies),
        results_api.routes(absent, absent),
        maintenance_api.routes(dependencies, absent, absent, absent),
    )
    found = {}
    for router in routers:
        for route in router.routes:
            if isinstance(route, APIRoute) and route.body_field is not None:
                method = next(iter(route.methods or ()))
                path = route.path.removeprefix("/api/v1").replace(":path}", "}")
                found[f"{method} {path}"] = route.body_field.field_info.annotation
    return found  # type: ignore[return-value]  # FastAPI types an annotation as anything


def bodies() -> str:
    """A table of routes with links, then a section for each type."""
    requests = request_models()
    lines = ["| route | body | answer |", "| --- | --- | --- |"]
    for name, methods in described().openapi()["paths"].items():
        for method in methods:
            route = f"{method.upper()} {name.removeprefix('/api/v1')}"
            body = _link(requests[route]) if route in requests else ""
            answer = _link(ANSWERS[route]) if route in ANSWERS else _MEDIA[OTHERS[route]]
            lines.append(f"| `{route}` | {body} | {answer} |")
    parts = ["\n".join(lines), "## Types"]
    models = {kind.__name__: kind for kind in requests.values()}
    parts += [_section(models[name], REQUESTS[name]) for name in sorted(models)]
    answers = {kind.__name__: kind for kind in _reached(set(ANSWERS.values()))}
    parts += [_section(answers[name], example(answers[name])) for name in sorted(answers)]
    return "\n\n".join(parts)


def example(kind: Any, name: str = "") -> Any:
    """A value of a type as JSON; `name` is that of its field."""
    if name in EXAMPLES and not _fits_badly(kind, EXAMPLES[name]):
        return EXAMPLES[name]
    origin, inner = get_origin(kind), get_args(kind)
    if origin in {Union, UnionType}:
        return example(inner[0], name)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = get_type_hints(kind)
        return {each.name: example(hints[each.name], each.name) for each in structs.fields(kind)}
    if isinstance(kind, type) and issubclass(kind, Enum):
        return next(iter(kind)).value
    if origin in {list, tuple}:
        return [example(each) for each in (inner if ... not in inner else inner[:1])]
    if origin is dict:
        return {"name": example(inner[1], "")}
    return {str: "text", int: 1, float: 0.5, bool: True}.get(kind)


def _fits_badly(kind: Any, value: Any) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return True
    return False


def _reached(kinds: set[type[Any]]) -> set[type[Any]]:
    """These structs and those in their fields."""
    found: set[type[Any]] = set()
    left = list(kinds)
    while left:
        kind = left.pop()
        if kind not in found:
            found.add(kind)
            left += [each for hint in get_type_hints(kind).values() for each in _structs(hint)]
    return found


def _structs(hint: Any) -> Iterator[type[Any]]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for inner in get_args(hint):
        yield from _structs(inner)


def _section(kind: type[Any], shown: Any) -> str:
    text = " ".join((kind.__doc__ or "").split())
    rows = _fields_of(kind)
    meanings = any(meaning for *_, meaning in rows)
    heading = ["field", "type", "default", "meaning"] if meanings else ["field", "type", "default"]
    if not any(default for _, _, default, _ in rows):
        heading.remove("default")
    at = [["field", "type", "default", "meaning"].index(name) for name in heading]
    lines = [f"| {' | '.join(heading)} |", f"| {' | '.join('---' for _ in heading)} |"]
    lines += [f"| {' | '.join(row[column] for column in at)} |" for row in rows]
    lines_of = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in shown.items()]
    content = "{\n" + ",\n".join(lines_of) + "\n}"
    return "\n\n".join([f"### {kind.__name__}", text, "\n".join(lines), f"```json\n{content}\n```"])


def _fields_of(kind: type[Any]) -> list[tuple[str, str, str, str]]:
    """Name, type, default and meaning of each field."""
    if issubclass(kind, BaseModel):
        return [
            (
                f"`{name}`",
                in_words(field.annotation),
                "required" if field.is_required() else _default(field.default),
                field.description or "",
            )
            for name, field in kind.model_fields.items()
        ]
    hints = get_type_hints(kind)
    return [(f"`{each.name}`", in_words(hints[each.name]), "", "") for each in structs.fields(kind)]


def _default(value: Any) -> str:
    return "" if value is PydanticUndefined or value is NODEFAULT else f"`{json.dumps(value)}`"


def in_words(kind: Any) -> str:
    """A type as JSON has it."""
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any:
        return "anything"
    if origin in {Union, UnionType}:
        return " or ".join(in_words(each) for each in inner)
    if origin is Literal:
        return ", ".join(f"`{each}`" for each in inner)
    if origin in {list, tuple}:
        return f"list of {in_words(inner[0])}"
    if origin is dict or origin is Mapping:
        return "object" if inner[1] is Any else f"object of {in_words(inner[1])}"
    if isinstance(kind, type) and issubclass(kind, Enum):
        return ", ".join(f"`{each.value}`" for each in kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct | BaseModel):
        return (
            _link(kind)
            if issubclass(kind, msgspec.Struct)
            else "object: " + ", ".join(f"`{name}`" for name in kind.model_fields)
        )
    if hasattr(kind, "__metadata__"):
        return in_words(inner[0])
    return _PLAIN[kind]


def _link(kind: type[Any]) -> str:
    return f"[{kind.__name__}](#{kind.__name__.lower()})"
