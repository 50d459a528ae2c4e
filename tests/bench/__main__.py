"""Runs benchmarks by name, or lists them: `make bench`.

    python -m tests.bench small --rounds 5           tests/bench/bench_small.py with an option
    python -m tests.bench service service-page       one after another
    python -m tests.bench all                        every benchmark but the hours of `datapath`

A benchmark is a file bench_NAME.py; compare.py runs one at two commits. `peers` installs the
contenders of `datapath` that need an environment of their own, and `report` prints the goals of
every benchmark that ran here last.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.programs.table import Command, install_extras, module
from tests.support.fresh_clone import ROOT

_FOLDER = Path(__file__).parent
_OTHERS = {"peers": _FOLDER / "peers" / "__main__.py", "report": _FOLDER / "report.py"}
_AGAINST_TORCH = {"datapath", "diloco-rivals", "endtoend", "lenet", "nets", "steps", "torch"}


def list_benchmarks() -> dict[str, Path]:
    """Return the file of each benchmark, by its name for the command line."""
    files = sorted(_FOLDER.glob("bench_*.py"))
    return {file.stem.removeprefix("bench_").replace("_", "-"): file for file in files} | _OTHERS


def describe(file: Path) -> str:
    """Return the first line of a file's docstring."""
    return (ast.get_docstring(ast.parse(file.read_text())) or "").splitlines()[0]


def module_name(file: Path) -> str:
    """Return the name under which Python runs a file of this repository."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__main__")


def commands(names: list[str], options: list[str]) -> Iterator[Command]:
    """Yield the command of each named benchmark; raises SystemExit for an unknown name."""
    files = list_benchmarks()
    if names == ["all"]:
        names = [name for name in files if name not in {"datapath", "peers"}]
    for name in names:
        if name not in files:
            sys.exit(f"B={name}: expected all, or some of {', '.join(files)}")
    for name in names:
        yield module(module_name(files[name]), *options)


def main(*arguments: str) -> int:
    """Run the benchmarks named first, each with the options that follow."""
    first_option = next((n for n, word in enumerate(arguments) if word[:1] == "-"), len(arguments))
    names, options = list(arguments[:first_option]), list(arguments[first_option:])
    if not names:
        for name, file in list_benchmarks().items():
            print(f"make bench B={name:18} {describe(file)}")
        return 0
    runs = list(commands(names, options))
    if names == ["all"] or _AGAINST_TORCH & set(names):
        install_extras("bench")
    for command in runs:
        print("==", *command[2:], flush=True)
        if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return status
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
