"""A sweep: a TOML file that describes trials, and the trials that it stands for.

The settings of a trial stand at the top; `[grid]` crosses lists of values with each other, `[zip]`
takes one value of each of its lists together, and each `[[list]]` table is one choice of values.
All three may be given; they are crossed (combinations.py), and every point runs with every seed. A
key is a setting, such as rate or cluster.workers, an option of a strategy, or a name of your own
that a text refers to as {name}:

    strategy = "softsync:n={n}"
    [grid]
    n = [1, 15]

A rate may be chosen by the sweep itself: "best" or "greedy" (tuning.py), also times or divided by a
number or a name, as "greedy / n". Its trials are known once rates.json is there (sweep_tuning.py).

`[[expect]]` tables are accept rules (accept_rules.py), and `[limits]` holds each trial to a time
and a memory (trial_limits.py). Neither is part of a trial's id.
"""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import structs

from deploy.experiments.accept_rules import Expectation
from deploy.experiments.cluster import LinkPartition, StepTimes, WorkerKill
from deploy.experiments.combinations import Combination, LeftOut, read_combinations, values_label
from deploy.experiments.trial_limits import TrialLimits
from deploy.experiments.trials import Trial
from deploy.experiments.tuning import TUNING_SEEDS
from shards.errors import UNDECODABLE, BadInput

Value = TypeVar("Value")

MAX_TRIALS = 10_000
"""More trials than this need the user's consent."""

_KEYS = {
    "limits": TrialLimits.__struct_fields__,
    "expect": Expectation.__struct_fields__,
    "kill": WorkerKill.__struct_fields__,
    "times": StepTimes.__struct_fields__,
    "partitions": LinkPartition.__struct_fields__,
}
"""What the tables in a sweep may hold, for the message about a key that they may not."""


RATES = "rates.json"


class ChosenRates(msgspec.Struct, frozen=True):
    """The rates that were chosen for a level, the trials that it took and their CPU seconds."""

    level: str
    best: float
    greedy: float
    error: float
    trials: int
    cpu_s: float


Rates = dict[str, ChosenRates]
"""Chosen rates by the id of their level."""


class Point(NamedTuple):
    """One choice of values, by key, and its trials, one a seed.

    `level` is what a rate has yet to be chosen for; the trials then have none.
    """

    values: dict[str, Any]
    trials: list[Trial]
    level: Trial | None = None

    @property
    def label(self) -> str:
        return values_label(self.values)


class Sweep(NamedTuple):
    """A sweep's name, its points, the text of its file, its accept rules and limits.

    `left_out` are the combinations of its values that are no points.
    """

    name: str
    points: list[Point]
    text: str
    expect: list[Expectation]
    limits: TrialLimits
    left_out: list[LeftOut]

    @property
    def trials(self) -> list[Trial]:
        """All trials, each once: chosen rates of two points may be the same."""
        return list({trial.id: trial for point in self.points for trial in point.trials}.values())

    @property
    def labels(self) -> dict[str, str]:
        """The label of each trial's point, and its seed, by the trial's id."""
        return {
            trial.id: f"{point.label}, seed {trial.seed}"
            for point in reversed(self.points)
            for trial in point.trials
        }

    @property
    def levels(self) -> dict[str, tuple[str, Trial]]:
        """The levels without a chosen rate, by id, with the label of one of their points."""
        return {
            point.level.id: (Point(_without_rate(point.values), []).label, point.level)
            for point in self.points
            if point.level
        }


def _without_rate(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != "rate"}


def read_sweep(path: Path, *, consent: bool = False) -> Sweep:
    """Read a sweep and check every trial; raises BadInput naming the key, expected and got.

    More than MAX_TRIALS trials need `consent`. Rates that were chosen are those in the folder.
    """
    text, rates = path.read_text(), read_rates(path.with_name(RATES))
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise BadInput(path, expected=f"TOML: {error}") from None
    try:
        return _sweep(table, text, consent, rates)
    except BadInput as error:
        # The strategies' errors speak of a job's bound by its full name.
        text = re.sub("^staleness bound: ", "staleness: ", str(error))
        raise BadInput(f"{path}: {text}") from None


