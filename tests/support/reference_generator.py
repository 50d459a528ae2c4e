"""Writes the parts of the pages that follow from the code: `make docs`.

A short part stands in a page between `<!-- generated: NAME -->` and `<!-- end -->`; a test compares
the pages with what this would write. Long parts are in the built site alone: the page has a line
`<!-- built: NAME -->`, which docs/conf.py replaces. `PARTS` maps each name to the function that
writes it.
"""

import ast
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from types import FunctionType, ModuleType
from typing import Any

import msgspec
from typer.core import TyperGroup

import deploy
import ps
import worker
import worker.caffe
import worker.caffe.python_nets
import worker.ml
import worker.strategies
import worker.torch
from deploy.cli.app import command_line
from deploy.cli.command_layout import GROUPS
from deploy.run import evaluations_csv, updates_parquet
from deploy.run import folder as run_folder
from deploy.run.settings import TrainSettings
from deploy.run.summary import Summary
from tests.support.doc_pages import PAGES, ROOT, read
from worker.caffe.layer import HostLayer, Layer
from worker.caffe.registry import FAMILIES
from worker.job.option_fields import Options, list_options
from worker.strategies import Base

_PART = re.compile(r"(<!-- generated: (.+?) -->\n).*?(<!-- end -->\n)", re.DOTALL)
_BUILT = re.compile(r"^<!-- built: (.+?) -->\n", re.MULTILINE)
_OURS = {"ps", "worker", "shards"}
_PUBLIC_BASES = {ps.UpdateRule, Base}
_STARS: dict[Any, str] = {
    inspect.Parameter.VAR_POSITIONAL: "*",
    inspect.Parameter.VAR_KEYWORD: "**",
}
_DEFAULT = re.compile(r"\s*\\\[default: (.*)\]")


