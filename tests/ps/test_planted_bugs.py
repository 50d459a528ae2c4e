"""The simulated network catches the bugs that it is there to catch.

Each bug is planted in the real code and must fail a run within a few seeds. A check that no bug can
trip proves nothing; this is the proof that these can.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from ps import session
from ps.events import Send
from ps.session import Session
from shards.errors import DownpourError
from shards.gate import Gate, Waiting
from shards.ledger import Entry, Ledger, Verdict
from shards.messages import FromWorker, Push
from shards.one_pass import OnePass
from shards.rules import Rule
from shards.shard import Outgoing, Shard
from shards.spec import Merge
from shards.state import Held
from shards.updates import Applied, Updates
from shards.versions import Buffers
from tests.ps.network import Network, swarm
from tests.ps.parties import Array

RUNS = 40
Patch = pytest.MonkeyPatch
Plant = Callable[[Patch], None]

PLANTS: dict[str, Plant] = {}


def planted(plant: Plant) -> Plant:
    PLANTS[plant.__name__] = plant
    return plant


def _record_anything(self: Ledger, worker: str, seq: int, clock: int, step: int, _: float) -> None:
    entry = self.entries[worker]
    entry.seq, entry.step = max(entry.seq, seq), max(entry.step, step)
    self.advance(worker, clock)


@planted
def a_duplicate_is_applied(patch: Patch) -> None:
    def judge(self: Ledger, worker: str, seq: int) -> Verdict:
        real = original(self, worker, seq)
        return Verdict.APPLY if real is Verdict.DUPLICATE else real

    original = Ledger.judge
    patch.setattr(Ledger, "judge", judge)
    patch.setattr(Ledger, "record", _record_anything)


@planted
def a_gap_is_skipped(patch: Patch) -> None:
    def judge(self: Ledger, worker: str, seq: int) -> Verdict:
        return Verdict.APPLY if seq > self.entries[worker].seq else Verdict.DUPLICATE

    patch.setattr(Ledger, "judge", judge)
    patch.setattr(Ledger, "record", _record_anything)


@planted
def a_former_life_may_write(patch: Patch) -> None:
    def identify(self: Ledger, message: FromWorker, lease_until: float) -> Entry:
        entry = self.entries[message.worker]
        entry.lease_until = lease_until
        return entry

    patch.setattr(Ledger, "identify", identify)


@planted
def a_worker_goes_on_where_the_foremost_shard_is(patch: Patch) -> None:
    def wrong(*values: Any, **options: Any) -> Any:
        return max(*values, **options) if "key" in options else min(*values, **options)

    patch.setattr(session, "min", wrong, raising=False)


@planted
def the_gate_opens_a_step_early(patch: Patch) -> None:
    def passes(self: Gate, clock: int, min_clock: int | None) -> bool:
        return original(self, clock - 1, min_clock)

    original = Gate.passes
    patch.setattr(Gate, "passes", passes)


@planted
def the_gate_lets_one_go_at_a_time(patch: Patch) -> None:
    def release(self: Gate, may_go: Callable[[Any], bool]) -> Iterator[Waiting]:
        for waiting in original(self, may_go):
            yield waiting
            return

    original = Gate.release
    patch.setattr(Gate, "release", release)


@planted
def the_slowest_clock_is_forgotten(patch: Patch) -> None:
    patch.setattr(Ledger, "_raise_floor", lambda _: None)


@planted
def an_expired_lease_frees_nobody(patch: Patch) -> None:
    def tick(self: Shard, now: float) -> list[Outgoing]:
        self.ledger.expire(self.ledger.silent(now))
        return []

    patch.setattr(Shard, "tick", tick)


@planted
def a_takeover_frees_nobody(patch: Patch) -> None:
    def hello(self: Shard, *arguments: Any) -> list[Outgoing]:
        vars(self)["_open"] = lambda _: []
        answers = original(self, *arguments)
        del vars(self)["_open"]
        return answers

    original = Shard._hello
    patch.setattr(Shard, "_hello", hello)


@planted
def two_buffers_take_turns(patch: Patch) -> None:
    def take(self: Buffers) -> Array:
        while len(self) < 2:
            self._all.append(np.zeros(self.size, np.float32))
        self._all.reverse()
        return self._all[0]

    patch.setattr(Buffers, "take", take)


@planted
def one_pass_leaves_a_gradient_out(patch: Patch) -> None:
    def apply(self: OnePass, rule: Rule, w: Array, gradients: Any, *rest: Any) -> list[float]:
        return [1.0, *original(self, rule, w, [*gradients[1:], np.zeros_like(w)], *rest)[:-1]]

    original = OnePass.apply
    patch.setattr(OnePass, "apply", apply)


@planted
def one_pass_writes_over_the_present_version(patch: Patch) -> None:
    def together(self: Held, gradients: Any, rate: float) -> list[float] | None:
        take, self._buffers.take = self._buffers.take, self.weights  # type: ignore[method-assign]
        squares = original(self, gradients, rate)
        self._buffers.take = take  # type: ignore[method-assign]
        return squares

    original = Held.apply_together
    patch.setattr(Held, "apply_together", together)


@planted
def a_run_takes_a_push_twice(patch: Patch) -> None:
    def joins(self: Updates, _: Any, message: Push, ledger: Ledger) -> bool:
        entry = ledger.entries.get(message.worker)
        return self._sums and entry is not None and message.seq == entry.seq + 1

    patch.setattr(Updates, "joins", joins)
    patch.setattr(Ledger, "record", _record_anything)


@planted
def a_push_is_acknowledged_before_its_round(patch: Patch) -> None:
    def push(self: Shard, sender: bytes, message: Push, *rest: Any) -> list[Outgoing]:
        answers = original(self, sender, message, *rest)
        early = self.spec.merge is Merge.ROUND and not answers
        return [self._acknowledge(sender, message, self.version)] if early else answers

    original = Shard._push
    patch.setattr(Shard, "_push", push)


@planted
def a_restarted_shard_forgets_the_last_push(patch: Patch) -> None:
    def install(self: Shard, *arguments: Any) -> Outgoing:
        answer = original(self, *arguments)
        for entry in self.ledger.entries.values():
            entry.seq = max(0, entry.seq - 1)
        return answer

    original = Shard._install
    patch.setattr(Shard, "_install", install)


@planted
def silence_is_not_noticed(patch: Patch) -> None:
    patch.setattr(Session, "tick", lambda *_: [])


@planted
def nothing_is_sent_again_after_a_greeting(patch: Patch) -> None:
    def resend(self: Session, shard: int, now: float) -> list[Send]:
        for key in [key for key in self._pending if key[0] == shard]:
            del self._pending[key]
        return []

    patch.setattr(Session, "_resend_all", resend)


@planted
def rounds_close_by_attendance(patch: Patch) -> None:
    """The bug that the simulation found first: see test_shard.py on rounds."""

    def close(self: Updates, ledger: Ledger, now: float) -> list[Applied]:
        present = all(worker in self.round for worker in ledger.active)
        return original(self, ledger, now) if present else []

    original = Updates.close_rounds
    patch.setattr(Updates, "close_rounds", close)


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_planted_bug_is_caught(name: str, monkeypatch: Patch) -> None:
    """Some run fails within 40 seeds, every one of which passes without the bug."""
    PLANTS[name](monkeypatch)
    for seed in range(RUNS):
        try:
            Network(swarm(seed), seed).run()
        except (AssertionError, DownpourError) as error:
            print(f"{name}: caught by seed {seed}: {error}")
            return
    pytest.fail(f"{name}: no run of {RUNS} failed")
