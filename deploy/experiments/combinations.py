"""The combinations of values that a sweep's file describes, without those that mean nothing.

`[grid]`, `[zip]` and `[[list]]` are crossed. Strategies differ in what they have: asp has no
staleness bound, rounds have bound 0, and most options belong to a few kinds. So a grid over several
kinds holds combinations without a meaning, and they are treated by three rules:

- An option, a staleness bound or a limit on stale pushes is taken out of a combination whose kind
  of strategy or rule has none, if another kind in the sweep has it. Otherwise it is an error.
- Combinations that are then the same are kept once.
- A combination that its strategy refuses, because of the bound or the number of workers, is left
  out. If all are, that is an error.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import inf
from typing import Any, NamedTuple

import msgspec

from deploy.experiments.cluster import ClusterModel
from deploy.experiments.trials import RULE_KINDS, STRATEGY_KINDS, Trial, trial_strategy
from shards.aggregation import Round
from shards.errors import BadInput
from worker.job.options import NO_BOUND, staleness_bound
from worker.strategies import Strategy
from worker.strategies.base import USUAL

OWN_KEYS = ("name", "seeds", "grid", "zip", "list", "expect", "limits")
"""The keys at the top of a sweep's file that are no settings of a trial."""

_TEXTS = ("strategy", "rule", "workload", "cluster.link")
_SETTINGS = {name for name in Trial.__struct_fields__ if name not in {"seed", "cluster"}} | {
    f"cluster.{name}" for name in ClusterModel.__struct_fields__
}
_DEFAULTS = {"strategy": Trial().strategy, "rule": Trial().rule, "workload": Trial().workload}
_DEFAULTS["cluster.link"] = ClusterModel().link
_KINDS: dict[str, Mapping[str, type[msgspec.Struct]]] = {
    "strategy": STRATEGY_KINDS,
    "rule": RULE_KINDS,
}
"""The kinds of those texts that are a name with options, such as diloco:h=50."""


class Combination(NamedTuple):
    """One choice of values, and all settings of its trials by their full keys.

    `written` is the choice as the file has it. `reduced` says that a value was taken out of it or
    translated, so that other combinations may be the same.
    """

    values: dict[str, Any]
    settings: dict[str, Any]
    written: str
    reduced: bool = False


class LeftOut(NamedTuple):
    """The label of a combination without trials, and why it has none."""

    label: str
    reason: str


def values_label(values: Mapping[str, Any]) -> str:
    """Values with their keys, as reports name a point."""
    return ", ".join(f"{key} {show_value(value)}" for key, value in values.items()) or "all"


def show_value(value: object) -> str:
    """A value as reports show it; an empty text, such as no link, is none."""
    return "none" if value == "" else str(value)


def read_combinations(table: Mapping[str, Any]) -> tuple[list[Combination], list[LeftOut]]:
    """The combinations of a sweep's file, and those left out; raises BadInput naming the key."""
    base = {key: value for key, value in table.items() if key not in OWN_KEYS}
    cluster = base.pop("cluster", {})
    if not isinstance(cluster, dict):
        raise BadInput("cluster", expected="a table", got=f"{cluster!r}")
    base |= {f"cluster.{key}": value for key, value in cluster.items()}
    drafts = [
        Combination(values, {**base, **values}, values_label(values))
        for values in _cross_tables(table)
    ]
    words = _words(drafts)
    drafts = [_fill_names(draft, words) for draft in drafts]
    strategies = [trial_strategy(draft.settings["strategy"]) for draft in drafts]
    with_bound = any(_takes_bound(strategy) for strategy in strategies)
    one_by_one = any(not _in_rounds(strategy) for strategy in strategies)
    left_out, valid = list[LeftOut](), list[Combination]()
    for draft, strategy in zip(drafts, strategies, strict=True):
        draft = _set_bound(draft, strategy, lenient=with_bound)
        if one_by_one and _in_rounds(strategy):
            draft = _without_limit(draft)
        refusal = _refusal(draft, strategy)
        if refusal:
            left_out.append(LeftOut(draft.written, refusal))
        else:
            valid.append(draft)
    if not valid:
        raise BadInput(left_out[0].reason)
    once, repeated = _each_once(valid)
    return once, left_out + repeated


# --- crossing -------------------------------------------------------------------------------------


