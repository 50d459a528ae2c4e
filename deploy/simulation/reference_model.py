"""The second oracle: recomputes weights and slots from the records, one update after another.

Under plain SGD, two sums show which pushes were applied (invariants.py). A rule with slots depends
on more: momentum on the order of all pushes, Adam also on their number. With two tables a push may
leave one out. So for such jobs this file applies the rules alone to the records of a shard's
pushes, without versions, spare slots, copies, logs or resharding; the records are checked
separately. At the end the shard's weights and slots must be equal to the bit, whatever happened to
it. A push that is lost, torn, applied twice or delayed changes everything after it.

A round is the mean of its pushes, and a buffer the sum of its pushes divided by its size. A push
that was dropped changes nothing. The rate of an update is the one in its records. A push's
staleness follows from the versions in its record, and decides, under a limit on staleness, whether
the push must have been scaled down or dropped.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.updates import mean
from deploy.simulation.config import SimulationConfig
from deploy.simulation.invariants import BLOCK, Array, Promise, Violation, gradient
from shards.aggregation import Buffer, Quorum, StaleLimit
from shards.reports import Reports
from shards.rules import RULES, Decay, Rule
from shards.shard import Shard
from shards.shard_state import WEIGHTS, of_table
from shards.tables import RateRun

Beginning = tuple[int, Mapping[str, int]]
"""A shard's first state: its version, and the number of updates of each table."""

_WHOLE = (RateRun(0, BLOCK, 1.0, 1.0),)

_push = lru_cache(maxsize=256)(gradient)


def check_versions(rows: NDArray[np.void], before: int, shard: Shard) -> None:
    """Check that each update after version `before` made the next version.

    `rows` are the records of this shard only.
    """
    versions = sorted(set(rows["apply_version"][rows["dropped"] == 0].tolist()))
    expected = list(range(before + 1, shard.version + 1))
    if isinstance(shard.spec.merge, Quorum):
        return  # a report names the first version that it can be in, and the state shows the merges
    if isinstance(shard.spec.merge, Buffer):
        # A buffer that came with the state may be the whole first update, of which this shard has
        # no records; and the present buffer is in no update yet.
        expected += [shard.version + 1] if shard.version + 1 in versions else []
        expected = expected if before + 1 in versions else expected[1:]
    if versions != expected:
        raise Violation(
            Promise.SERIAL,
            f"shard {shard.spec.shard} began at version {before}, is at {shard.version},"
            f" and its updates have made {versions}",
        )


def check_limit(rows: NDArray[np.void], limit: StaleLimit, where: str) -> None:
    """Check that exactly the pushes above a limit on staleness were dropped or scaled down."""
    records = [tuple(row) for row in rows[["seq", "scale", "dropped"]].tolist()]
    for (seq, scale, dropped), staleness in zip(records, measure_staleness(rows), strict=True):
        drops = limit.drop and staleness > limit.after
        expected = 0.0 if drops else limit_factor(staleness, limit)
        if (scale, bool(dropped)) != (expected, drops):
            raise Violation(
                Promise.SERIAL,
                f"{where}: push {seq} of staleness {staleness} counts {scale:g} times,"
                f" {expected:g} times expected under {limit}",
            )


def measure_staleness(rows: NDArray[np.void]) -> list[int]:
    """The updates between the read and the application of each push; a dropped one made none."""
    applied = rows["apply_version"] - (rows["dropped"] == 0)
    return [int(t) for t in applied - rows["read_version"]]


def limit_factor(staleness: int, limit: StaleLimit | None) -> float:
    stale = limit is not None and staleness > limit.after
    return limit.after / staleness if limit is not None and stale else 1.0