def table(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


# The command line.


def commands(group: TyperGroup, before: str = "") -> Iterator[tuple[str, Any]]:
    """Every command by its words, those of a group after the group's name."""
    for name, command in group.commands.items():
        if isinstance(command, TyperGroup):
            yield from commands(command, f"{before}{name} ")
        else:
            yield before + name, command


_PARSED = re.compile(r"Parsed\[(.+), (.+)\]")  # what a field holds, and what may be given


def _all_commands() -> dict[str, Any]:
    return dict(commands(command_line()))


COMMANDS = _all_commands()


def default_of(option: Any) -> str:
    """The default that `--help` shows; empty for none."""
    shown = _DEFAULT.search(option.help or "")
    if shown:
        return shown[1]
    if isinstance(option.show_default, str):
        return option.show_default
    if option.required:
        return "required"
    return "" if option.default is None or option.is_flag else str(option.default)


def _option_row(option: Any) -> list[str]:
    names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
    help_text = _DEFAULT.sub("", option.help)
    kind = option.type_descriptor.annotation
    values = [str(value) for value in kind] if _is_enum(kind) else []
    if any(value not in help_text for value in values):
        help_text += f" One of {', '.join(values)}."
    return [names, _escaped(default_of(option)), _escaped(help_text)]


def _escaped(text: str) -> str:
    """Text of a table's cell, with option names as code unless they are in code already."""
    text = text.replace("|", r"\|")
    quoted = r"(`[^`]*`)|(?<![\w-])(--[a-z][a-z-]*)"
    return re.sub(quoted, lambda found: found[1] or f"`{found[2]}`", text)


def command_groups() -> str:
    """The groups of commands, each with the first sentence of every command's help."""
    parts = []
    for group, members in GROUPS.items():
        rows = []
        for name, command in COMMANDS.items():
            if name.partition(" ")[0] in members:
                link = f"[`downpour {name}`](#downpour-{name.replace(' ', '-')})"
                rows.append((link, _escaped(_prose(command.help).partition("\n\n")[0])))
        parts.append(f"**{group}**\n\n{table(['command', 'what it does'], rows)}")
    return "\n\n".join(parts)


def options(name: str) -> str:
    """The description of a command and the tables of its arguments and options."""
    command = COMMANDS[name]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    parts = [_prose(command.help)]
    if arguments:
        rows = [(f"`{p.name.upper()}`", _escaped(p.help)) for p in arguments]
        parts.append(table(["argument", "meaning"], rows))
    panels: dict[str | None, list[Any]] = {}
    for option in command.params:
        if option not in arguments:
            panels.setdefault(option.rich_help_panel, []).append(option)
    for panel, members in panels.items():
        heading = [panel or "option", "default", "meaning"]
        parts.append(table(heading, [_option_row(option) for option in members]))
    return "\n\n".join(parts)


# Files.


def files() -> str:
    folders = {run_folder.SNAPSHOTS, run_folder.LOGS}
    rows = [(f"`{n}{'/' * (n in folders)}`", what) for n, what in run_folder.FILES.items()]
    return table(["file", "contents"], rows)


def update_columns() -> str:
    rows = [
        (f"`{name}`", str(column.type), column.unit, column.meaning)
        for name, column in updates_parquet.COLUMNS.items()
    ]
    return table(["column", "type", "unit", "meaning"], rows)


def evaluation_columns() -> str:
    rows = [(f"`{name}`", meaning) for name, meaning in evaluations_csv.COLUMNS.items()]
    outputs = ("`accuracy`, `loss`, ...", "One column for each output of the test nets.")
    return table(["column", "meaning"], [*rows, outputs])


def summary_keys() -> str:
    texts, types = field_docs(Summary), annotations(Summary)
    rows = [
        (f"`{name}`", _json_type(types[name]), " ".join(texts[name].split()))
        for name in Summary.__struct_fields__
    ]
    return table(["key", "value", "meaning"], rows)


def caffe_layers() -> str:
    """A table for each family of layers: a type, its fields, and how it runs on a GPU."""
    parts = []
    for family in FAMILIES:
        title = inspect.cleandoc(family.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        rows = [
            (
                f"`{name}`",
                _on_a_gpu(layer),
                _escaped(" ".join(_prose(layer.__doc__).split())),
                _fields(layer),
            )
            for name, layer in family.ROWS.items()
        ]
        parts.append(f"{title}\n\n{table(['type', 'on a GPU', 'what it does', 'fields'], rows)}")
    return "\n\n".join(parts)


def _on_a_gpu(layer: type[Layer]) -> str:
    """How a layer runs in a network on a GPU."""
    if issubclass(layer, HostLayer):
        return "on the host"
    return "kernels" if layer.captures else "kernels, not captured"


def _fields(layer: type[Layer]) -> str:
    """The fields that a layer honours, by message."""
    messages = layer.SUPPORTED_FIELDS.items()
    return "; ".join(
        f"`{name}`" + (f": {', '.join(sorted(fields))}" if fields else "")
        for name, fields in messages
    )


def setting_keys() -> str:
    return table(["key", "value", "default", "option"], _settings())


def _settings() -> Iterator[tuple[str, str, str, str]]:
    """The keys of `settings.json`, which are the options of the command."""
    for name, each in list_options(TrainSettings).items():
        kind = each.kind.__name__ + (" | None" if each.optional else "")
        default = "" if each.is_required else _json(each.default)
        yield f"`{name}`", _json_type(kind), default, f"`{TrainSettings.label_option(name)}`"


def _json(value: object) -> str:
    return f"`{msgspec.json.encode(value).decode()}`"


def _json_type(annotation: str) -> str:
    """What stands in a JSON file for a value of a Python type."""
    names = {"None": "null", "int": "integer", "float": "number", "bool": "true or false"}
    lists = {"tuple[str, ...]": "list of strings"}
    kinds = (part.strip() for part in annotation.split("|"))
    return " or ".join(names.get(kind, lists.get(kind, "string")) for kind in kinds)


# Public names.


def annotations(of: Any) -> dict[str, str]:
    """The annotations of a function's parameters, or of a class's fields, as they are written."""
    node = _node(of)
    if isinstance(node, ast.ClassDef):
        return {
            statement.target.id: ast.unparse(statement.annotation)
            for statement in node.body
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
        }
    parameters = node.args
    every = [*parameters.posonlyargs, *parameters.args, *parameters.kwonlyargs]
    every += [a for a in (parameters.vararg, parameters.kwarg) if a]
    return {a.arg: ast.unparse(a.annotation).strip("'") for a in every if a.annotation}


def field_docs(of: type) -> dict[str, str]:
    """The docstrings below the fields of a class, by field."""
    node = _node(of)
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, text in zip(node.body, node.body[1:], strict=False):
        match field, text:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(doc))),
            ):
                found[name] = doc.strip()
    return found


def _node(of: Any) -> ast.ClassDef | ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(of))))
    node = tree.body[0]
    assert isinstance(node, ast.ClassDef | ast.FunctionDef), of
    return node


