"""The second oracle: recomputes weights and slots from the records, one update after another.

Under plain SGD, two sums show which pushes were applied (invariants.py). A rule with slots depends
on more: momentum on the order of all pushes, Adam also on their number. So for rules with slots,
the rule alone replays the records of a shard's pushes, which are checked separately: without
versions, spare slots, copies, logs or resharding. At the end the shard's weights and slots must be
equal to the bit, whatever happened to it. A push that is lost, torn, applied twice or delayed
changes everything after it.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.updates import mean
from deploy.simulation.invariants import BLOCK, Array, Promise, Violation, gradient
from shards.rules import Decay, Rule
from shards.shard import Shard
from shards.tables import RateRun

_WHOLE = (RateRun(0, BLOCK, 1.0, 1.0),)

_push = lru_cache(maxsize=256)(gradient)


def check_versions(rows: NDArray[np.void], before: int, shard: Shard) -> None:
    """Check that each update after version `before` made the next version.

    `rows` are the records of this shard only.
    """
    made = sorted(set(rows["apply_version"].tolist()))
    if made != list(range(before + 1, shard.version + 1)):
        raise Violation(
            Promise.SERIAL,
            f"shard {shard.spec.shard} began at version {before}, is at {shard.version},"
            f" and its updates have made {made}",
        )


def check_state(rows: NDArray[np.void], shard: Shard, place: int, block: int, where: str) -> None:
    """Check the weights and slots of block `block`, at `place` in a shard, against its records."""
    rule, held = shard.spec.rule, shard.held
    assert held._weights is not None, "its weights were installed"
    part = slice(BLOCK * place, BLOCK * (place + 1))
    for name, found, wanted in zip(
        ("weights", *rule.slot_names),
        (held._weights, *held._slots),
        _replayed(rule, block, rows),
        strict=True,
    ):
        if found[part].tobytes() != wanted.tobytes():
            raise Violation(
                Promise.SERIAL,
                f"{where} at version {shard.version} has other {name} than its"
                f" {len(rows)} pushes make, {_first(found[part], wanted)}",
            )


def _replayed(rule: Rule, block: int, rows: NDArray[np.void]) -> Sequence[Array]:
    """A block's weights and slots after all these pushes."""
    weights, out, *slots = np.zeros((2 + len(rule.slot_names), BLOCK), np.float32)
    for version, total in _updates(block, rows):
        rule.apply(
            *(weights, total, tuple(slots), out, _WHOLE), rate=1.0, decay=Decay(), count=version
        )
        weights, out = out, weights
    return weights, *slots


def _updates(block: int, rows: NDArray[np.void]) -> Iterator[tuple[int, Array]]:
    """The version made by each update, and its gradient: that of a push, or the mean of a round."""
    records = zip(
        rows["apply_version"].tolist(), rows["worker"].tolist(), rows["seq"].tolist(), strict=True
    )
    for version, pushes in groupby(records, key=lambda row: row[0]):
        parts = [_push(block + 1, int(worker[1:]), seq)[-BLOCK:] for _, worker, seq in pushes]
        yield version, parts[0] if len(parts) == 1 else mean(parts)


def _first(found: Array, wanted: Array) -> str:
    at = int(np.flatnonzero(found.view(np.uint32) != wanted.view(np.uint32))[0])
    return f"{found[at]} at float {at}, where {wanted[at]} is expected"
