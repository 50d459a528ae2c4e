"""The results of the contest: a file for each run, the table, the ratios and the picture.

A later command resumes from the files.
"""

import json
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path

from ps.whole_files import whole_file
from shards.errors import BadInput
from tests.bench.endtoend.contest import Contender, Outcome, Trial
from tests.bench.report import FOLDER

_COLUMNS, _MOST_WRONG = 3, 15.0
Rounds = Mapping[str, Mapping[int, Outcome]]
"""The outcomes of each contender, by the seed of the round."""


class Results:
    """The outcomes of runs that were made under the current folder."""

    def __init__(self, condition: str, versions: Mapping[str, str]) -> None:
        self._folder = FOLDER / "endtoend" / condition.replace(" ", "-")
        self._versions = versions

    def read(self, name: str, trial: Trial, limit_s: float | None) -> Outcome | None:
        """The outcome of this very trial with this limit (None: with any) and these versions.

        Raises BadInput for a file that is not such a result.
        """
        path = self._path(name, trial)
        if not path.exists():
            return None
        try:
            content = json.loads(path.read_text())
            limit_s = content["of"]["limit_s"] if limit_s is None else limit_s
            if content["of"] != self._describe(name, trial, limit_s):
                return None
            outcome = Outcome(**content["outcome"])
            return outcome._replace(curve=[(at, accuracy) for at, accuracy in outcome.curve])
        except (ValueError, KeyError, TypeError) as error:
            raise BadInput(
                path,
                expected="a run of this version",
                got=repr(error),
                hint="remove it, or --again",
            ) from None

    def write(self, name: str, trial: Trial, limit_s: float, outcome: Outcome) -> None:
        """Save the outcome of one run."""
        path = self._path(name, trial)
        path.parent.mkdir(parents=True, exist_ok=True)
        of = self._describe(name, trial, limit_s)
        content = {"of": of, "outcome": outcome._asdict()}
        with whole_file(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n")

    def _path(self, name: str, trial: Trial) -> Path:
        words = (name, f"{trial.rate:g}", f"{trial.momentum:g}", f"seed{trial.seed}")
        return self._folder / trial.work / f"{'_'.join(words).replace(' ', '-')}.json"

    def _describe(self, name: str, trial: Trial, limit_s: float) -> dict[str, object]:
        described = trial._replace(data="")._asdict() | {"line": str(trial.line)}
        return {**described, "limit_s": limit_s, "versions": self._versions[name]}


def count_seconds(outcome: Outcome) -> float | None:
    """The seconds to the target; at least the limit for one that was still at it."""
    return outcome.lasted_s if outcome.seconds is None and outcome.late else outcome.seconds


def median_ratio(ours: Mapping[int, Outcome], others: Mapping[int, Outcome]) -> float | None:
    """The median over the rounds of one's seconds to another's; None if there is no such round.

    A contender that was ended at the limit counts with the limit, which makes the ratio larger
    than it is. A round in which ours missed the target counts as infinitely slow.
    """
    pairs = [
        (one.seconds or float("inf"), count_seconds(others[seed]))
        for seed, one in ours.items()
        if seed in others
    ]
    ratios = [one / other for one, other in pairs if other is not None]
    return statistics.median(ratios) if ratios else None


def format_table(rounds: Rounds, contenders: Mapping[str, Contender], ours: str) -> Iterator[str]:
    """Yield the lines of a condition's table in Markdown; medians over the runs that arrived."""
    heads = [
        "contender",
        "arrived",
        "seconds",
        "from to",
        "ours : its",
        "CPU s",
        "link MB",
    ]
    heads += ["first step, s", "longest pause, s", "killed", "lines"]
    yield "| " + " | ".join(heads) + " |"
    yield "|" + "---|" * len(heads)
    for name, by_seed in rounds.items():
        if not by_seed:
            continue
        outcomes = list(by_seed.values())
        arrived = [outcome for outcome in outcomes if outcome.seconds is not None]
        times = [outcome.seconds or 0.0 for outcome in arrived]
        shown = arrived or outcomes
        ratio = median_ratio(rounds.get(ours, {}), by_seed)
        firsts = [outcome.first_step_s for outcome in shown if outcome.first_step_s is not None]
        late = [outcome.lasted_s for outcome in outcomes if outcome.late]
        missing = f"> {min(late):.0f}" if late else "failed"
        cells = [
            f"{len(arrived)} of {len(outcomes)}",
            f"{statistics.median(times):.1f}" if times else missing,
            f"{min(times):.1f} to {max(times):.1f}" if times else "-",
            "-" if ratio is None or name == ours else f"{ratio:.2f}",
            f"{statistics.median(outcome.cpu_s for outcome in shown):.0f}",
            f"{statistics.median(outcome.link_bytes for outcome in shown) / 1e6:,.0f}",
            f"{statistics.median(firsts):.1f}" if firsts else "-",
            f"{statistics.median(outcome.longest_pause_s for outcome in shown):.1f}",
            f"{sum(outcome.kills for outcome in outcomes)}",
            f"{contenders[name].count_lines()}",
        ]
        yield f"| {name} | " + " | ".join(cells) + " |"


def draw(results: Mapping[str, Rounds], target: float, path: Path) -> None:
    """Draw what is still wrong over wall time, a panel a condition."""
    from matplotlib.figure import Figure

    runs = (run for rounds in results.values() for run in rounds.items())
    names = dict.fromkeys(name for name, outcomes in runs if outcomes)
    colours = {name: f"C{number % 10}" for number, name in enumerate(names)}
    rows = -(-len(results) // _COLUMNS)
    figure = Figure(figsize=(4.0 * min(len(results), _COLUMNS) + 2.2, 3.4 * rows))
    figure.set_layout_engine("constrained")
    grid = figure.subplots(rows, min(len(results), _COLUMNS), squeeze=False, sharey=True)
    panels = list(grid.flat)
    for empty in panels[len(results) :]:
        empty.remove()
    for panel, (condition, rounds) in zip(panels, results.items(), strict=False):
        for name, outcomes in rounds.items():
            for outcome in outcomes.values():
                times = [at for at, _ in outcome.curve]
                wrong = [100 * (1 - accuracy) for _, accuracy in outcome.curve]
                panel.plot(times, wrong, color=colours[name], linewidth=1, marker=".", markersize=2)
        panel.axhline(100 * (1 - target), color="grey", linewidth=0.8, linestyle="--")
        panel.set(title=condition, xlabel="seconds since the start", yscale="log")
        panel.set_xlim(left=0)
        panel.set_ylim(top=_MOST_WRONG)  # one that diverges leaves the panel
    for name, colour in colours.items():
        panels[0].plot([], [], color=colour, label=name)
    for row in grid:
        row[0].set_ylabel("wrong, % (or 100 - AUC)")
    figure.legend(loc="outside right center", fontsize=7)
    figure.savefig(path, dpi=88)