def check_state(
    rows: NDArray[np.void],
    shard: Shard,
    setting: SimulationConfig,
    block: int,
    begun: Sequence[Beginning],
    where: str,
) -> None:
    """Check the weights and slots of a block of the arena against the records of its pushes.

    `begun` are the first states of the shards that held the block, one after another.
    """
    start = BLOCK * block
    section = next(
        candidate
        for candidate in shard.spec.layout.sections(shard.spec.keys)
        if candidate.start <= start < candidate.start + len(candidate.keys)
    )
    part = slice(start - section.start, start - section.start + BLOCK)
    rule = RULES[setting.rules[section.table]]()
    seqs = {seq for seq in rows["seq"].tolist() if section.table in setting.tables_of_push(seq)}
    pushed = rows[np.isin(rows["seq"], list(seqs))]
    if isinstance(shard.spec.merge, Quorum):
        _check_in_time(pushed, where)
    arrays = of_table(shard.parameters.copy(), section.table)
    counts = [(version, updates.get(section.table, 0)) for version, updates in begun]
    buffer = ("buffer",) if isinstance(shard.spec.merge, Buffer | Quorum) else ()
    for name, expected in zip(
        (WEIGHTS, *rule.slot_names, *buffer),
        _replay(shard, section.table, rule, block, pushed, counts, setting.stale),
        strict=True,
    ):
        actual = arrays[name][part]
        if actual.tobytes() != expected.tobytes():
            raise Violation(
                Promise.SERIAL,
                f"{where} at version {shard.version} has other {name} than its"
                f" {len(pushed)} pushes make, {_first(actual, expected)}",
            )


def _check_in_time(rows: NDArray[np.void], where: str) -> None:
    """Check that no report was merged that began from weights which a merge had replaced."""
    merged = rows[rows["dropped"] == 0]
    late = merged[merged["read_version"] < merged["apply_version"] - 1]
    if len(late):
        raise Violation(Promise.SERIAL, f"{where} merged late report {late[0]['seq']}")


def _replay(
    shard: Shard,
    table: str,
    rule: Rule,
    block: int,
    rows: NDArray[np.void],
    counts: Sequence[tuple[int, int]],
    limit: StaleLimit | None,
) -> Sequence[Array]:
    """A block's weights and slots, a buffer included, after all these pushes of its table.

    After each version in `counts`, the table's updates are counted from the number there: with
    backup workers, one of the shards that a job left may have applied more rounds than another.
    """
    merge, count = shard.spec.merge, 0
    weights, out, *slots = np.zeros((2 + len(rule.slot_names), BLOCK), np.float32)
    buffer = np.zeros(BLOCK, np.float32)
    reports = shard.updates.reports.by_table.get(table, Reports())
    for version, parts, stale, rate, weights_of in _updates(block, rows[rows["dropped"] == 0]):
        if isinstance(merge, Quorum):
            total = np.add.reduce([w * part for w, part in zip(weights_of, parts, strict=True)])
            if version > reports.changed:
                buffer = total
                continue
            total /= sum(weights_of)
        elif isinstance(merge, Buffer):
            total = np.add.reduce(parts)  # whole numbers: exact in any order
            if version > shard.version:
                buffer = total
                continue
            total /= np.float32(merge.size)
        else:
            total = parts[0] if len(parts) == 1 else mean(parts)
        known = [updates for began, updates in counts if began < version]
        count = max(count, *known) + 1
        rule.apply(
            *(weights, total, tuple(slots), out, _WHOLE),
            rate=rate * limit_factor(stale, limit),
            decay=Decay(),
            count=count,
        )
        weights, out = out, weights
    return (weights, *slots, *((buffer,) if isinstance(merge, Buffer | Quorum) else ()))


def _updates(
    block: int, rows: NDArray[np.void]
) -> Iterator[tuple[int, list[Array], int, float, list[np.float32]]]:
    """The version made by each update, the gradients of its pushes, the first one's staleness and
    rate, and the weights of its pushes as reports.
    """
    names = ("apply_version", "worker", "seq", "incarnation", "rate")
    columns = (rows[name].tolist() for name in names)
    records = zip(*columns, measure_staleness(rows), strict=True)
    for version, group in groupby(records, key=lambda row: row[0]):
        pushes = list(group)
        gradients = [
            _push(block + 1, int(worker[1:]), seq, incarnation)[-BLOCK:]
            for _, worker, seq, incarnation, _, _ in pushes
        ]
        weights = [np.float32((int(worker[1:]) + 1) ** 2) for _, worker, *_ in pushes]
        yield version, gradients, pushes[0][5], pushes[0][4], weights


def _first(actual: Array, expected: Array) -> str:
    at = int(np.flatnonzero(actual.view(np.uint32) != expected.view(np.uint32))[0])
    return f"{actual[at]} at float {at}, where {expected[at]} is expected"
