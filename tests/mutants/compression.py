"""Mutants of compressed links: the views of pulled changes, and the residuals of pushes."""

from typing import Any

import numpy as np

from deploy.simulation.invariants import Promise
from deploy.simulation_kinds import ClusterConfig
from ps.session.error_feedback import ErrorFeedback
from shards.delta_pulls import Change, DeltaViews
from tests.mutants.patching import Mutants, Patch

MUTANTS = Mutants()


@MUTANTS.add(ClusterConfig.COMPRESSED, Promise.UNTORN)
def a_view_differs_from_what_was_sent(patch: Patch) -> None:
    def serve(self: DeltaViews, worker: str, *arguments: Any) -> Change:
        change = original(self, worker, *arguments)
        view = self._views[worker]
        moved = view.weights + np.float32(change.base > 0)
        self._views[worker] = view._replace(weights=moved)
        return change

    original = DeltaViews.serve
    patch.setattr(DeltaViews, "serve", serve)


@MUTANTS.add(ClusterConfig.COMPRESSED, Promise.EXACTLY_ONCE)
def a_residual_is_dropped(patch: Patch) -> None:
    def encode(self: ErrorFeedback, *arguments: Any) -> Any:
        frames = original(self, *arguments)
        for residual in self.tables.values():
            residual.error[:] = 0
        return frames

    original = ErrorFeedback.encode
    patch.setattr(ErrorFeedback, "encode", encode)
