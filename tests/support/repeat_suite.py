"""Runs the test command again and again, each time in a fresh clone, and records each run.

    python -m tests.support.repeat_suite --runs 20 --out ~/repeats.jsonl [--busy]

A clone is made of the commit that is checked out; changes that are not committed are not in it.
Each run appends one line of JSON to the file, so an interrupted series loses only the run in
progress. The exit status is 0 if every run passed.
"""

import argparse
import contextlib
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from tests.support.fresh_clone import ROOT, fresh_clone

_TOTALS = re.compile(r"^=* ?(.*\b(?:passed|failed|errors?)\b.*) in ([\d.]+)s")
_COUNT = re.compile(r"(\d+) (passed|failed|errors?)\b")
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+)")


class Run(msgspec.Struct, frozen=True):
    """One run. `seconds` are those of the whole command, with the installation; `tests_s` those
    that pytest reports. `failed` counts errors too.
    """

    commit: str
    busy: bool
    seconds: float
    status: int
    tests_s: float
    passed: int
    failed: int
    failures: list[str]


def parsed(output: str) -> tuple[float, int, int, list[str]]:
    """Pytest's seconds, the tests that passed and failed, and the names of those that failed."""
    seconds, counts, failures = 0.0, {"passed": 0, "failed": 0}, []
    for line in output.splitlines():
        if found := _FAILURE.match(line):
            failures.append(found[1])
        if found := _TOTALS.match(line):
            seconds, counts = float(found[2]), {"passed": 0, "failed": 0}
            for number, kind in _COUNT.findall(found[1]):
                counts["passed" if kind == "passed" else "failed"] += int(number)
    return seconds, counts["passed"], counts["failed"], failures


@contextlib.contextmanager
def busy_cores(busy: bool) -> Iterator[None]:
    """If `busy`, keep each core busy with a process that only computes."""
    spin = [sys.executable, "-c", "while True: pass"]
    children = [subprocess.Popen(spin) for _ in range(os.cpu_count() or 1) if busy]
    try:
        yield
    finally:
        for child in children:
            child.kill()
            child.wait()


def clean_environment() -> dict[str, str]:
    """The environment without what `make` and its caller's Python add to it."""
    added = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "MFLAGS", "PYTHONPATH", "VIRTUAL_ENV")
    return {name: value for name, value in os.environ.items() if name not in added}


def run_once(commit: str, command: Sequence[str], *, busy: bool, log: Path) -> Run:
    """Run `command` in a fresh clone at `commit`; its output goes to `log`."""
    with tempfile.TemporaryDirectory(prefix="repeat-") as folder:
        clone = Path(folder) / "clone"
        fresh_clone(commit, clone)
        started = time.monotonic()
        with busy_cores(busy), log.open("w") as output:
            status = subprocess.run(
                command,
                cwd=clone,
                env=clean_environment(),
                stdout=output,
                stderr=subprocess.STDOUT,
                check=False,
            ).returncode
        seconds = time.monotonic() - started
    return Run(commit, busy, round(seconds, 1), status, *parsed(log.read_text(errors="replace")))


def summary(runs: Sequence[Run]) -> str:
    """What the runs have in common: how many passed, how long they took, and what failed."""
    good = [run for run in runs if run.status == 0]
    shortest, longest = min(run.seconds for run in runs), max(run.seconds for run in runs)
    lines = [f"{len(good)} of {len(runs)} runs passed, {shortest:.0f} to {longest:.0f} s each"]
    lines += [
        f"run {number}: status {run.status}: {', '.join(run.failures) or 'no test is named'}"
        for number, run in enumerate(runs, 1)
        if run.status
    ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path, required=True, help="appended to; outside the tree")
    parser.add_argument("--busy", action="store_true", help="keep every core busy meanwhile")
    parser.add_argument("--command", default="make test", help="what the README says")
    given = parser.parse_args(arguments)
    out = given.out.expanduser().resolve()
    if out.is_relative_to(ROOT):
        parser.error(f"--out: expected a file outside {ROOT}, got {out}")
    if given.runs < 1:
        parser.error(f"--runs: expected at least 1, got {given.runs}")
    revision = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    commit = subprocess.run(revision, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()
    runs = []
    for number in range(1, given.runs + 1):
        log = out.with_suffix(f".{number}.log")
        run = run_once(commit, shlex.split(given.command), busy=given.busy, log=log)
        if run.status == 0:
            log.unlink()  # the output of a run that failed is kept next to the file
        runs.append(run)
        with out.open("ab") as lines:
            lines.write(msgspec.json.encode(run) + b"\n")
        print(
            f"run {number}: status {run.status}, {run.passed} passed, {run.failed} failed,"
            f" {run.seconds:.0f} s",
            flush=True,
        )
    print(summary(runs))
    return int(any(run.status for run in runs))


if __name__ == "__main__":
    sys.exit(main())
