"""Whole trainings to one accuracy: this project and what a user would pick instead, in turns.

    python tests/bench/bench_endtoend.py [--only NAME ...] [--conditions NAME ...] [--seeds 1 2 3]
    python tests/bench/bench_endtoend.py --search       the rate of each contender, on other seeds
    python tests/bench/bench_endtoend.py --quick        one contender, a few seconds

Each contender is a program of endtoend/programs/, started as its own documentation says, with four
workers, and trains LeNet on MNIST until 98.5 % of the test images are right. Its seconds are those
of the whole program: imports, JVM and Ray included. A round runs every contender once, and ratios
are taken within a round. Bytes are those of the loopback device, so nothing else should use it.

Conditions: `quiet`; `slow worker`, of which one rests after each gradient for three times as long
as it took; `kills`, of a random worker every 20 s; `cold`, without bytecode and numba's cache.

The rates are in endtoend/rates.json. `--search` replaces them by the best of three, each with
momentum 0 and 0.9, for every contender on a seed of its own.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.endtoend.contest import (
    CONTENDERS,
    Contender,
    Outcome,
    Trial,
    run_trial,
)
from tests.bench.report import FOLDER, Goal, goals, save

RATES, MOMENTA, SEARCH_SEED = (0.02, 0.05, 0.1), (0.0, 0.9), 100
CHOSEN = Path(__file__).parent / "endtoend" / "rates.json"
OURS = "downpour, PyTorch on Spark"
QUICK = ("downpour train", Trial(target=0.05, between=1_280))

QUIET, SLOW, KILLS, COLD = "quiet", "slow worker", "kills", "cold"
CONDITIONS = {
    QUIET: Trial(),
    SLOW: Trial(slow=4.0),
    KILLS: Trial(kill_every_s=20.0),
    COLD: Trial(cold=True),
}

Rounds = dict[str, list[Outcome]]


def print_outcome(name: str, outcome: Outcome) -> None:
    """Print one run, with the end of its output where it missed the target."""
    best = max((accuracy for _, accuracy in outcome.curve), default=0.0)
    reached = "-" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    first = "-" if outcome.first_step_s is None else f"{outcome.first_step_s:.1f}"
    print(
        f"{name:28} {reached:>7} s to the target, first step after {first:>5} s,"
        f" {outcome.cpu_s:6.1f} CPU s, {outcome.link_bytes / 1e6:8.1f} MB,"
        f" {outcome.kills} kills, best {best:.4f}",
        flush=True,
    )
    if outcome.seconds is None:
        print(outcome.output, file=sys.stderr)


def run_rounds(
    contenders: Mapping[str, Contender], trial: Trial, seeds: Sequence[int], limit_s: float
) -> Rounds:
    """Run every contender with its chosen rate, once for each seed, in alternating order."""
    chosen = json.loads(CHOSEN.read_text())
    rounds: Rounds = {name: [] for name in contenders}
    for number, seed in enumerate(seeds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            rate, momentum = chosen[name]
            run = trial._replace(seed=seed, rate=rate, momentum=momentum)
            rounds[name].append(run_trial(contenders[name], run, limit_s))
            print_outcome(f"{name}, seed {seed}", rounds[name][-1])
    return rounds


def search(contenders: Mapping[str, Contender], limit_s: float) -> None:
    """Choose the rate and momentum of each contender by its seconds on a seed of its own."""
    chosen = json.loads(CHOSEN.read_text())
    for name, contender in contenders.items():
        seconds: dict[tuple[float, float], float] = {}
        for rate, momentum in itertools.product(RATES, MOMENTA):
            trial = Trial(seed=SEARCH_SEED, rate=rate, momentum=momentum)
            outcome = run_trial(contender, trial, limit_s)
            print_outcome(f"{name}, {rate:g}, {momentum:g}", outcome)
            seconds[rate, momentum] = outcome.seconds or math.inf
        chosen[name] = min(seconds, key=lambda pair: seconds[pair])
    CHOSEN.write_text(json.dumps(chosen, indent=2) + "\n")


def median_ratio(ours: Sequence[Outcome], others: Sequence[Outcome]) -> float | None:
    """The median over the rounds of one's seconds to another's; None if the other never arrived."""
    ratios = [
        (one.seconds or math.inf) / other.seconds
        for one, other in zip(ours, others, strict=True)
        if other.seconds is not None
    ]
    return statistics.median(ratios) if ratios else None


def list_goals(results: Mapping[str, Rounds]) -> Iterator[Goal]:
    """Yield the goals of the contenders that ran."""
    others = [name for name in results.get(QUIET, {}) if "downpour" not in name]
    on_spark = [name for name in others if CONTENDERS[name].on_spark]
    pairs = [(QUIET, "plain PyTorch", 1.25), (SLOW, "PyTorch DDP", 0.5)]
    for condition, other, target in [*((QUIET, name, 0.8) for name in on_spark), *pairs]:
        rounds = results.get(condition, {})
        ratio = median_ratio(rounds.get(OURS, []), rounds.get(other, []))
        if ratio is not None:
            yield Goal(f"{condition}: against {other}", ratio, target, "x")
    quiet = results.get(QUIET, {}).get(OURS, [])
    ratio = median_ratio(results.get(KILLS, {}).get(OURS, []), quiet)
    if ratio is not None:
        yield Goal(f"{KILLS}: against undisturbed", ratio, 1.3, "x")
    for condition, target in ((QUIET, 8.0), (COLD, 15.0)):
        outcomes = results.get(condition, {}).get(OURS, [])
        starts = [outcome.first_step_s for outcome in outcomes if outcome.first_step_s is not None]
        if starts:
            yield Goal(f"{condition}: first step after", statistics.median(starts), target, "s")


def draw(results: Mapping[str, Rounds], path: Path) -> None:
    """Draw the accuracy over wall time, a panel a condition."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * len(results), 3.6), layout="constrained")
    panels = figure.subplots(1, len(results), squeeze=False, sharey=True)[0]
    for panel, (condition, rounds) in zip(panels, results.items(), strict=True):
        for number, (name, outcomes) in enumerate(rounds.items()):
            for outcome in outcomes:
                times = [at for at, _ in outcome.curve]
                wrong = [100 * (1 - accuracy) for _, accuracy in outcome.curve]
                panel.plot(times, wrong, color=f"C{number}", linewidth=1)
            panel.plot([], [], color=f"C{number}", label=name)
        panel.axhline(100 * (1 - Trial().target), color="grey", linewidth=0.8, linestyle="--")
        panel.set(title=condition, xlabel="seconds since the start", yscale="log")
    panels[0].set_ylabel("test images wrong, %")
    panels[-1].legend(fontsize=7)
    figure.savefig(path, dpi=150)


