"""The promises that must hold under all faults, and the checks that detect a breach of each.

Every push has its own value: incarnation l of worker i pushes, as push n of that worker, SCALE
times `marks(n, l)` at the FLOATS floats of worker i in every block, at rate 1 under plain SGD. The
sums are exact in float32, so any weights show how many pushes of each worker they contain, and
which incarnation made them; a push that is lost, doubled or torn is visible in them. This is the
oracle; it is independent of the ledger that it checks. Rules with slots have another one
(reference_model.py).

A push that its worker did not live to complete may be at some shards only. The next incarnation
then begins after it, and the number stays `absent` at the other shards.

To keep a run cheap, the checks only examine what has just happened: an answer before it leaves, a
view when it arrives, an entry when a backup has applied it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from enum import StrEnum
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.simulation.config import FIRST, SimulationConfig
from ps.session.error_feedback import ERROR
from ps.session.session import Session
from shards.messages import Joined, Pull, Weights
from shards.shard import Shard
from shards.shard_state import array_name
from shards.shard_status import Standing
from shards.tables import SHARD_ALIGNMENT
from shards.transition_io import Outgoing

FLOATS = 3  # of each worker in each block
SCALE = 12  # divisible by every size of a round up to four
BLOCK = SHARD_ALIGNMENT  # floats a shard
EXACT_PUSHES = ("none", "fp16", "bf16")  # codecs that lose nothing of a gradient

Array = NDArray[np.float32]


class Promise(StrEnum):
    """The promises of the system; a violation names the one that is broken."""

    EXACTLY_ONCE = "an acknowledged push is applied, exactly once"
    NAMED = "an acknowledged push is named as dropped if it was, and only then"
    ONE_PUSH = "what all shards hold under one number of a worker comes from one push"
    DURABLE = "every copy that may be promoted holds every acknowledged push"
    ORDER = "the pushes, clocks and incarnations of a worker are in order"
    BOUND = "the bound holds on every served pull"
    VERSIONS = "versions never decrease"
    SERIAL = "weights and slots equal the recorded pushes applied one after another, bit for bit"
    UNTORN = "a message does not change in transit"
    ONE_CUT = "quiesced shards hold, and hand over, the same pushes of every living worker"
    FINAL = "a resharding that was confirmed to its operator is final"
    RECOVERY = "a shard recovers its state bit for bit"
    SAME_COPY = "a backup equals its primary at the same entry"
    SETTINGS = "a change of the settings that a shard has answered stays in force"
    ONE_PRIMARY = "at most one primary commits in an epoch"
    GRACE = "reports are merged without those of others when their grace has ended, not before"
    PROGRESS = "when the faults end, every worker and shard finishes"
    BOUNDED = "memory is bounded"
    NO_SURPRISE = "only errors that the faults explain are raised"


class Violation(AssertionError):
    """A promise was broken; the run ends here."""

    def __init__(self, promise: Promise, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


def marks(seq: int, incarnation: int) -> tuple[int, int, int]:
    """The values of push `seq` by this incarnation, small enough to be exact in 16 bits."""
    return 1, seq, seq * (1 + incarnation % 7)


def gradient(blocks: int, number: int, seq: int, incarnation: int) -> Array:
    """The gradient of push `seq` of worker `number`; each block's last float identifies it."""
    values = np.zeros(BLOCK * blocks, np.float32)
    for offset, mark in enumerate(marks(seq, incarnation)):
        values[FLOATS * number + offset :: BLOCK] = SCALE * mark
    values[BLOCK - 1 :: BLOCK] = np.arange(1, blocks + 1)
    return values


def last_applied(weights: Array, number: int, absent: Set[int]) -> int:
    """The number of a worker's last push in a shard's weights, which lack those in `absent`."""
    return _last(int(-weights[FLOATS * number] / SCALE), absent)


def _last(count: int, absent: Set[int]) -> int:
    """The number of push `count` if those in `absent` are left out; 0 for the push before all."""
    last = count
    for seq in sorted(absent):
        last += seq <= last
    return last if count else 0