def _cross_tables(table: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The product of a file's three tables."""
    grid, zipped = _lists("grid", table), _lists("zip", table)
    listed = table.get("list", [{}])
    if not isinstance(listed, list) or not all(isinstance(row, dict) for row in listed):
        raise BadInput("list", expected="[[list]] tables", got=f"{listed!r}")
    if not listed:
        raise BadInput("list", expected="at least one table", got="none")
    lengths = {key: len(values) for key, values in zipped.items()}
    if len(set(lengths.values())) > 1:
        raise BadInput("zip", expected="lists of one length", got=lengths)
    rows = [dict(zip(zipped, row, strict=True)) for row in zip(*zipped.values(), strict=True)]
    crossed = [dict(zip(grid, row, strict=True)) for row in product(*grid.values())]
    for values, row, choice in product(crossed, rows or [{}], listed):
        keys = [*values, *row, *choice]
        twice = sorted({key for key in keys if keys.count(key) > 1})
        if twice:
            raise BadInput(twice[0], expected="it in one of grid, zip and list", got="two")
        yield {**values, **row, **choice}


def _lists(part: str, file: Mapping[str, Any]) -> dict[str, list[Any]]:
    """The table `part` of a file: a list of values for each key."""
    table = file.get(part, {})
    if not isinstance(table, dict) or (part in file and not table):
        shown = repr(table) if table else "none"
        raise BadInput(part, expected="a table with a list of values for each key", got=shown)
    for key, values in table.items():
        if not isinstance(values, list) or not values:
            raise BadInput(f"{part}: {key}", expected="a list of values", got=f"{values!r}")
    return table


# --- names and options ----------------------------------------------------------------------------


class _Words(NamedTuple):
    """The names that any text of the sweep refers to, and the options that any of its kinds has."""

    names: set[str]
    options: dict[str, set[str]]


def _words(drafts: Sequence[Combination]) -> _Words:
    texts = {text for draft in drafts for text in _texts(draft).values()}
    kinds = {key: [_kind(key, draft) for draft in drafts] for key in _KINDS}
    return _Words(
        {name for text in texts for name in re.findall(r"{([^{}]*)}", text)},
        {
            key: {option for kind in members if kind for option in kind.__struct_fields__}
            for key, members in kinds.items()
        },
    )


def _texts(draft: Combination) -> dict[str, str]:
    return {key: str(draft.settings.get(key, _DEFAULTS[key])) for key in _TEXTS}


def _kind(key: str, draft: Combination) -> type[msgspec.Struct] | None:
    """The kind of strategy or rule that the text `key` names."""
    head = _substitute(_texts(draft)[key].partition(":")[0], draft.settings)
    return _KINDS[key].get(head.partition(":")[0].lower())


def _fill_names(draft: Combination, words: _Words) -> Combination:
    """Put names and options into the texts that refer to them, and check every key.

    A value of which no text makes use is taken out.
    """
    texts, used = _texts(draft), set(_SETTINGS)
    unknown = draft.settings.keys() - _SETTINGS - words.names
    for key in unknown - words.options["strategy"]:
        raise _unknown(key, draft)
    for key in _KINDS:
        extra = {name: draft.settings[name] for name in unknown if key == "strategy"}
        texts[key], names = _with_options(key, draft, extra, words.options[key])
        used |= names
    used |= {name for text in texts.values() for name in re.findall(r"{([^{}]*)}", text)}
    used |= set(re.findall(r"\w+", str(draft.settings.get("rate"))))  # as in "greedy / n"
    settings = {key: value for key, value in draft.settings.items() if key in _SETTINGS}
    settings |= {key: _substitute(text, draft.settings) for key, text in texts.items()}
    values = {key: value for key, value in draft.values.items() if key in used}
    reduced = len(values) < len(draft.values)
    return draft._replace(values=values, settings=settings, reduced=reduced)


def _with_options(
    key: str, draft: Combination, extra: Mapping[str, Any], known: set[str]
) -> tuple[str, set[str]]:
    """A text without the options that only other kinds have, with those of `extra` that its kind
    has; and the names of these.

    Options in a value of the sweep, such as easgd:tau=5, are left as they are.
    """
    text, kind = _texts(draft)[key], _kind(key, draft)
    takes = set(kind.__struct_fields__) if kind else known
    head, _, rest = text.partition(":")
    options = [option for option in rest.split(",") if option]
    if key not in draft.values:
        foreign = known - takes
        options = [option for option in options if option.partition("=")[0] not in foreign]
    names = {name for name in extra if name in takes}
    options += [f"{name}={extra[name]}" for name in sorted(names)]
    joint = "," if ":" in _substitute(head, draft.settings) else ":"
    return (f"{head}{joint}{','.join(options)}" if options else head), names


def _substitute(text: str, values: Mapping[str, Any]) -> str:
    for name, value in values.items():
        if name not in _SETTINGS:
            text = text.replace(f"{{{name}}}", str(value))
    return text


def _unknown(key: str, draft: Combination) -> BadInput:
    if key in ("bound", "cluster.bound"):
        return BadInput(key, expected="staleness, the present name of this key", got=key)
    if key in draft.values:
        return BadInput(
            key,
            expected=(
                f"a setting ({', '.join(sorted(_SETTINGS))}), an option of one "
                f"of the sweep's strategies, or a name that {', '.join(_TEXTS)} "
                f"refer to as {{{key}}}"
            ),
            got="none of them",
        )
    known = ", ".join(sorted({*OWN_KEYS, *_SETTINGS}))
    return BadInput(key, expected=f"one of {known}", got="an unknown key")


# --- bounds ---------------------------------------------------------------------------------------


def _takes_bound(strategy: Strategy) -> bool:
    """Return whether the staleness bound of a strategy is its user's choice."""
    return not strategy.synchronous and strategy.least_allowed(prefetch=False) is not None


def _in_rounds(strategy: Strategy) -> bool:
    return isinstance(strategy.server(1).merge, Round)


def _set_bound(draft: Combination, strategy: Strategy, *, lenient: bool) -> Combination:
    """Set the bound in steps, None for no bound, in place of the file's value."""
    value = draft.settings.get("staleness", USUAL)
    try:
        bound = staleness_bound("staleness", value)
    except BadInput:
        expected = f'a whole number of steps, "{NO_BOUND}" or "{USUAL}"'
        raise BadInput("staleness", expected=expected, got=f"{value!r}") from None
    values = dict(draft.values)
    if values.get("staleness") == inf:
        values["staleness"] = NO_BOUND  # as rules and labels call it
    reduced = draft.reduced or values.get("staleness") == USUAL
    if bound == USUAL:
        bound = strategy.suitable_bound()
    if lenient and not _takes_bound(strategy) and bound != strategy.usual_bound:
        bound, reduced = strategy.usual_bound, True
        values.pop("staleness", None)
    settings = {**draft.settings, "staleness": bound}
    return draft._replace(values=values, settings=settings, reduced=reduced)


def _without_limit(draft: Combination) -> Combination:
    """Take out the limit on stale pushes, of which rounds have none."""
    if draft.settings.get("on_stale", "wait") == "wait":
        return draft
    values = {key: value for key, value in draft.values.items() if key != "on_stale"}
    settings = {**draft.settings, "on_stale": "wait"}
    return draft._replace(values=values, settings=settings, reduced=True)


def _refusal(draft: Combination, strategy: Strategy) -> str:
    """Why the strategy cannot have this bound or this number of workers; "" if it can."""
    workers = draft.settings.get("cluster.workers", ClusterModel().workers)
    try:
        if isinstance(workers, int) and workers > 0:
            strategy = strategy.for_workers(workers)
        strategy.check(draft.settings["staleness"], prefetch=False)
    except BadInput as error:
        return str(error)
    return ""


def _each_once(combinations: Sequence[Combination]) -> tuple[list[Combination], list[LeftOut]]:
    """Of combinations that are the same after a reduction, the one that keeps most values.

    Those that were the same in the file stay: they are an error, which names both.
    """
    same: dict[str, list[Combination]] = {}
    for draft in combinations:
        same.setdefault(repr(sorted(draft.settings.items())), []).append(draft)
    unique, left_out = list[Combination](), list[LeftOut]()
    for group in same.values():
        if not any(draft.reduced for draft in group):
            unique += group
            continue
        first = max(group, key=lambda draft: len(draft.values))
        unique.append(first)
        reason = f"the same as {values_label(first.values)}"
        left_out += [LeftOut(draft.written, reason) for draft in group if draft is not first]
    return unique, left_out