def choose(names: Sequence[str], known: Mapping[str, Any], what: str) -> dict[str, Any]:
    """The entries with these names, all if there are none; raises SystemExit for an unknown one."""
    for name in names:
        if name not in known:
            sys.exit(f"{what}: expected some of {', '.join(known)}, got {name}")
    return {name: known[name] for name in names or known}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", default=[], metavar="CONTENDER")
    parser.add_argument("--conditions", nargs="+", default=[], metavar="CONDITION")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one run")
    parser.add_argument("--search", action="store_true")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    asked = choose(given.only, CONTENDERS, "--only")
    conditions = choose(given.conditions, CONDITIONS, "--conditions")
    seeds = given.seeds
    if given.quick:
        name, trial = QUICK
        asked, conditions, seeds = {name: CONTENDERS[name]}, {QUIET: trial}, [1]
    versions = {name: contender.read_version() for name, contender in asked.items()}
    contenders = {name: asked[name] for name, version in versions.items() if version}
    for name, version in versions.items():
        missing = f"left out, for {asked[name].package} is not installed: make bench B=peers"
        print(f"{name}: {version or missing}")
    if given.search:
        search(contenders, given.limit_s)
        return
    results: dict[str, Rounds] = {}
    for condition, trial in conditions.items():
        print("==", condition)
        results[condition] = run_rounds(contenders, trial, seeds, given.limit_s)
    save(
        "endtoend",
        {
            condition: {name: [o._asdict() for o in outcomes] for name, outcomes in rounds.items()}
            for condition, rounds in results.items()
        },
    )
    draw(results, FOLDER / "endtoend.png")
    goals(list_goals(results))


if __name__ == "__main__":
    main()