def check_prefix(weights: Array, absent: Sequence[Set[int]], where: str) -> None:
    """Each block of the weights holds the first pushes of each worker, each of them once.

    `absent` has, for each worker, the numbers of pushes that this shard never had.
    """
    for start in range(0, len(weights), BLOCK):
        _check_block(weights[start : start + FLOATS * len(absent)].tolist(), absent, where)


def _check_block(sums: list[float], absent: Sequence[Set[int]], where: str) -> None:
    for number, missing in enumerate(absent):
        count, total = -sums[FLOATS * number] / SCALE, -sums[FLOATS * number + 1] / SCALE
        last = _last(int(count), missing)
        expected = last * (last + 1) // 2 - sum(seq for seq in missing if seq <= last)
        if count != int(count) or total != expected:
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"{where} holds {count:g} pushes of w{number}, with numbers of sum {total:g}",
            )


def check_pending(session: Session, in_flight: int) -> None:
    """Check that a session forgets requests that have been answered."""
    most = session.map.shards * (in_flight + 6)
    waits = len(session._outstanding)
    if waits > most:
        raise Violation(
            Promise.BOUNDED,
            f"{session.worker} waits for {waits} answers, at most {most} expected",
        )


def check_drained(shard: Shard, number: int) -> None:
    """Check that no request waits at a shard after all its workers have left."""
    if shard.gate.parked or shard.updates.round or shard.parameters.buffered:
        raise Violation(
            Promise.BOUNDED, f"shard {number} still holds requests of workers that left"
        )


class PullWatch:
    """Watches one shard's pulls: the clock of each, and whether its answer is allowed."""

    def __init__(
        self,
        number: int,
        setting: SimulationConfig,
        served: Callable[[Shard, int, Array | None], None],
        follows: Callable[[bytes], bool] | None,
        absent: Callable[[], Sequence[Set[int]]],
    ) -> None:
        """`served` is called for each read, with the clock up to which it contains all pushes, and
        with its weights if pushes can be counted in them.

        `follows` is for a shard that receives the job by resharding; it returns whether the worker
        at an address has trained with the former shards. `absent` returns, for each worker, the
        numbers of pushes that the shard never had.
        """
        self._number, self._absent, self._served = number, absent, served
        # A round with backups skips its slowest workers: reads need not hold their pushes.
        self._unbounded = bool(setting.backups)
        self._burst, self._follows = setting.burst, follows
        # Whether pushes can be counted, because weights are float32 and not means of rounds.
        self.exact = exact(setting, setting.pull)
        self.whole = True  # until the shard loses state, with its clocks, and does not report it
        self._clocks: dict[tuple[bytes, int], int] = {}
        self._joined: set[bytes] = set()
        self._readers: set[bytes] = set()

    def note_request(self, sender: bytes, message: Any) -> None:
        """Note a request that has arrived."""
        if type(message) is Pull:
            self._clocks[sender, message.request] = message.clock

    def check_answer(self, shard: Shard, answer: Outgoing, bound: int | None) -> None:
        """Check one answer of `shard`: a pull's, against the staleness bound in force then."""
        if type(answer.message) is Joined:
            self._joined.add(answer.to)
        elif type(answer.message) is Weights and answer.to:
            self._readers.add(answer.to)
            self._check_weights(shard, answer, bound)

    def check_gap(self, shard: Shard, most: int | None) -> None:
        """Check that two workers are no further apart than `most`, the largest bound so far, allows
        (None: none).
        """
        bound = None if self._unbounded else most
        # At a rolled-back shard, a worker may have pushes to repeat, so its clock may be far behind
        # for a moment. There, read_checks.py alone checks the bound.
        if bound is not None and self.whole and not shard.part.rolled_back:
            gap = max(shard.ledger.clock_gap, shard.metrics.max_clock_gap)
            if self._follows is not None:
                gap = self._gap_after_a_move(shard, self._follows)
            if gap > bound + self._burst:
                raise Violation(Promise.BOUND, f"a gap of {gap} under bound {bound}")

    def _gap_after_a_move(self, shard: Shard, follows: Callable[[bytes], bool]) -> int:
        """The largest clock gap between two workers that have joined here and must be close.

        After a resharding, the former shards still serve reads after they have exported their
        state, and their slowest clock may rise meanwhile. A worker may then bring pushes made from
        such reads, which are further ahead of a newcomer. Those reads lack nothing, because they
        were served before the newcomer was registered. A worker that comes from the former shards
        first joins at the clock that they exported, then at its own. So a worker that has not read
        here is compared only with those that come from the former shards and have read here.
        """
        clocks = {
            address: entry.clock
            for name, entry in shard.ledger.entries.items()
            if entry.standing is Standing.ACTIVE
            and (address := f"{name}/{entry.incarnation}".encode()) in self._joined
        }
        readers = {address: clocks[address] for address in clocks.keys() & self._readers}
        followers = [clock for address, clock in readers.items() if follows(address)]
        slowest = min(clocks.values(), default=0)
        fastest = max(clocks.values(), default=0)
        return max(
            max(readers.values(), default=slowest) - slowest,
            fastest - min(followers, default=fastest),
        )

    def _check_weights(self, shard: Shard, answer: Outgoing, bound: int | None) -> None:
        weights: Array | None = None
        if self.exact:
            frame = answer.frames[0]
            assert isinstance(frame, np.ndarray)
            weights = frame
            check_prefix(weights, self._absent(), f"a pull of shard {self._number}")
        slowest = shard.ledger.min_clock
        if bound is None or slowest is None or self._unbounded:
            return
        clock = self._clocks[answer.to, answer.message.request]
        if clock - bound > slowest:
            raise Violation(
                Promise.BOUND,
                f"shard {self._number} serves a pull at clock {clock}, bound {bound},"
                f" slowest {slowest}",
            )
        self._served(shard, clock - bound, weights)

    def check_open(self, shard: Shard) -> None:
        """Check that no eligible request is left parked."""
        for waiting in shard.gate.parked.values():
            if shard.workers.may_answer(waiting.message, shard.ledger.min_clock):
                raise Violation(Promise.PROGRESS, f"left waiting at the gate: {waiting.message}")


