"""Bugs in a shard: its ledger, gate, updates, rounds and versions."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from shards.admin_requests import AdminRequests, Answer
from shards.envelopes import Outgoing
from shards.fused_apply import FusedApply
from shards.gate import Gate, Waiting
from shards.ledger import Ledger, LedgerEntry, Verdict
from shards.messages import FromWorker, Push
from shards.parameters import ParameterStore
from shards.pull_replies import PullReplies
from shards.pushes import Arrived, Pushes
from shards.rules import Rule
from shards.shard import Shard
from shards.spec import Merge
from shards.updates import Applied, Updates
from shards.versions import Buffers
from shards.worker_requests import WorkerRequests

Array = NDArray[np.float32]

BUGS = Bugs(ClusterConfig.SINGLE)


def _record_anything(self: Ledger, worker: str, seq: int, clock: int, step: int, *_: float) -> None:
    entry = self.entries[worker]
    entry.seq, entry.step = max(entry.seq, seq), max(entry.step, step)
    self.advance(worker, clock)


@BUGS.add
def a_duplicate_is_applied(patch: Patch) -> None:
    def judge(self: Ledger, worker: str, seq: int) -> Verdict:
        real = original(self, worker, seq)
        return Verdict.APPLY if real is Verdict.DUPLICATE else real

    original = Ledger.judge
    patch.setattr(Ledger, "judge", judge)
    patch.setattr(Ledger, "record", _record_anything)


@BUGS.add
def a_gap_is_skipped(patch: Patch) -> None:
    def judge(self: Ledger, worker: str, seq: int) -> Verdict:
        return Verdict.APPLY if seq > self.entries[worker].seq else Verdict.DUPLICATE

    patch.setattr(Ledger, "judge", judge)
    patch.setattr(Ledger, "record", _record_anything)


@BUGS.add
def a_former_life_may_write(patch: Patch) -> None:
    def identify(self: Ledger, message: FromWorker, lease_until: float) -> LedgerEntry:
        entry = self.entries[message.worker]
        entry.lease_until = lease_until
        return entry

    patch.setattr(Ledger, "identify", identify)


@BUGS.add
def the_gate_opens_a_step_early(patch: Patch) -> None:
    def passes(self: Gate, clock: int, min_clock: int | None) -> bool:
        return original(self, clock - 1, min_clock)

    original = Gate.passes
    patch.setattr(Gate, "passes", passes)


@BUGS.add
def the_gate_lets_one_go_at_a_time(patch: Patch) -> None:
    def release(self: Gate, may_go: Callable[[Any], bool]) -> Iterator[Waiting]:
        for waiting in original(self, may_go):
            yield waiting
            return

    original = Gate.release
    patch.setattr(Gate, "release", release)


@BUGS.add
def the_slowest_clock_is_forgotten(patch: Patch) -> None:
    patch.setattr(Ledger, "_raise_floor", lambda _: 0)


@BUGS.add
def an_expired_lease_frees_nobody(patch: Patch) -> None:
    def tick(self: Shard, now: float) -> list[Outgoing]:
        self.ledger.expire(self.ledger.silent(now))
        return []

    patch.setattr(Shard, "tick", tick)


@BUGS.add
def a_takeover_frees_nobody(patch: Patch) -> None:
    def hello(self: WorkerRequests, *arguments: Any) -> list[Outgoing]:
        vars(self)["_open"] = lambda _: []
        answers = original(self, *arguments)
        del vars(self)["_open"]
        return answers

    original = WorkerRequests.hello
    patch.setattr(WorkerRequests, "hello", hello)


@BUGS.add
def two_buffers_take_turns(patch: Patch) -> None:
    def take(self: Buffers) -> Array:
        while len(self) < 2:
            self._all.append(np.zeros(self.size, np.float32))
        self._all.reverse()
        return self._all[0]

    patch.setattr(Buffers, "take", take)


@BUGS.add
def one_pass_leaves_a_gradient_out(patch: Patch) -> None:
    def apply(self: FusedApply, rule: Rule, w: Array, gradients: Any, *rest: Any) -> list[float]:
        return [1.0, *original(self, rule, w, [*gradients[1:], np.zeros_like(w)], *rest)[:-1]]

    original = FusedApply.apply
    patch.setattr(FusedApply, "apply", apply)


@BUGS.add
def one_pass_writes_over_the_present_version(patch: Patch) -> None:
    def together(self: ParameterStore, gradients: Any, rate: float) -> list[float] | None:
        take, self._buffers.take = self._buffers.take, self.weights  # type: ignore[method-assign]
        squares = original(self, gradients, rate)
        self._buffers.take = take  # type: ignore[method-assign]
        return squares

    original = ParameterStore.apply_together
    patch.setattr(ParameterStore, "apply_together", together)


@BUGS.add
def a_run_takes_a_push_twice(patch: Patch) -> None:
    def joins(self: Updates, _: Any, message: Push) -> bool:
        entry = self._ledger.entries.get(message.worker)
        return self._sums and entry is not None and message.seq == entry.seq + 1

    patch.setattr(Updates, "joins", joins)
    patch.setattr(Ledger, "record", _record_anything)


@BUGS.add
def a_push_is_acknowledged_before_its_round(patch: Patch) -> None:
    def apply(self: WorkerRequests, run: Sequence[Arrived], now: float) -> list[Outgoing]:
        answers = original(self, run, now)
        if answers or self._spec.merge is not Merge.ROUND:
            return answers
        return [self._acknowledge(one.sender, one.message, self._held.version) for one in run]

    original = WorkerRequests.apply
    patch.setattr(WorkerRequests, "apply", apply)


@BUGS.add
def a_restarted_shard_forgets_the_last_push(patch: Patch) -> None:
    def install(self: AdminRequests, *arguments: Any) -> Answer:
        answer = original(self, *arguments)
        for entry in self._part.ledger.entries.values():
            entry.seq = max(0, entry.seq - 1)
        return answer

    original = AdminRequests._install
    patch.setattr(AdminRequests, "_install", install)


@BUGS.add
def rounds_close_by_attendance(patch: Patch) -> None:
    """The first bug that the simulation found: see the tests of rounds in test_shard.py."""

    def close(self: Updates, *rest: Any) -> list[Applied]:
        present = all(worker in self.round for worker in self._ledger.active)
        return original(self, *rest) if present else []

    original = Updates.close_rounds
    patch.setattr(Updates, "close_rounds", close)


@BUGS.add
def half_a_payload_is_taken_for_a_whole(patch: Patch) -> None:
    def examine(self: Pushes, sender: bytes, message: Push, frames: Any, now: float) -> Any:
        keys = message.keys[-1] - message.keys[0]
        padded = [bytes(frame)[: 4 * keys].ljust(4 * keys, b"\0") for frame in frames]
        return original(self, sender, message, padded, now)

    original = Pushes.examine
    patch.setattr(Pushes, "examine", examine)


@BUGS.add
def a_served_version_is_told_too_low(patch: Patch) -> None:
    def pull(self: PullReplies, *arguments: Any) -> Any:
        weights, frames = original(self, *arguments)
        lower = weights.version - (weights.version % 3 == 2) * 2
        return msgspec.structs.replace(weights, version=max(0, lower)), frames

    original = PullReplies.pull
    patch.setattr(PullReplies, "pull", pull)


@BUGS.add
def a_former_life_keeps_its_place_in_the_round(patch: Patch) -> None:
    def hello(self: WorkerRequests, *arguments: Any) -> list[Outgoing]:
        kept = dict(self._updates.round)
        answers = original(self, *arguments)
        self._updates.round = kept | self._updates.round
        return answers

    original = WorkerRequests.hello
    patch.setattr(WorkerRequests, "hello", hello)
