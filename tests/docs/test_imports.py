"""The examples need no deep or private import: what the pages use is exported by the packages."""

import ast
import re
from collections.abc import Iterator
from importlib import import_module

import pytest

from tests.support.doc_pages import PAGES, fences, prose, read

FACADES = (
    "ps",
    "worker",
    "worker.caffe",
    "worker.caffe.python_nets",
    "worker.strategies",
    "worker.jax",
    "worker.keras",
    "worker.ml",
    "worker.sklearn",
    "worker.torch",
    "deploy",
    "deploy.experiments",
    "cupy_kernels",
    "cupy_kernels.ops",
    "cupy_kernels.ops.activation",
    "cupy_kernels.ops.updates",
    "cupy_kernels.emulator",
)
"""The packages whose names are for users."""

_OF_MODULES = {"cupy_kernels", "cupy_kernels.ops", *(f for f in FACADES if ".ops." in f)}
"""Packages whose modules are their public names."""

_PACKAGES = {"cupy_kernels", "shards", "ps", "worker", "deploy", "tests"}
_NAME = re.compile(r"`(ps|worker)\.(\w+)")
_LOGGERS = {"job_runner"}  # worker.job.runner is the name of a logger


def imports(code: str) -> Iterator[tuple[str, str | None]]:
    """The modules of this project that a block imports, each with the name taken from it."""
    for node in ast.walk(ast.parse(code)):
        found: list[tuple[str, str | None]]
        if isinstance(node, ast.Import):
            found = [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found = [(node.module or ".", alias.name) for alias in node.names]
        else:
            continue
        yield from (one for one in found if one[0].split(".")[0] in _PACKAGES)


def faults(code: str) -> list[str]:
    """The deep and private names that a block of Python uses."""
    found = []
    for module, name in imports(code):
        if module not in FACADES:
            found.append(f"import of {module}")
        elif name and module not in _OF_MODULES and name not in exported(module):
            found.append(f"{module} does not export {name}")
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Attribute(value=ast.Name(id="ps" | "worker" | "deploy" as module), attr=name):
                if name not in exported(module) and f"{module}.{name}" not in FACADES:
                    found.append(f"{module} does not export {name}")
            case ast.Attribute(value=value, attr=name) if name[0] == "_" and name[-1] != "_":
                if not (isinstance(value, ast.Name) and value.id == "self"):
                    found.append(f"private {name}")
    return found


def exported(module: str) -> set[str]:
    return set(getattr(import_module(module), "__all__", ()))


@pytest.mark.parametrize("page", [page for page in PAGES if "```python" in read(page)])
def test_examples_import_from_facades(page: str) -> None:
    """Every import and every attribute of a package is one of its public names."""
    blocks = [fence for fence in fences(read(page)) if fence.language == "python"]
    wrong = [f"line {block.line}: {fault}" for block in blocks for fault in faults(block.text)]
    assert wrong == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != "CHANGELOG.md"])
def test_names_in_sentences_are_public(page: str) -> None:
    """So is a name of `ps` or `worker` that a sentence mentions."""
    named = {(module, name) for module, name in _NAME.findall(prose(read(page)))}
    wrong = [
        f"{module}.{name}"
        for module, name in sorted(named)
        if name not in exported(module) | _LOGGERS and f"{module}.{name}" not in FACADES
    ]
    assert wrong == []


def test_deep_imports_are_found() -> None:
    """The check finds a deep module, a private name and a name that is not exported."""
    assert faults("import ps\nfrom worker import train\nps.Worker") == []
    assert faults("from shards.rules import SGD") == ["import of shards.rules"]
    assert faults("import ps.client") == ["import of ps.client"]
    assert faults("import ps\nps.client.Client") == ["ps does not export client"]
    assert faults("import ps\nps.Worker._call") == ["private _call"]
    assert faults("from worker.caffe import fillers") == ["worker.caffe does not export fillers"]