def image(shard: Shard) -> tuple[object, ...]:
    """A shard's version, floats, ledger and open rounds, for comparing two states."""
    arrays = {} if shard.parameters.empty else shard.parameters.copy()
    entries = sorted(shard.ledger.entries.items())
    waiting = sorted(shard.updates.round.items())
    reports = shard.updates.reports.by_table
    return (
        shard.version,
        shard.parameters.buffered,
        shard.updates.steps,
        shard.ledger.floor,
        shard.part.settings,
        tuple((name, array.tobytes()) for name, array in arrays.items()),
        tuple(
            (n, e.incarnation, e.seq, e.clock, e.step, e.standing, e.takeovers, e.admitted)
            for n, e in entries
        ),
        tuple(
            (n, push.message.seq, [bytes(frame) for frame in push.frames]) for n, push in waiting
        ),
        tuple((n, r.changed, *r.workers, r.weight, *r.sitting) for n, r in reports.items()),
    )


def check_records(
    rows: NDArray[np.void],
    steps: int,
    names: Sequence[str],
    excused: Mapping[str, Set[int]],
    absent: Mapping[str, Set[int]],
    forgotten: Mapping[str, Set[int]],
) -> None:
    """Check that each worker's updates are its pushes in order, without gaps or old incarnations.

    Three kinds may be missing: `excused` pushes, during which their worker fell silent and the job
    was resharded; `absent` pushes, during which an incarnation died; and `forgotten` pushes, which
    a rolled-back shard lost and no worker repeated.
    """
    for name in names:
        records = rows[rows["worker"] == name.encode()]
        out = excused.get(name, set()) | absent.get(name, set())
        out |= forgotten.get(name, set()) - set(records["seq"].tolist())
        expected = [seq for seq in range(1, steps + 1) if seq not in out]
        if records["seq"].tolist() != expected:
            raise Violation(Promise.EXACTLY_ONCE, f"{name}'s pushes were {records['seq'].tolist()}")
        if np.any(np.diff(records["incarnation"]) < 0):
            raise Violation(
                Promise.ORDER, f"an earlier incarnation of {name} wrote after a later one"
            )
        for incarnation in set(records["incarnation"].tolist()):
            # An earlier incarnation may have sent this shard a clock that shard 0 never received.
            clocks = records["clock"][records["incarnation"] == incarnation]
            if np.any(np.diff(clocks) < 1):
                raise Violation(
                    Promise.ORDER, f"{name}/{incarnation}'s clocks were {clocks.tolist()}"
                )