def signature(name: str, of: Any) -> str:
    """How a function or class is called, with types and defaults, in a block of code."""
    called = inspect.signature(of)
    plain_class = isinstance(of, type) and not _is_struct(of)
    source = inspect.getattr_static(of, "__init__") if plain_class else of
    types = annotations(source)
    fields_of = getattr(of, "options", of)  # a function of options has them as keywords
    for base in fields_of.__mro__ if _is_struct(fields_of) else ():
        if base.__module__.split(".")[0] in _OURS:
            types = annotations(base) | types
    types = {name: _PARSED.sub(r"\1 | \2", kind) for name, kind in types.items()}
    parts = []
    for parameter in called.parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in parts:
            parts.append("*")
        written = f"{_STARS.get(parameter.kind, '')}{parameter.name}"
        if parameter.name in types:
            written += f": {types[parameter.name]}"
        if parameter.default is not parameter.empty:
            space = " " if parameter.name in types else ""
            written += f"{space}={space}{_default(parameter.default)}"
        parts.append(written)
    arrow = _returned(of)
    line = f"{name}({', '.join(parts)}){arrow}"
    if len(line) > 96:
        line = f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){arrow}"
    return f"```text\n{line}\n```"


def _returned(of: Any) -> str:
    node = _node(of)
    if isinstance(node, ast.ClassDef) or node.returns is None:
        return ""
    text = ast.unparse(node.returns).strip("'")
    if hasattr(of, "__wrapped__") and inspect.isgeneratorfunction(of.__wrapped__):
        text = text.replace("Iterator", "AbstractContextManager", 1)
    return f" -> {text}"


def _default(value: object) -> str:
    """A default as a caller would write it; dots for one that takes more than a line."""
    text = repr(value.value if isinstance(value, enum.Enum) else value)
    return "..." if "<" in text else text


def _is_enum(of: Any) -> bool:
    return isinstance(of, type) and issubclass(of, enum.Enum)


def _is_struct(of: Any) -> bool:
    return isinstance(of, type) and issubclass(of, msgspec.Struct | Options)


def names(module: ModuleType, wanted: Callable[[Any], bool] = lambda _: True) -> str:
    """Sections on those public names of a module that are `wanted`."""
    prefix = module.__name__
    public = {name: getattr(module, name) for name in sorted(module.__all__) if name[0] != "_"}
    parts = [_section(f"{prefix}.{name}", value) for name, value in public.items() if wanted(value)]
    return "\n\n".join(parts)


def _is_function(value: Any) -> bool:
    return not isinstance(value, type | ModuleType)


def _is_module(value: Any) -> bool:
    return isinstance(value, ModuleType)


def _is_no_layer(value: Any) -> bool:
    """The functions for types of layers are described on the page of layers."""
    return not isinstance(value, partial)


def _is_error(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Exception)


def _is_class(value: Any) -> bool:
    return isinstance(value, type) and not _is_error(value)


