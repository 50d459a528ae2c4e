"""Mutants of rollbacks: what a rolled-back shard and its workers exchange."""

from collections.abc import Callable
from typing import Any

import msgspec

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.session.membership import Membership
from shards.ledger import Ledger
from shards.messages import Join, Push, Welcome
from shards.transition_io import Outgoing
from shards.worker_requests import WorkerRequests
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.SINGLE, Promise.NO_SURPRISE, seed=15)
def a_rollback_is_not_reported(patch: Patch) -> None:
    def hello(self: WorkerRequests, *arguments: Any) -> Any:
        welcome, *others = original(self, *arguments)
        assert isinstance(welcome.message, Welcome)
        plain = msgspec.structs.replace(welcome.message, rolled_back=False)
        return [msgspec.structs.replace(welcome, message=plain), *others]

    original = WorkerRequests.hello
    patch.setattr(WorkerRequests, "hello", hello)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.ORDER)
def a_rejoin_restores_pushes_without_their_steps(patch: Patch) -> None:
    def skip_to(self: Ledger, worker: str, seq: int, _: int) -> int:
        entry = self.entries[worker]
        entry.seq = max(entry.seq, seq)
        return 0

    patch.setattr(Ledger, "skip_to", skip_to)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.BOUND)
def a_push_raises_the_clocks_of_other_workers(patch: Patch) -> None:
    """A push at clock c is assumed to follow a read at c - 1, when others were not far behind."""

    def follow_up(self: WorkerRequests, clock: int) -> None:
        if self._part.rolled_back and self._spec.bound is not None:
            least = clock - 1 - self._spec.bound
            self._ledger.floor = max(self._ledger.floor, least)
            for worker in self._ledger.active:
                self._ledger.advance(worker, least)

    def check(self: WorkerRequests, message: Push, now: float) -> Push:
        checked = check_push(self, message, now)
        follow_up(self, message.clock)
        return checked

    def joined(self: WorkerRequests, sender: bytes, message: Join) -> Outgoing:
        answer = admit(self, sender, message)
        follow_up(self, message.clock)
        return answer

    check_push, admit = WorkerRequests._check_push, WorkerRequests._admit
    patch.setattr(WorkerRequests, "_check_push", check)
    patch.setattr(WorkerRequests, "_admit", joined)


def _joining(patch: Patch, changed: Callable[[Membership, int, Join], Join]) -> None:
    """Change the Join messages of workers."""

    def join(self: Membership, shard: int, *arguments: Any) -> Any:
        send = original(self, shard, *arguments)
        pending = self._outstanding.to(shard)[-1]
        assert isinstance(pending.message, Join)
        pending.message = changed(self, shard, pending.message)
        return msgspec.structs.replace(send, message=pending.message)

    original = Membership._join
    patch.setattr(Membership, "_join", join)


@MUTANTS.add(ClusterConfig.SINGLE, Promise.PROGRESS)
def an_admitted_worker_waits_for_the_warm_up_again(patch: Patch) -> None:
    _joining(patch, lambda _, __, join: msgspec.structs.replace(join, again=False))
