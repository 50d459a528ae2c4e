"""Programs that run for minutes or hours, by the name that `make` starts them with.

A program is a function: its keyword parameters are its options, all text, as `make` passes them;
it yields the commands that it consists of, and its docstring says what it does. What it yields next
may depend on what the commands before have left.
"""

import inspect
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from tests.support.fresh_clone import ROOT

Command = list[str]
Commands = Iterator[Command]
BIN = Path(sys.executable).parent


class Program(NamedTuple):
    """A program of the repository; `extras` of pyproject.toml are installed before it runs."""

    yield_commands: Callable[..., Commands]
    duration: str
    extras: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """Return the docstring of the program as one paragraph."""
        return " ".join((inspect.getdoc(self.yield_commands) or "").split())

    @property
    def options(self) -> dict[str, str]:
        """Return the default of each option, by the option's name for `make`."""
        parameters = inspect.signature(self.yield_commands).parameters
        return {name.upper(): str(value.default) for name, value in parameters.items()}


Programs = dict[str, Program]


def register(
    programs: Programs, name: str, *, duration: str, extras: tuple[str, ...] = ()
) -> Callable[[Callable[..., Commands]], Callable[..., Commands]]:
    """Return a decorator that enters a function into `programs`."""

    def enter(yield_commands: Callable[..., Commands]) -> Callable[..., Commands]:
        assert name not in programs
        programs[name] = Program(yield_commands, duration, extras)
        return yield_commands

    return enter


def module(name: str, *words: object, **options: str) -> Command:
    """Return the command that runs a module, without the options that are empty."""
    command = [sys.executable, "-m", name, *map(str, words)]
    for option, value in options.items():
        command += [f"--{option.replace('_', '-')}", value] if value else []
    return command


def downpour(*words: object) -> Command:
    """Return a command of `downpour`."""
    return [str(BIN / "downpour"), *map(str, words)]


def install_extras(*extras: str) -> None:
    """Install optional dependencies of this project that are no part of its locks."""
    options = ["--quiet", "--no-build-isolation", "--editable"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", *options]
    subprocess.run([*pip, f".[{','.join(extras)}]"], cwd=ROOT, check=True)


def list_programs(programs: Programs, variable: str, target: str) -> Iterator[str]:
    """Yield the lines that describe all programs of a table."""
    for name, program in programs.items():
        options = " ".join(f"{key}={value}" for key, value in program.options.items())
        yield f"make {target} {variable}={name} {options}".rstrip()
        yield f"    {program.summary} ({program.duration})"


def check_request(
    programs: Programs, variable: str, given: Mapping[str, str]
) -> tuple[Program, dict[str, str]]:
    """Return the program that the variables of `make` name, and its options.

    Raises SystemExit for a name or an option that there is not.
    """
    name = given.get(variable, "")
    if name not in programs:
        sys.exit(f"{variable}={name}: expected one of {', '.join(programs)}")
    program = programs[name]
    options = {key: value for key, value in given.items() if key not in {variable, "PYTHON"}}
    if unknown := options.keys() - program.options.keys():
        known = ", ".join(program.options) or "none"
        sys.exit(f"{variable}={name}: no option {', '.join(sorted(unknown))}; it has {known}")
    return program, options


def run_program(program: Program, options: Mapping[str, str]) -> int:
    """Run the commands of a program up to the first that fails; returns its exit status."""
    if program.extras:
        install_extras(*program.extras)
    arguments = {name.lower(): value for name, value in options.items()}
    for command in program.yield_commands(**arguments):
        print("==", *command, flush=True)
        if status := subprocess.run(command, cwd=ROOT, check=False).returncode:
            return status
    return 0