def check_one_push(blocks: Iterable[NDArray[np.void]]) -> None:
    """Check that the records of all blocks have each push of a worker from one incarnation."""
    owners: dict[tuple[bytes, int], int] = {}
    for rows in blocks:
        for worker, seq, incarnation in rows[["worker", "seq", "incarnation"]].tolist():
            first = owners.setdefault((worker, seq), incarnation)
            if first != incarnation:
                raise Violation(
                    Promise.ONE_PUSH,
                    f"push {seq} of {worker.decode()} is that of incarnation {first} at one shard"
                    f" and that of {incarnation} at another",
                )


def check_begun(
    rows: NDArray[np.void],
    absent: Mapping[str, Set[int]],
    forgotten: Mapping[str, Set[int]],
    where: str,
) -> None:
    """Check that each worker's updates are its first pushes, each once.

    Those that are `absent` are left out, and of the `forgotten` ones those that nobody repeated.
    """
    for worker in set(rows["worker"].tolist()):
        name, seqs = worker.decode(), rows["seq"][rows["worker"] == worker].tolist()
        missing = absent.get(name, set()) | (forgotten.get(name, set()) - set(seqs))
        last = _last(len(seqs), missing)
        if seqs != [seq for seq in range(1, last + 1) if seq not in missing]:
            raise Violation(Promise.EXACTLY_ONCE, f"{where} holds pushes {seqs} of {name}")


def check_sums(rows: NDArray[np.void], weights: Array, number: int, residual: Array) -> None:
    """Check that the weights plus a worker's residual equal its pushes, or its shares of rounds."""
    sizes = Counter(rows["apply_version"].tolist())
    records = rows[rows["worker"] == f"w{number}".encode()]
    shares = [SCALE // sizes[version] for version in records["apply_version"].tolist()]
    pushes = [marks(seq, life) for seq, life in records[["seq", "incarnation"]].tolist()]
    expected = tuple(
        sum(share * push[offset] for share, push in zip(shares, pushes, strict=True))
        for offset in range(FLOATS)
    )
    floats = slice(FLOATS * number, FLOATS * number + FLOATS)
    sums = tuple((residual[floats] - weights[floats]).tolist())
    if sums != expected:
        raise Violation(
            Promise.EXACTLY_ONCE, f"w{number} has {sums} in the weights, {expected} expected"
        )


def check_place(block: Array, number: int, updates: int) -> None:
    """Check that this is block `number`, and not another block with the same pushes."""
    if block[-1] != -updates * (number + 1):
        raise Violation(
            Promise.EXACTLY_ONCE,
            f"block {number} has {block[-1]:g} in its last float after {updates} updates",
        )


def residual(session: Session, number: int) -> Array:
    """The part of a worker's gradients for this block that compression still keeps back."""
    block = slice(BLOCK * number, BLOCK * number + BLOCK)
    if session.encoder.feedback is None:
        return np.zeros(BLOCK, np.float32)
    return session.encoder.feedback.state()[array_name(FIRST, ERROR)][block]


def exact(setting: SimulationConfig, pull: str) -> bool:
    """True if pushes can be counted in sent weights; reference_model.py checks rules with slots."""
    plain = setting.merge == "each" and not setting.slots
    return plain and pull == "none" and setting.push in EXACT_PUSHES


class Counted(msgspec.Struct):
    """Counters of a run."""

    delivered: int = 0
    lost: int = 0
    doubled: int = 0
    mangled: int = 0
    pushes: int = 0
    deaths: int = 0
