"""The rules of the house that no type checker knows; import chains are import-linter's."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping, Set
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("cupy_kernels", "shards", "ps", "worker", "deploy")
HEAVY = ("cupy", "numba", "pyarrow", "pyspark", "ray")
SPARK = {
    f"worker/spark/{name}.py"
    for name in (
        "__init__",
        "daemon",
        "executors",
        "failures",
        "frames",
        "preflight",
        "rehearsal",
        "session",
        "streams",
        "tasks",
    )
}
SPARK_ML = {
    f"worker/ml/{name}.py" for name in ("columns", "estimators", "models", "params", "saved")
}


class Function(NamedTuple):
    """Where a function is, and how large."""

    where: str
    parameters: int
    lines: int


class ParsedFile(NamedTuple):
    """A file's docstring, its functions, and what it imports, by full name, wherever in it."""

    docstring: str | None
    functions: list[Function]
    imports: set[str]


@cache  # to parse all files takes seconds
def read_file(path: Path) -> ParsedFile:
    """The parts of a file that the tests look at."""
    tree = ast.parse(path.read_text())
    parsed = ParsedFile(ast.get_docstring(tree), [], set())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            parsed.imports.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            parsed.imports.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            where = f"{path.relative_to(ROOT).as_posix()}: {node.name}"
            parsed.functions.append(Function(where, parameters(node), lines(node)))
    return parsed


def files_that_import(library: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if any(name.split(".")[0] == library for name in read_file(path).imports)
    }


@pytest.mark.parametrize("package", ["shards", "ps", "worker"])
def test_import_is_light(package: str) -> None:
    """Importing a package loads no Ray, PySpark, CuPy, Arrow or compiler: executors lack them."""
    script = f"import sys, {package}; print(*sorted(set(sys.modules) & set({HEAVY!r})))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []


def test_the_command_line_loads_the_simulators_only_to_simulate() -> None:
    """Neither importing the command line nor `train --help` loads a simulator or an experiment."""
    script = (
        "import sys; from deploy.cli.app import app; "
        "app(['train', '--help'], standalone_mode=False); "
        "homes = 'deploy.simulation.', 'deploy.experiments'; "
        "print([name for name in sys.modules if name.startswith(homes)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "--workers" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("library", "doors"),
    [
        ("ray", {"ps/launch/ray_actors.py", "deploy/clusters/ray_cluster.py"}),
        # A data source is a class of PySpark's, which Spark's own processes load by its name.
        ("pyspark", SPARK | SPARK_ML | {"worker/tfrecord/source.py"}),
        ("py4j", SPARK),
        ("cupy", {"cupy_kernels/cupy_device.py"}),
        ("xxhash", {"shards/checksums.py"}),
        ("structlog", {"ps/logs.py"}),
        ("logging", {"ps/logs.py", "worker/spark/session.py"}),  # the latter filters Py4J's records
    ],
)
def test_one_door_each(library: str, doors: set[str]) -> None:
    """A library with a door of its own is imported there and nowhere else."""
    assert files_that_import(library) <= doors


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def modules_imported(tree: ast.AST, known: Set[str]) -> Iterator[str]:
    """The `known` modules that a file imports at any depth, but not for annotations only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from known & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield from known & {inner if inner in known else str(node.module)}
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from modules_imported(ast.Module(node.orelse, []), known)
        else:
            yield from modules_imported(node, known)


def reached_from(module: str, imports: Mapping[str, Set[str]]) -> set[str]:
    """All modules that importing `module` may load, sooner or later."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        new = imports[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_no_file_imports_itself() -> None:
    """No file imports another that imports it, in however many steps, also inside functions.

    So any file can be read, tested and moved with only those below it.
    """
    files = {
        module_of(path): path for package in PACKAGES for path in (ROOT / package).rglob("*.py")
    }
    imports = {
        module: set(modules_imported(ast.parse(path.read_text()), files.keys())) - {module}
        for module, path in files.items()
    }
    reached = {module: reached_from(module, imports) for module in imports}
    assert {
        tuple(sorted(other for other in reached[module] if module in reached[other]))
        for module in imports
        if module in reached[module]
    } == set()


def test_no_pickle() -> None:
    """No file of ours imports pickle or a library that is another name for it."""
    for library in ("pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"):
        assert files_that_import(library) == set()


def test_no_test_module_is_imported() -> None:
    """What several tests share is in tests/support or in a conftest, not in another test."""
    imports = {
        f"{path.relative_to(ROOT).as_posix()}: {name}"
        for path in (ROOT / "tests").rglob("*.py")
        for name in read_file(path).imports
        if name.startswith("tests.")
        and any(part == "conftest" or part.startswith("test_") for part in name.split("."))
    }
    assert imports == set()


def test_every_file_says_why_it_exists() -> None:
    """Each module opens with a docstring, but a package's empty `__init__`."""
    silent = [
        path.relative_to(ROOT).as_posix()
        for package in (*PACKAGES, "tests")
        for path in (ROOT / package).rglob("*.py")
        if path.read_text().strip()
        and not path.name.endswith("_pb2.py")
        and not read_file(path).docstring
    ]
    assert silent == []


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of a function's parameters, without `self` or `cls`."""
    given = node.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    own = names[:1] in (["self"], ["cls"])
    return len(names) + len([each for each in (given.vararg, given.kwarg) if each]) - own


def lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The number of a function's lines, without its docstring."""
    docstring = node.body[0] if ast.get_docstring(node) else None
    said = docstring.end_lineno - docstring.lineno + 1 if docstring else 0  # type: ignore[operator]
    return node.end_lineno - node.lineno + 1 - said  # type: ignore[operator]


def functions() -> list[Function]:
    """Every function of the shipped packages."""
    return [
        function
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for function in read_file(path).functions
    ]


def test_options_travel_in_structs() -> None:
    """No function has more than 12 parameters: what belongs together is passed as one value."""
    assert [function for function in functions() if function.parameters > 12] == []


def test_functions_are_short() -> None:
    """No function has more than 90 lines besides its docstring."""
    assert [function for function in functions() if function.lines > 90] == []


def test_build_pin_is_one() -> None:
    """The build backend is pinned to the same version where it is asked for and where locked."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (backend,) = project["build-system"]["requires"]
    assert backend in project["dependency-groups"]["build"]
    assert f"\n{backend} \\" in (ROOT / "constraints-build.txt").read_text()


def test_locks_name_hashes_and_no_index() -> None:
    """Every locked package carries a hash, and neither lock names an address."""
    for lock in ("constraints.txt", "constraints-build.txt"):
        lines = (ROOT / lock).read_text().splitlines()
        pins = [n for n, line in enumerate(lines) if line and not line.startswith((" ", "#"))]
        assert pins
        assert all("==" in lines[n] and "--hash=sha256:" in lines[n + 1] for n in pins)
        assert not any("://" in line for line in lines)
