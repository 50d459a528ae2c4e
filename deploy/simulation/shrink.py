"""Reduces a failing run: fewer faults, shorter faults, a smaller cluster, as far as it still fails.

Faults are data, so any subset of their list is a valid run. Long stretches are removed first, then
shorter ones down to single faults (Zeller and Hildebrandt's delta debugging, 2002, without its
complements); then the remaining faults are weakened. Each try is a run. A smaller run counts if it
breaks any promise, even another one: the goal is the shortest run that fails.
"""

from collections.abc import Callable, Iterator

import msgspec

from deploy.simulation.faults import AnyFault
from deploy.simulation.scenarios import Scenario

TRIES = 400
_PLAIN = {
    "second": "",
    "rows": "",
    "rule": "sgd",
    "prefetch": False,
    "warm_steps": 0,
    "busy_s": 0.0,
    "state_s": 0.0,
}

Fails = Callable[[Scenario], bool]


def shrink(scenario: Scenario, fails: Fails, tries: int = TRIES) -> Scenario:
    """The smallest scenario found that still `fails`, after at most `tries` runs."""
    best = scenario
    improved = True
    while improved:
        improved = False
        for smaller in _smaller(best):
            if tries == 0:
                return best
            tries -= 1
            if fails(smaller):
                best, improved = smaller, True
                break
    return best


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    """Smaller runs, starting with those that leave out most."""
    yield from _fewer_faults(scenario)
    yield from _smaller_clusters(scenario)
    for number, fault in enumerate(scenario.faults):
        for weaker in _weaker(fault):
            faults = (*scenario.faults[:number], weaker, *scenario.faults[number + 1 :])
            yield msgspec.structs.replace(scenario, faults=faults)


def _fewer_faults(scenario: Scenario) -> Iterator[Scenario]:
    faults = scenario.faults
    length = len(faults)
    while length:
        for begin in range(0, len(faults), length):
            remaining = faults[:begin] + faults[begin + length :]
            yield msgspec.structs.replace(scenario, faults=remaining)
        length //= 2


def _smaller_clusters(scenario: Scenario) -> Iterator[Scenario]:
    """Runs with fewer workers, shards, steps or pushes in flight; a fault's target is kept."""
    setting = scenario.setting
    text = " ".join(map(str, scenario.faults))
    for name, least in (("workers", 1), ("shards", 1), ("steps", 2), ("in_flight", 1)):
        value = getattr(setting, name)
        last = f"w{value - 1}'" if name == "workers" else f" {value - 1}'"
        named = name in {"workers", "shards"} and last in text
        if value > least and not named and not (name == "shards" and "restart" in text):
            changed = msgspec.structs.replace(setting, **{name: value - 1})
            yield msgspec.structs.replace(scenario, setting=changed)
    for name, plain in _PLAIN.items():
        if getattr(setting, name) != plain:
            changed = msgspec.structs.replace(setting, **{name: plain})
            yield msgspec.structs.replace(scenario, setting=changed)


def _weaker(fault: AnyFault) -> Iterator[AnyFault]:
    """A fault of half the duration, or with a rounded time, which is easier to read."""
    lasting = getattr(fault, "for_s", 0.0)
    if lasting > 0.2:
        yield msgspec.structs.replace(fault, for_s=round(lasting / 2, 1))
    if fault.at != round(fault.at, 1):
        yield msgspec.structs.replace(fault, at=round(fault.at, 1))
