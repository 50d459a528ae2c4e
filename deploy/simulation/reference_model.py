"""The second oracle: recomputes weights and slots from the records, one update after another.

Under plain SGD, two sums show which pushes were applied (invariants.py). A rule with slots depends
on more: momentum on the order of all pushes, Adam also on their number. With two tables a push may
leave one out. So for such jobs the rules alone replay the records of a shard's pushes, which are
checked separately: without versions, spare slots, copies, logs or resharding. At the end the
shard's weights and slots must be equal to the bit, whatever happened to it. A push that is lost,
torn, applied twice or delayed changes everything after it.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.updates import mean
from deploy.simulation.config import SimulationConfig
from deploy.simulation.invariants import BLOCK, Array, Promise, Violation, gradient
from shards.rules import RULES, Decay, Rule
from shards.shard import Shard
from shards.shard_state import WEIGHTS, of_table
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


def check_state(
    rows: NDArray[np.void], shard: Shard, setting: SimulationConfig, block: int, where: str
) -> None:
    """Check the weights and slots of a block of the arena against the records of its pushes."""
    start = BLOCK * block
    section = next(
        one
        for one in shard.spec.layout.sections(shard.spec.keys)
        if one.start <= start < one.start + len(one.keys)
    )
    part = slice(start - section.start, start - section.start + BLOCK)
    rule = RULES[setting.rules[section.table]]()
    seqs = {seq for seq in rows["seq"].tolist() if section.table in setting.pushed(seq)}
    pushed = rows[np.isin(rows["seq"], list(seqs))]
    arrays = of_table(shard.held.copy(), section.table)
    for name, wanted in zip(
        (WEIGHTS, *rule.slot_names), _replayed(rule, block, pushed), strict=True
    ):
        found = arrays[name][part]
        if found.tobytes() != wanted.tobytes():
            raise Violation(
                Promise.SERIAL,
                f"{where} at version {shard.version} has other {name} than its"
                f" {len(pushed)} pushes make, {_first(found, wanted)}",
            )


def _replayed(rule: Rule, block: int, rows: NDArray[np.void]) -> Sequence[Array]:
    """A block's weights and slots after all these pushes, which are those of its table."""
    weights, out, *slots = np.zeros((2 + len(rule.slot_names), BLOCK), np.float32)
    for count, total in enumerate(_updates(block, rows), 1):
        rule.apply(
            *(weights, total, tuple(slots), out, _WHOLE), rate=1.0, decay=Decay(), count=count
        )
        weights, out = out, weights
    return weights, *slots


def _updates(block: int, rows: NDArray[np.void]) -> Iterator[Array]:
    """The gradient of each update: that of a push, or the mean of a round."""
    records = zip(
        rows["apply_version"].tolist(), rows["worker"].tolist(), rows["seq"].tolist(), strict=True
    )
    for _, pushes in groupby(records, key=lambda row: row[0]):
        parts = [_push(block + 1, int(worker[1:]), seq)[-BLOCK:] for _, worker, seq in pushes]
        yield parts[0] if len(parts) == 1 else mean(parts)


def _first(found: Array, wanted: Array) -> str:
    at = int(np.flatnonzero(found.view(np.uint32) != wanted.view(np.uint32))[0])
    return f"{found[at]} at float {at}, where {wanted[at]} is expected"