def _section(name: str, value: Any) -> str:
    parts = [f"### `{name}`"]
    if _is_enum(value):
        parts.append(_prose(value.__doc__))
        parts.append("Values: " + ", ".join(f"`{member.value}`" for member in value) + ".")
    elif _is_error(value):
        base = value.__mro__[1]
        parts.append(f"A subclass of `{base.__name__}`. {_prose(value.__doc__)}")
    elif isinstance(value, ModuleType):
        parts.append(_prose(value.__doc__))
    elif callable(value):
        own_init = getattr(value, "__init__", None) is not object.__init__
        if own_init and not getattr(value, "_is_protocol", False):
            parts.append(signature(name, value))
        parts.append(_prose(inspect.getdoc(value)))
    elif isinstance(value, dict):
        parts.append("Keys: " + ", ".join(f"`{key}`" for key in value) + ".")
    else:
        parts.append(f"`{value!r}`")
    if _is_class(value) and not _is_enum(value):
        bases = [f"`{base.__name__}`" for base in value.__mro__[1:] if base in _PUBLIC_BASES]
        parts += [f"A subclass of {', '.join(bases)}."] if bases else []
        parts += [_member(value.__name__, *member) for member in members(value)]
    return "\n\n".join(parts)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """The public methods and properties of a class, without those that a public base describes."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if base.__module__.split(".")[0] in _OURS and (base is kind or base not in _PUBLIC_BASES):
            found |= vars(base)
    for base in _PUBLIC_BASES & set(kind.__mro__[1:]):
        found = {name: value for name, value in found.items() if not hasattr(base, name)}
    for name, value in found.items():
        if name.startswith("_"):
            continue
        if isinstance(value, FunctionType | staticmethod | classmethod | property):
            yield name, value


def _member(owner: str, name: str, value: Any) -> str:
    if isinstance(value, property):
        return f"**`{name}`**: {_prose(inspect.getdoc(value))}"
    function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
    called = signature(f"{owner}.{name}", function).replace("(cls, ", "(").replace("(cls)", "()")
    return f"{called}\n\n{_prose(inspect.getdoc(function))}"


def _prose(docstring: str | None) -> str:
    """A docstring as Markdown: one line for each paragraph or item, and no accidental emphasis."""
    assert docstring, "expected a docstring"
    blocks = []
    for block in inspect.cleandoc(docstring).split("\n\n"):
        if block.startswith("    "):
            blocks.append(f"```text\n{textwrap.dedent(block)}\n```")
            continue
        lines = re.sub(r"\n(?!- )\s*", " ", block)
        pieces = re.split(r"(`[^`]*`)", lines)
        for index in range(0, len(pieces), 2):
            plain = re.sub(r"([*<])", r"\\\1", pieces[index])
            pieces[index] = re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", plain)
        blocks.append("".join(pieces))
    return "\n\n".join(blocks)


def service_routes() -> str:
    """Every route of the service, from its description for programs."""
    from deploy.service.route_roles import RULES
    from tests.support.service_bodies import described

    rules = {route.replace(":path}", "}"): rule for route, rule in RULES.items()}
    rows = []
    for path, methods in described().openapi()["paths"].items():
        for method, each in methods.items():
            query = [p["name"] for p in each.get("parameters", ()) if p["in"] == "query"]
            meaning = " ".join(each["description"].split())
            shown = ", ".join(f"`{name}`" for name in query)
            rule = rules[f"{method.upper()} {path}"]
            role = (
                str(rule.role)
                if rule.owner_role is None
                else f"{rule.role}; {rule.owner_role} for its own"
            )
            name = f"`{method.upper()} {path.removeprefix('/api/v1')}`"
            rows.append((name, shown, role, meaning))
    return table(["route", "query", "role", "meaning"], rows)


def service_bodies() -> str:
    """The bodies of the service's requests and answers."""
    from tests.support.service_bodies import bodies

    return bodies()


PARTS: dict[str, Callable[[], str]] = {
    **{f"downpour {name}": lambda name=name: options(name) for name in COMMANDS},  # type: ignore[misc]
    "command groups": command_groups,
    "run folder": files,
    "updates.parquet": update_columns,
    "evaluations.csv": evaluation_columns,
    "summary.json": summary_keys,
    "settings.json": setting_keys,
    "caffe layers": caffe_layers,
    "functions of ps": lambda: names(ps, _is_function),
    "classes of ps": lambda: names(ps, _is_class),
    "errors of ps": lambda: names(ps, _is_error),
    "modules of ps": lambda: names(ps, _is_module),
    "functions of worker": lambda: names(worker, _is_function),
    "classes of worker": lambda: names(worker, _is_class),
    "worker.caffe": lambda: names(worker.caffe),
    "worker.caffe.python_nets": lambda: names(worker.caffe.python_nets, _is_no_layer),
    "worker.strategies": lambda: names(worker.strategies),
    "worker.ml": lambda: names(worker.ml),
    "worker.torch": lambda: names(worker.torch),
    "deploy": lambda: names(deploy),
    "routes of the service": service_routes,
    "bodies of the service": service_bodies,
}


@cache
def write_part(name: str) -> str:
    """Return a part; it is written once, because the tests build pages often."""
    return PARTS[name]()


def current(text: str) -> str:
    """A page's text with every generated part as the code has it now."""
    return _PART.sub(lambda found: f"{found[1]}\n{write_part(found[2])}\n\n{found[3]}", text)


def build_page(text: str) -> str:
    """Return a page's text with the parts that only the built site has."""
    return _BUILT.sub(lambda marker: f"{write_part(marker[1])}\n", text)


def parts_of(text: str) -> list[str]:
    """The names of the parts of a page that follow from the code."""
    return [part[2] for part in _PART.finditer(text)] + _BUILT.findall(text)


def main() -> None:
    for page in PAGES:
        text = read(page)
        if (new := current(text)) != text:
            (ROOT / page).write_text(new)
            sys.stdout.write(f"{page}\n")


if __name__ == "__main__":
    main()