def read_rates(path: Path) -> Rates:
    """The rates in a file; none if there is no file, or it cannot be read, so they are redone."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Rates)
    except (OSError, *UNDECODABLE):
        return {}


def _sweep(table: dict[str, Any], text: str, consent: bool, rates: Rates) -> Sweep:
    name = table.get("name")
    if not isinstance(name, str) or not name or not all(c.isalnum() or c in "-_" for c in name):
        raise BadInput("name", expected="letters, digits, - and _", got=f"{name!r}")
    seeds = _seeds(table.get("seeds", [0, 2]))
    combinations, left_out = read_combinations(table)
    count = len(combinations) * len(seeds)
    if count > MAX_TRIALS and not consent:
        raise BadInput(f"expected at most {MAX_TRIALS} trials without --yes, got {count}")
    points = [_point(combination, seeds, rates) for combination in combinations]
    known: dict[str, str] = {}
    for combination, point in zip(combinations, points, strict=True):
        point.trials[0].check()
        for trial in point.trials if _parse_rate_choice(combination) is None else ():
            if trial.id in known:
                raise BadInput(
                    f"trial {trial.id}",
                    expected="one trial for each id",
                    got=f"two: {point.label}, seed {trial.seed}, and {known[trial.id]}",
                )
            known[trial.id] = f"{point.label}, seed {trial.seed}"
    expect = _convert("expect", table.get("expect", []), list[Expectation])
    for number, rule in enumerate(expect):
        try:
            rule.check([point.values for point in points])
        except BadInput as error:
            raise error.within(f"expect[{number}]") from None
    limits = _convert("limits", table.get("limits", {}), TrialLimits)
    return Sweep(name, points, text, expect, limits, left_out)


def _convert(label: str, value: object, kind: type[Value]) -> Value:
    """A part of the file as a value of `kind`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise BadInput(_sentence(label, error)) from None


def _sentence(label: str, error: msgspec.ValidationError) -> str:
    """An error of a value inside `label`, or of a whole trial, with the keys that it may have."""
    message, _, where = str(error).partition(" - at `$")
    where = f"{label}{where.rstrip('`')}".removeprefix(".")
    _, unknown, key = message.partition("Object contains unknown field ")
    if unknown:
        part = where.rpartition(".")[2].partition("[")[0]
        return f"{where}: expected one of {', '.join(_KEYS[part])}, got {key.strip('`')}"
    return f"{where or 'trial'}: {message[0].lower()}{message[1:]}"


def _seeds(value: object) -> range:
    match value:
        case [int(first), int(last)] if 0 <= first <= last:
            return range(first, last + 1)
    raise BadInput("seeds", expected="[first, last], such as [0, 9]", got=f"{value!r}")


def _point(combination: Combination, seeds: range, rates: Rates) -> Point:
    values, settings = combination.values, combination.settings
    chosen = _parse_rate_choice(combination)
    if chosen is None:
        return Point(values, _trials(settings, seeds))
    reserved = sorted(set(seeds) & set(TUNING_SEEDS))
    if reserved:
        raise BadInput(
            "seeds",
            expected=f"none of {TUNING_SEEDS[0]} to {TUNING_SEEDS[-1]}, which choose rates",
            got=reserved[0],
        )
    rate, factor = chosen
    trials = _trials({**settings, "rate": 0.0}, seeds)
    level = structs.replace(trials[0], seed=0, look_every=0, until_error=-1.0)
    if level.id not in rates:
        return Point(values, trials, level)
    value = getattr(rates[level.id], rate) * factor
    return Point(values, [structs.replace(trial, rate=value) for trial in trials])


def _parse_rate_choice(combination: Combination) -> tuple[str, float] | None:
    """Which rate is to be chosen, best or greedy, and the factor on it; None for a number."""
    text = combination.settings.get("rate")
    if not isinstance(text, str):
        return None
    match = re.fullmatch(r"(best|greedy)(?:\s*([*/])\s*(\S+))?", text.strip())
    factor = None if match is None else _number(match[3] or "1", combination.values)
    if match is None or factor is None or not factor > 0:
        raise BadInput(
            "rate",
            expected=(
                "a number, or best or greedy with * or / and a number or a name "
                "of the sweep, such as greedy / n"
            ),
            got=f"{text!r}",
        )
    return match[1], 1 / factor if match[2] == "/" else factor


def _number(text: str, values: Mapping[str, Any]) -> float | None:
    """A number, or the value of a name of the sweep's own; None for neither."""
    value = values.get(text.strip("{}"), text)
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _trials(settings: Mapping[str, Any], seeds: range) -> list[Trial]:
    nested: dict[str, Any] = {"cluster": {}}
    for key, value in settings.items():
        outer, _, inner = key.partition(".")
        if inner:
            nested[outer][inner] = value
        else:
            nested[key] = value
    try:
        return [msgspec.convert({**nested, "seed": seed}, Trial) for seed in seeds]
    except msgspec.ValidationError as error:
        raise BadInput(_sentence("", error)) from None
