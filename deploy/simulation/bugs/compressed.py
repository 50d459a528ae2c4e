"""Bugs of compressed links: views of pulled changes, and residuals of pushes."""

from typing import Any

import numpy as np

from deploy.simulation.config import ClusterConfig
from deploy.simulation.mutants import Bugs, Patch
from ps.session.error_feedback import ErrorFeedback
from ps.session.events import Send
from ps.session.session import Session
from shards import payloads
from shards.delta_pulls import Change, DeltaViews

BUGS = Bugs(ClusterConfig.COMPRESSED)


@BUGS.add
def a_view_is_taken_for_granted(patch: Patch) -> None:
    def serve(self: DeltaViews, worker: str, *arguments: Any) -> Change:
        number = self._views[worker].last if worker in self._views else 0
        weights, kind, share, _ = arguments
        return original(self, worker, weights, kind, share, number)

    original = DeltaViews.serve
    patch.setattr(DeltaViews, "serve", serve)


@BUGS.add
def a_view_drifts_from_what_was_sent(patch: Patch) -> None:
    def serve(self: DeltaViews, worker: str, *arguments: Any) -> Change:
        change = original(self, worker, *arguments)
        view = self._views[worker]
        moved = view.weights + np.float32(change.base > 0)
        self._views[worker] = view._replace(weights=moved)
        return change

    original = DeltaViews.serve
    patch.setattr(DeltaViews, "serve", serve)


@BUGS.add
def a_push_is_written_anew_when_repeated(patch: Patch) -> None:
    def tick(self: Session, now: float) -> list[Send]:
        again = []
        for send in original(self, now):
            frames = send.frames
            if frames and self.cargo.feedback is not None:
                zeros = self.cargo.tables(self.layout.empty())
                _, frames = self.cargo.write(zeros, self.seq, plain=False)[send.shard]
            again.append(Send(send.shard, send.message, frames))
        return again

    original = Session.tick
    patch.setattr(Session, "tick", tick)


@BUGS.add
def a_residual_is_forgotten(patch: Patch) -> None:
    def encode(self: ErrorFeedback, *arguments: Any) -> Any:
        frames = original(self, *arguments)
        for residual in self.tables.values():
            residual.error[:] = 0
        return frames

    original = ErrorFeedback.encode
    patch.setattr(ErrorFeedback, "encode", encode)


@BUGS.add
def a_greeting_begins_a_new_residual(patch: Patch) -> None:
    def greet(self: Session, *arguments: Any) -> Send:
        if self.cargo.feedback is not None:
            self.cargo.feedback = ErrorFeedback.of(self.layout, self.cargo.compression)
        return original(self, *arguments)

    original = Session._greet
    patch.setattr(Session, "_greet", greet)


@BUGS.add
def values_are_sent_and_kept(patch: Patch) -> None:
    def payload(indices: Any, values: Any) -> Any:
        return original(indices, values * np.float32(2))

    original = payloads.sparse
    patch.setattr(payloads, "sparse", payload)
