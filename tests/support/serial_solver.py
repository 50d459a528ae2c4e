"""A solver alone in one process: each iteration is a gradient and the update rule, as in Caffe."""

import numpy as np
from numpy.typing import NDArray

from cupy_kernels.ops.updates import squared_norm
from shards.tables import KeyRange, segments
from worker.caffe.model import CaffeModel
from worker.caffe.solver import Solver
from worker.training.model import Batch

Floats = NDArray[np.float32]


class SerialSolver:
    """Trains the net of a solver from `weights`, or from its fillers; serves one thread."""

    def __init__(self, solver: Solver, weights: Floats | None = None, seed: int = 1) -> None:
        self.solver = solver
        self.model = CaffeModel(solver.train)
        self.table = self.model.table
        self.weights = self.model.initial(seed) if weights is None else weights
        self.slots = {slot: self.table.empty() for slot in solver.rule.slot_names}
        self.iteration = 0
        self._pieces = segments(self.table, KeyRange(0, self.table.size))

    def step(self, batch: Batch) -> float:
        """One iteration on a batch; returns its loss."""
        gradient, out = self.table.empty(), self.table.empty()
        loss = self.model.gradient(self.weights, batch, gradient, step=self.iteration, seed=1)
        clip, norm = self.solver.clip_gradients, squared_norm(gradient) ** 0.5
        if clip is not None and norm > clip:
            gradient *= np.float32(clip / norm)
        self.solver.rule.apply(
            self.weights,
            gradient,
            tuple(self.slots.values()),
            out,
            self._pieces,
            rate=self.solver.schedule.rate(self.iteration),
            decay=self.solver.decay,
            count=self.iteration + 1,
        )
        self.weights, self.iteration = out, self.iteration + 1
        return loss
