"""Whole trainings to one accuracy: this project and what a user would pick instead, in turns.

    python tests/bench/bench_endtoend.py [--work NAME --data FILE] [--only NAME ...]
                                         [--conditions NAME ...] [--seeds 1 2 3] [--limit-s S]
    python tests/bench/bench_endtoend.py --search [--momenta 0.9]
                                                        the rate of each contender, on another seed
    python tests/bench/bench_endtoend.py --quick        one contender, a short race

Each contender is a program of endtoend/programs/, started as its own documentation says, with four
workers, and trains one net to one figure: LeNet on MNIST to 98.5 %, CIFAR-10 quick to 70 %, or an
MLP on Adult to an AUC of 0.905. Its seconds are those of the whole program: imports, JVM and Ray
included. A round runs every contender once, and ratios are taken within a round. Bytes are those of
the loopback device, so nothing else should use it, or of the slow lines.

Conditions: `quiet`; `slow worker`, which has a quarter of the others' pace; `slow link`, where
every process is at a place of its own, 100 ms from any other, with a line of 100 Mbit/s (needs
root); `kills`, of a random worker every 20 s; `cold`, without bytecode, numba's cache and what
`downpour prepare` has written, which else our programs read.

Every run is saved as it ends, in runs/bench/endtoend/, and the same command resumes from there;
`--again` forgets, and `--saved` shows those alone, whatever their limits. The rates are in
endtoend/rates.json. `--search` replaces them by the best of three, with each of `--momenta`, for
every contender, on a seed that no measurement uses.
"""

import argparse
import itertools
import json
import math
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from shards.errors import BadInput
from tests.bench.endtoend import places
from tests.bench.endtoend.clusters import Kind
from tests.bench.endtoend.contest import CONTENDERS, Contender, Outcome, Trial, run_trial
from tests.bench.endtoend.places import Line
from tests.bench.endtoend.results import Results, draw, format_table, median_ratio
from tests.bench.endtoend.works import WORKS, prepare
from tests.bench.report import FOLDER, Goal, goals, save

RATES, MOMENTA, SEARCH_SEED = (0.02, 0.05, 0.1), [0.0, 0.9], 100
CHOSEN = Path(__file__).parent / "endtoend" / "rates.json"
OURS = "downpour, PyTorch on Spark"
QUICK = ("downpour train", Trial(target=0.6, between=1280, workers=2))
SETTING_UP_S = 120.0
"""At most what comes before and after a run."""

QUIET, SLOW, LINK, KILLS, COLD = "quiet", "slow worker", "slow link", "kills", "cold"
CONDITIONS = {
    QUIET: Trial(),
    SLOW: Trial(slow=4.0),
    LINK: Trial(line=Line()),
    KILLS: Trial(kill_every_s=20.0),
    COLD: Trial(cold=True),
}

Rounds = dict[str, dict[int, Outcome]]


class Contest(NamedTuple):
    """What is run."""

    contenders: Mapping[str, Contender]
    versions: Mapping[str, str]
    limit_s: float
    again: bool
    saved: bool

    def run(self, condition: str, name: str, trial: Trial, limit_s: float) -> Outcome:
        """The outcome of a trial: the saved one, or that of a run."""
        label = f"{name}, seed {trial.seed}"
        outcome = self.read(condition, name, trial, limit_s)
        if outcome is None:
            try:
                outcome = run_trial(self.contenders[name], trial, limit_s)
            except OSError as error:
                sys.exit(f"{condition}, {name}: {error}")
            Results(condition, self.versions).write(name, trial, limit_s, outcome)
            print_outcome(label, outcome)
        else:
            print_outcome(f"{label} (saved)", outcome)
        return outcome

    def read(self, condition: str, name: str, trial: Trial, limit_s: float) -> Outcome | None:
        """The saved outcome of a trial, unless it is to be run again."""
        if self.again:
            return None
        results = Results(condition, self.versions)
        return results.read(name, trial, None if self.saved else limit_s)

    def is_saved(self, condition: str, name: str, trial: Trial) -> bool:
        return self.read(condition, name, trial, self.limit_s) is not None


def print_outcome(label: str, outcome: Outcome) -> None:
    """Print one run, with the end of its output where it missed the target."""
    best = max((accuracy for _, accuracy in outcome.curve), default=0.0)
    reached = "-" if outcome.seconds is None else f"{outcome.seconds:.1f}"
    first = "-" if outcome.first_step_s is None else f"{outcome.first_step_s:.1f}"
    print(
        f"{label:36} {reached:>7} s to the target, first step after {first:>5} s,"
        f" {outcome.cpu_s:6.1f} CPU s, {outcome.link_bytes / 1e6:8.1f} MB,"
        f" {outcome.kills} kills, best {best:.4f} in {outcome.lasted_s:.0f} s",
        flush=True,
    )
    if outcome.seconds is None:
        print(outcome.output, file=sys.stderr)


