"""The oracle of rows by id: plain dicts and loops, independent of the shard's tables.

Push n of worker i by incarnation l changes the rows of `ids_of_push(i, n)`, each by a gradient of
its own. At the end every row of a shard must equal, to the bit, what the recorded pushes make of
its first values one after another: its weights, its slots and its count. A row that no push has is
not there, however often it was pulled.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.rows import Ids
from deploy.simulation.config import SimulationConfig
from deploy.simulation.invariants import Promise, Violation
from ps.session.row_requests import Gather
from shards.first_values import Uniform
from shards.row_frames import RowGradient
from shards.rules import FTRL, ROW_RULES, Adagrad, Adam, Momentum, Nesterov, RowAdagrad, Rule
from shards.shard import Shard
from shards.shard_state import IDS, META, ROWS, of_table
from shards.tables import KeyRange, SparseTable, buckets_of

F = np.float32

NAME, DIM = "rows", 3
IDS_PUSHED = range(24)
NEVER_PUSHED = 10**18
TABLE = SparseTable(NAME, DIM, Uniform(1.0), seed=5, rows=256)


class RowPush(NamedTuple):
    """A push in a shard's records: the version that it made, and its factor on the rate."""

    version: int
    worker: int
    seq: int
    incarnation: int
    rate: float


def ids_of_push(worker: int, seq: int) -> list[int]:
    """The ids that a push changes, ascending; every fourth push changes no row."""
    if seq % 4 == 0:
        return []
    count = len(IDS_PUSHED)
    # One that all workers share, and two that follow the worker.
    return sorted({seq % 5, (7 * worker + seq) % count, (11 * worker + 5 * seq) % count})


def row_of_push(number: int, worker: int, seq: int, incarnation: int) -> NDArray[np.float32]:
    """The gradient of one row of a push."""
    values = 1 + worker, seq + number % 3, (1 + incarnation % 5) * (seq % 4)
    return np.array(values, F)


def gradient_of_push(worker: int, seq: int, incarnation: int) -> RowGradient | None:
    """The gradient of all rows of a push; None if it changes none."""
    ids = ids_of_push(worker, seq)
    if not ids:
        return None
    rows = [row_of_push(number, worker, seq, incarnation) for number in ids]
    return RowGradient(np.array(ids, np.uint64), np.array(rows, F))


def gather_for(worker: int, clock: int) -> Gather:
    """The rows that a worker pulls at a clock: some that are pushed, and one that never is."""
    ids = {*ids_of_push(worker, clock + 1), clock % len(IDS_PUSHED), NEVER_PUSHED}
    return Gather({NAME: np.array(sorted(ids), np.uint64)})


def ids_within(buckets: KeyRange) -> list[int]:
    """The ids of pushes that a shard of these buckets owns."""
    ids = np.array(IDS_PUSHED, np.uint64)
    owned = [buckets.start <= bucket < buckets.stop for bucket in buckets_of(ids)]
    return [int(number) for number in ids[owned]]


def first_row(number: int, table: SparseTable = TABLE) -> NDArray[np.float32]:
    """The first values of an id."""
    ids: Ids = np.array([number], np.uint64)
    (row,) = table.init.make_rows(ids, table.dim, table.seed)
    return np.array(row, F)


def check_rows(
    shard: Shard,
    setting: SimulationConfig,
    pushes: Mapping[int, Sequence[RowPush]],
    where: str,
) -> None:
    """Check the rows of a shard against the pushes of each of its ids, in the order applied."""
    rule = ROW_RULES[setting.rows]()
    arrays = of_table(shard.parameters.copy(), NAME)
    held = {number: at for at, number in enumerate(arrays[IDS].tolist())}
    codec = setting.row_push
    expected = {number: replay(number, rule, codec, pushed) for number, pushed in pushes.items()}
    present = {number for number, row in expected.items() if row is not None}
    if held.keys() != present:
        raise Violation(
            Promise.SERIAL,
            f"{where} holds the rows {sorted(held)}, its pushes make {sorted(present)}",
        )
    for number, row in expected.items():
        if row is None:
            continue
        at = held[number]
        floats, meta = arrays[ROWS][at], arrays[META][at]
        actual = floats.tobytes(), int(meta[1]), meta[2:3].view(F).tobytes()
        if actual != (row.floats(rule).tobytes(), row.count, row.row_slot.tobytes()):
            raise Violation(
                Promise.SERIAL,
                f"{where}: row {number} is {floats} after {meta[1]} updates, its pushes make"
                f" {row.floats(rule)} after {row.count}",
            )


