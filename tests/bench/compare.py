"""Benchmarks at an earlier commit and at the present one, in turn: two columns and their ratio.

    python -m tests.bench.compare e339319 small datapath --rounds 5
    python -m tests.bench.compare e339319 small -- --floats 1000000

Both run in fresh clones with this interpreter and its packages, so only this project's own code
differs. What follows `--` is passed to each benchmark, and must be known at both commits. A round
runs each once, in alternating order. A figure is every number that the benchmark writes to
runs/bench/; medians over the rounds are printed, and the median of the ratios within a round.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.support.fresh_clone import fresh_clone

Figures = dict[str, float]


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in parsed JSON, under the names that lead to them; a list's items share one."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{name} {key}".strip())
    elif isinstance(value, list):
        for part in value:
            yield from leaves(part, name)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield name, float(value)


def figures_of(folder: Path) -> Figures:
    """The figures that a benchmark has written below `folder`, without its goals' targets."""
    found: dict[str, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        for name, number in leaves(json.loads(path.read_text()), path.stem):
            found[name].append(number)
    for path in sorted((folder / "goals").glob("*.json")):
        for row in json.loads(path.read_text()):
            found[f"goal: {row['name']}"].append(row["measured"])
    return {name: statistics.median(numbers) for name, numbers in found.items()}


def measure(tree: Path, benches: Sequence[str], arguments: Sequence[str]) -> Figures:
    """Run benchmarks of the clone `tree`; raises CalledProcessError where one fails."""
    for bench in benches:
        subprocess.run(
            [sys.executable, f"tests/bench/bench_{bench.replace('-', '_')}.py", *arguments],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
    return figures_of(tree / "runs" / "bench")


def table(before: Sequence[Figures], after: Sequence[Figures]) -> list[str]:
    """A row for each figure that both have in every round."""
    rows = [f"{'':60} {'before':>12} {'after':>12} {'ratio':>7}"]
    for name in after[0]:
        if all(name in figures for figures in (*before, *after)):
            pairs = [(one[name], two[name]) for one, two in zip(before, after, strict=True)]
            ratios = [two / one for one, two in pairs if one]
            old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = f"{statistics.median(ratios):7.3f}" if ratios else f"{'-':>7}"
            rows.append(f"{name:60} {old:12.4g} {new:12.4g} {ratio}")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("base", help="the commit of the first column")
    parser.add_argument("benches", nargs="+", help="as `python -m tests.bench` lists them: small")
    parser.add_argument("--rounds", type=int, default=3)
    # argparse does not take what follows `--` after an option.
    own = sys.argv[1:]
    arguments: list[str] = []
    if "--" in own:
        own, arguments = own[: own.index("--")], own[own.index("--") + 1 :]
    given = parser.parse_args(own)
    measured: dict[str, list[Figures]] = {given.base: [], "HEAD": []}
    with tempfile.TemporaryDirectory(prefix="compare-") as folder:
        trees = {commit: Path(folder) / f"{number}" for number, commit in enumerate(measured)}
        for commit, tree in trees.items():
            fresh_clone(commit, tree)
        for number in range(given.rounds):
            for commit in list(trees)[:: 1 if number % 2 else -1]:
                measured[commit].append(measure(trees[commit], given.benches, arguments))
    print("\n".join(table(*measured.values())))


if __name__ == "__main__":
    main()