def read_rates(work: str, condition: str, name: str) -> tuple[float, float]:
    """The rate and the momentum that a search found, those of the quiet machine by default."""
    rates = json.loads(CHOSEN.read_text())[work][name]
    rate, momentum = rates.get(condition, rates[QUIET])
    return rate, momentum


def list_trials(
    contest: Contest, condition: str, trial: Trial, seeds: Sequence[int]
) -> Iterator[tuple[str, Trial]]:
    """Yield every contender with its chosen rate, once for each seed, in alternating order."""
    for number, seed in enumerate(seeds):
        for name in list(contest.contenders)[:: -1 if number % 2 else 1]:
            rate, momentum = read_rates(trial.work, condition, name)
            yield name, trial._replace(seed=seed, rate=rate, momentum=momentum)


def search(contest: Contest, condition: str, trial: Trial, momenta: Sequence[float]) -> None:
    """Choose the rate and momentum of each contender by its seconds on a seed of its own."""
    for name in contest.contenders:
        seconds: dict[tuple[float, float], float] = {}
        for rate, momentum in itertools.product(RATES, momenta):
            run = trial._replace(seed=SEARCH_SEED, rate=rate, momentum=momentum)
            # One that is slower than the best so far need not end.
            limit_s = min(contest.limit_s, *seconds.values()) if seconds else contest.limit_s
            outcome = contest.run(f"search {condition}", name, run, limit_s)
            seconds[rate, momentum] = outcome.seconds or math.inf
        best = min(seconds, key=lambda pair: seconds[pair])
        if seconds[best] == math.inf:
            print(f"{name}: no rate reaches the target in {contest.limit_s:g} s")
            continue
        print(f"{name}: rate {best[0]:g}, momentum {best[1]:g}")
        chosen = json.loads(CHOSEN.read_text())
        chosen[trial.work][name][condition] = best
        CHOSEN.write_text(format_rates(chosen))


def format_rates(chosen: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """JSON with a line for each contender."""
    works = [
        f"  {json.dumps(work)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(r)}" for name, r in rates.items())
        + "\n  }"
        for work, rates in chosen.items()
    ]
    return "{\n" + ",\n".join(works) + "\n}\n"


def list_goals(results: Mapping[str, Rounds]) -> Iterator[Goal]:
    """Yield the goals of the contenders that ran."""
    others = [name for name in CONTENDERS if "downpour" not in name]
    on_spark = [name for name in others if CONTENDERS[name].kind is Kind.SPARK]
    rows = [*((QUIET, name, 0.8) for name in on_spark), (QUIET, "plain PyTorch", 1.25)]
    rows += [(SLOW, "PyTorch DDP", 0.5), (LINK, "PyTorch DDP", 0.2)]
    rows += [(LINK, name, 0.2) for name in CONTENDERS if "Elephas" in name]
    for condition, other, target in rows:
        rounds = results.get(condition, {})
        ratio = median_ratio(rounds.get(OURS, {}), rounds.get(other, {}))
        if ratio is not None:
            yield Goal(f"{condition}: against {other}", ratio, target, "x")
    quiet = results.get(QUIET, {}).get(OURS, {})
    ratio = median_ratio(results.get(KILLS, {}).get(OURS, {}), quiet)
    if ratio is not None:
        yield Goal(f"{KILLS}: against undisturbed", ratio, 1.3, "x")
    for condition, target in ((QUIET, 8.0), (COLD, 15.0)):
        outcomes = results.get(condition, {}).get(OURS, {}).values()
        starts = [outcome.first_step_s for outcome in outcomes if outcome.first_step_s is not None]
        if starts:
            yield Goal(f"{condition}: first step after", statistics.median(starts), target, "s")


def choose(names: Sequence[str], known: Mapping[str, Any], option: str) -> dict[str, Any]:
    """The entries with these names, all if there are none; raises SystemExit for an unknown one."""
    for name in names:
        if name not in known:
            sys.exit(f"{option}: expected some of {', '.join(known)}, got {name}")
    return {name: known[name] for name in names or known}


def choose_contenders(names: Sequence[str], work: str) -> dict[str, tuple[Contender, str]]:
    """The contenders that can run, with their versions; prints the others with the reason."""
    able = {}
    for name, contender in choose(names, CONTENDERS, "--only").items():
        versions = contender.read_versions()
        if work not in contender.works:
            print(f"{name}: left out, for it has no program for {work}")
        elif not versions:
            missing = " and ".join(contender.packages)
            print(f"{name}: left out, for {missing} are not installed: make bench B=peers")
        else:
            print(f"{name}: {versions}; {contender.count_lines()} lines")
            able[name] = contender, versions
    return able


def choose_conditions(names: Sequence[str], *, saved: bool = False) -> dict[str, Trial]:
    """The conditions that can be made here; prints a line for the slow link if it cannot.

    `saved`: none is to be made.
    """
    asked = choose(names, CONDITIONS, "--conditions")
    if LINK in asked and not saved and (why := places.missing()) is not None:
        print(f"{LINK}: left out: {why}")
        del asked[LINK]
    return asked


