"""Compressed pushes under the simulated network: exactly once, and no mass lost or doubled.

The codecs taken here are exact on the simulation's whole numbers, so that the sums still prove the
count: what the shards hold and what the workers kept back add up to every gradient.
"""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from ps.compression import Compression
from ps.events import Send
from ps.feedback import Feedback
from ps.session import Session
from shards import payloads
from shards.errors import DownpourError
from shards.spec import Merge
from shards.views import Change, Views
from tests.ps.network import Network, Setting, swarm

HALVES = ("fp16", "bf16", "fp16,zstd", "none,zstd")
Plant = Callable[[pytest.MonkeyPatch], None]
SPARSE = ("topk:0.004", "topk:0.002,zstd", "threshold:30", "threshold:100")


def compressed(seed: int, push: str, pull: str = "none") -> Setting:
    return msgspec.structs.replace(swarm(seed), compression=Compression.parse(push, pull))


def sparse(seed: int) -> Setting:
    """A new life of a worker begins without a residual, and a round's mean shares it out: neither
    is here, but all else that can go wrong."""
    setting = compressed(seed, SPARSE[seed % len(SPARSE)], ("none", "bf16")[seed % 2])
    bound = setting.bound if setting.merge is Merge.EACH else 1
    return msgspec.structs.replace(setting, kills=0, merge=Merge.EACH, bound=bound)


@pytest.mark.parametrize("push", HALVES)
def test_promises_hold_for_compressed_pushes(push: str) -> None:
    """Whatever goes wrong, kills and rounds too: exactly once, the bound, untorn versions."""
    for seed in range(100, 106):
        setting = compressed(seed, push)
        print(f"seed {seed}: {setting}")
        Network(setting, seed).run()


@pytest.mark.parametrize("first", [200, 208])
def test_no_mass_is_lost_through_retries_and_resynchronisation(first: int) -> None:
    """What the shards applied and what the workers kept back is every gradient, to the bit."""
    kept = 0
    for seed in range(first, first + 8):
        print(f"seed {seed}: {sparse(seed)}")
        net = Network(sparse(seed), seed).run()
        kept += sum(int(np.count_nonzero(life.residual())) for life in net.lives.values())
    assert kept, "something was kept back"


@pytest.mark.parametrize("pull", ["int8", "4bit", "topk:0.02"])
def test_pulled_changes_lead_to_the_view_that_the_shard_keeps(pull: str) -> None:
    """Through losses, kills, resynchronisations and restarts both ends agree to the bit."""
    changes = 0
    for seed in range(300, 306):
        setting = compressed(seed, "none,zstd" if seed % 2 else "none", pull)
        print(f"seed {seed}: {setting}")
        net = Network(setting, seed).run()
        changes += sum(host.shard._serving._views._last % 2**32 for host in net.hosts)
    assert changes > 100


def a_view_is_taken_for_granted(patch: pytest.MonkeyPatch) -> None:
    def serve(self: Views, worker: str, *told: Any) -> Change:
        number = self._views[worker].last if worker in self._views else 0
        weights, kind, share, _ = told
        return original(self, worker, weights, kind, share, number)

    original = Views.serve
    patch.setattr(Views, "serve", serve)


def a_view_drifts_from_what_was_sent(patch: pytest.MonkeyPatch) -> None:
    def serve(self: Views, worker: str, *told: Any) -> Change:
        change = original(self, worker, *told)
        view = self._views[worker]
        moved = view.weights + np.float32(change.base > 0)
        self._views[worker] = view._replace(weights=moved)
        return change

    original = Views.serve
    patch.setattr(Views, "serve", serve)


@pytest.mark.parametrize("plant", [a_view_is_taken_for_granted, a_view_drifts_from_what_was_sent])
def test_a_planted_bug_in_views_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some run fails within 16 seeds."""
    plant(monkeypatch)
    for seed in range(300, 316):
        setting = msgspec.structs.replace(compressed(seed, "none", "int8"), drop=0.3, prefetch=True)
        try:
            Network(setting, seed).run()
        except (AssertionError, DownpourError) as error:
            print(f"caught by seed {seed}: {error}")
            return
    pytest.fail(f"{plant.__name__}: no run failed")


def a_push_is_written_anew_when_repeated(patch: pytest.MonkeyPatch) -> None:
    def tick(self: Session, now: float) -> list[Send]:
        again = []
        for send in original(self, now):
            frames = send.frames
            if frames and self.feedback is not None:
                written = self.feedback.encode(self.table.empty(), self.seq, self.map.ranges)
                frames = written[send.shard]
            again.append(Send(send.shard, send.message, frames))
        return again

    original = Session.tick
    patch.setattr(Session, "tick", tick)


def a_residual_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def encode(self: Feedback, *arguments: Any) -> Any:
        frames = original(self, *arguments)
        self._error[:] = 0
        return frames

    original = Feedback.encode
    patch.setattr(Feedback, "encode", encode)


def a_greeting_begins_a_new_residual(patch: pytest.MonkeyPatch) -> None:
    def greet(self: Session, *arguments: Any) -> Send:
        if self.feedback is not None:
            self.feedback = Feedback(self.compression, self.table.size)
        return original(self, *arguments)

    original = Session._greet
    patch.setattr(Session, "_greet", greet)


def values_are_sent_and_kept(patch: pytest.MonkeyPatch) -> None:
    def payload(indices: Any, values: Any) -> Any:
        return original(indices, values * np.float32(2))

    original = payloads.sparse
    patch.setattr(payloads, "sparse", payload)


PLANTS: tuple[Plant, ...] = (
    a_push_is_written_anew_when_repeated,
    a_residual_is_forgotten,
    a_greeting_begins_a_new_residual,
    values_are_sent_and_kept,
)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some run fails within 16 seeds, every one of which passes without the bug."""
    plant(monkeypatch)
    for seed in range(200, 216):
        try:
            Network(sparse(seed), seed).run()
        except (AssertionError, DownpourError) as error:
            print(f"caught by seed {seed}: {error}")
            return
    pytest.fail(f"{plant.__name__}: no run failed")