def round_row(codec: str, row: NDArray[np.float32]) -> NDArray[np.float32]:
    """A row as it arrives: of the nearest bf16, or of the nearest of 255 multiples of a scale."""
    match codec:
        case "bf16":
            bits = row.view(np.uint32)
            halves = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
            return ((bits + halves) & np.uint32(0xFFFF0000)).view(F)
        case "int8" if row.any():
            scale = F(max(abs(value) for value in row)) / F(127)
            return np.array([F(round(value / scale)) * scale for value in row], F)
    return row


def replay(number: int, rule: Rule, codec: str, pushes: Sequence[RowPush]) -> "OracleRow | None":
    """A row after all these pushes; None if none of them changes it.

    `codec` is that of pushed rows. Pushes of one version are a round: their mean counts, and zero
    for one without the row.
    """
    row: OracleRow | None = None
    for version in dict.fromkeys(push.version for push in pushes):
        together = [push for push in pushes if push.version == version]
        gradients = [
            round_row(codec, row_of_push(number, push.worker, push.seq, push.incarnation))
            for push in together
            if number in ids_of_push(push.worker, push.seq)
        ]
        if gradients:
            total = np.add.reduce(gradients, dtype=np.float64).astype(F)
            if len(together) > 1 or len(gradients) > 1:
                total /= F(len(together))
            row = row or OracleRow(first_row(number))
            # A push without parts at this shard is recorded with rate 0.
            row.update(rule, total, F(max(push.rate for push in together)))
    return row


class OracleRow:
    """One row and its optimiser state, updated value by value."""

    def __init__(self, weights: NDArray[np.float32]) -> None:
        self.weights = weights.copy()
        self.first_slot, self.second_slot = np.zeros_like(weights), np.zeros_like(weights)
        self.row_slot = F(0)
        self.count = 0

    def update(
        self,
        rule: Rule,
        gradient: NDArray[np.float32],
        rate: F,
        decay: F = F(0),  # noqa: B008
    ) -> None:
        """Apply one gradient, value by value, by a rule of rows."""
        self.count += 1
        steps = gradient if decay == 0 else gradient + decay * self.weights
        if isinstance(rule, RowAdagrad):
            self._update_by_row(rule, steps, rate)
            return
        for column, g in enumerate(steps):
            self._update_float(rule, column, g, rate)

    def floats(self, rule: Rule) -> NDArray[np.float32]:
        """The row as a state has it: its weights, then the slots that the rule has."""
        slots = self.first_slot, self.second_slot
        return np.concatenate([self.weights, *slots[: len(rule.slot_names)]])

    def _update_float(self, rule: Rule, column: int, g: F, rate: F) -> None:
        w, a, b = self.weights[column], self.first_slot[column], self.second_slot[column]
        match rule:
            case Momentum():
                a = F(rule.momentum) * a + rate * g
                w = w - a
            case Nesterov():
                mu = F(rule.momentum)
                new = mu * a + rate * g
                w, a = w - ((F(1) + mu) * new - mu * a), new
            case Adagrad():
                a += g * g
                w -= rate * (g / (np.sqrt(a) + F(rule.delta)))
            case Adam():
                keep1, keep2 = F(rule.beta1), F(rule.beta2)
                a = keep1 * a + (F(1) - keep1) * g
                b = keep2 * b + (F(1) - keep2) * (g * g)
                past1, past2 = power(rule.beta1, self.count), power(rule.beta2, self.count)
                scaled = F(float(rate) * (np.sqrt(1 - past2) / (1 - past1)))
                w -= scaled * (a / (np.sqrt(b) + F(rule.delta)))
            case FTRL():
                beta, l1, l2 = F(rule.beta), F(rule.l1), F(rule.l2)
                if a == 0 and b == 0:
                    a = a - beta * w
                squares = b + g * g
                a = a + rate * g - (np.sqrt(squares) - np.sqrt(b)) * w
                b, size = squares, abs(a) - rate * l1
                sign = F(-1) if np.signbit(a) else F(1)
                divisor = beta + np.sqrt(b) + rate * l2
                w = F(0) if size <= 0 else -(sign * size) / divisor
            case _:
                w -= rate * g
        self.weights[column], self.first_slot[column], self.second_slot[column] = w, a, b

    def _update_by_row(self, rule: RowAdagrad, steps: NDArray[np.float32], rate: F) -> None:
        a = [F(0)] * 8
        for column, g in enumerate(steps):
            a[column % 8] += g * g
        squares = ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]))
        self.row_slot += squares * (F(1) / F(len(steps)))
        factor = rate / (np.sqrt(self.row_slot) + F(rule.delta))
        for column, g in enumerate(steps):
            self.weights[column] -= factor * g


def power(base: float, exponent: int) -> float:
    """A number to the power of a whole one, by squares, which every machine rounds alike."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base, exponent = base * base, exponent >> 1
    return result