def print_plan(plan: str, runs: int, limit_s: float) -> None:
    """Print for how long a plan of this number of runs takes at most."""
    minutes = runs * (limit_s + SETTING_UP_S) / 60
    print(f"{plan}: at most {minutes:.0f} minutes", flush=True)


def measure(contest: Contest, conditions: Mapping[str, Trial], seeds: Sequence[int]) -> None:
    """Run every condition, and print and keep what came of it."""
    trials = {
        condition: [
            run
            for run in list_trials(contest, condition, trial, seeds)
            if not contest.saved or contest.is_saved(condition, *run)
        ]
        for condition, trial in conditions.items()
    }
    plan = [(condition, *run) for condition, runs in trials.items() for run in runs]
    if not plan:
        sys.exit("no run of these is saved")
    saved = sum(itertools.starmap(contest.is_saved, plan))
    print_plan(f"{len(plan)} runs, {saved} of them saved", len(plan) - saved, contest.limit_s)
    results: dict[str, Rounds] = {}
    for condition, runs in trials.items():
        print("==", condition)
        results[condition] = {name: {} for name in contest.contenders}
        for name, trial in runs:
            outcome = contest.run(condition, name, trial, contest.limit_s)
            results[condition][name][trial.seed] = outcome
        for row in format_table(results[condition], contest.contenders, OURS):
            print(row)
    save(
        "endtoend",
        {
            condition: {name: [o._asdict() for o in of.values()] for name, of in rounds.items()}
            for condition, rounds in results.items()
        },
    )
    target = next(iter(conditions.values())).target
    draw(results, target, FOLDER / "endtoend.png")
    goals(list_goals(results))


def read_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--work", default="lenet", metavar="NAME", help=", ".join(WORKS))
    parser.add_argument("--data", type=Path, metavar="FILE", help="the package with its data")
    parser.add_argument("--only", nargs="+", default=[], metavar="CONTENDER")
    parser.add_argument("--conditions", nargs="+", default=[], metavar="CONDITION")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--limit-s", type=float, default=600.0, help="of one run")
    parser.add_argument("--again", action="store_true", help="repeat the runs that are saved")
    parser.add_argument("--momenta", nargs="+", type=float, default=MOMENTA, help="of the search")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--saved", action="store_true", help="show what is saved, and run nothing")
    modes.add_argument("--search", action="store_true")
    modes.add_argument("--quick", action="store_true")
    return parser.parse_args(arguments)


def check_options(given: argparse.Namespace) -> None:
    """Raise BadInput for a value that no run can have, and for options that exclude each other."""
    for seed in given.seeds:
        if not 0 < seed < 1 << 31 or seed == SEARCH_SEED:
            expected = f"numbers from 1, without {SEARCH_SEED}, which the search has"
            raise BadInput("--seeds", expected=expected, got=seed)
    if not 0 < given.limit_s < math.inf:
        raise BadInput("--limit-s", expected="seconds above 0", got=given.limit_s)
    for momentum in given.momenta:
        if not 0 <= momentum < 1:
            raise BadInput("--momenta", expected="numbers from 0 to below 1", got=momentum)
    if given.quick and (given.only or given.conditions or given.work != Trial().work):
        raise BadInput("--quick", expected="no --only, --conditions or --work", got="one")
    if given.saved and given.again:
        raise BadInput("--saved", expected="no --again", got="it")


def main(arguments: list[str] | None = None) -> None:
    given = read_options(arguments)
    try:
        run_contest(given)
    except BadInput as error:
        sys.exit(str(error))


def run_contest(given: argparse.Namespace) -> None:
    """Run, search or show what is asked for; raises BadInput before anything starts."""
    check_options(given)
    choose([given.work], WORKS, "--work")
    if given.quick:
        name, trial = QUICK
        given.only, given.seeds, conditions = [name], [1], {QUIET: trial}
    else:
        conditions = choose_conditions(given.conditions, saved=given.saved)
    changes = {"work": given.work, "data": str(prepare(given.work, given.data))}
    if not given.quick:
        changes["target"] = WORKS[given.work].target
    conditions = {name: trial._replace(**changes) for name, trial in conditions.items()}
    able = choose_contenders(given.only, given.work)
    if not able or not conditions:
        sys.exit("nothing to run: every contender or condition is left out")
    contest = Contest(
        {name: contender for name, (contender, _) in able.items()},
        {name: versions for name, (_, versions) in able.items()},
        given.limit_s,
        given.again or given.quick,
        given.saved,
    )
    if given.search:
        runs = len(able) * len(conditions) * len(RATES) * len(given.momenta)
        print_plan(f"up to {runs} runs", runs, given.limit_s)
        for condition, trial in conditions.items():
            search(contest, condition, trial, given.momenta)
    else:
        measure(contest, conditions, given.seeds)


if __name__ == "__main__":
    # Ended from outside, it still ends its contenders and removes their places.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))
    main()
