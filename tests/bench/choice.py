"""The tables of docs/measurements/choice.md, and the figures that `downpour doctor` quotes.

python -m tests.bench.choice [--jobs 2] [--out runs/experiments/choice]
"""

import argparse
import math
import re
from pathlib import Path

from deploy.doctor.strategy_table import TARGET, Choice, keep, table
from deploy.experiments.runner import Folder, run_sweep
from deploy.experiments.statistics import TargetTimes
from deploy.experiments.sweeps import Sweep, read_sweep

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "measurements" / "choice.md"


def choices_of(sweep: Sweep, path: Path) -> list[Choice]:
    """The choices that a finished sweep shows, the fastest first in each place."""
    folder, found = Folder(path), dict[tuple[object, ...], Choice]()
    for point in sweep.points:
        trial = point.trials[0]
        results = [one for one in map(folder.load, point.trials) if one is not None]
        looks = [one.first_below(TARGET) for one in results]
        median = TargetTimes(
            tuple(math.inf if look is None else look.seconds for look in looks)
        ).median
        choice = Choice(
            link=trial.cluster.link,
            straggler=bool(trial.cluster.stragglers),
            strategy=trial.strategy,
            bound=trial.staleness,
            rate=trial.rate,
            seconds=median if math.isfinite(median) else None,
            staleness=sum(one.mean_staleness for one in results) / len(results),
        )
        key = (*choice.place, choice.name)
        if key not in found or choice.rank < found[key].rank:
            found[key] = choice
    return sorted(found.values(), key=lambda one: (*one.place, one.rank))


def main() -> None:
    """Run the sweep, or what is left of it, and write the page and the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "experiments" / "choice")
    given = parser.parse_args()
    sweep = read_sweep(ROOT / "deploy" / "examples" / "choice.toml")
    run_sweep(sweep, given.out, jobs=given.jobs)
    choices = choices_of(sweep, given.out)
    keep(choices)
    shown = f"<!-- choices -->\n\n{table(choices)}\n\n<!-- /choices -->"
    text = PAGE.read_text()
    PAGE.write_text(
        re.sub(r"<!-- choices -->.*<!-- /choices -->", lambda _: shown, text, flags=re.DOTALL)
    )


if __name__ == "__main__":
    main()
