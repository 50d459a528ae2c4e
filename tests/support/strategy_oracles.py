"""Each strategy as a serial loop in NumPy, written from its paper's formula.

An oracle repeats the events of a run: a worker pulled, took a step, pushed. It imports neither the
strategies nor the rules nor the shards. All arithmetic is float32, each operation rounded once, in
the order of the formula, so that a strategy must equal it bit for bit.
"""

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
F = np.float32


class Replica:
    """What one worker knows."""

    def __init__(self) -> None:
        self.x: Any = None  # where the next gradient is computed
        self.read: Any = None  # the weights pulled last, and their version
        self.read_version = self.version = 0
        self.sum: Any = None
        self.steps = 0
        self.count = 0
        self.slots: dict[str, Any] = {}


class Oracle:
    """The events of a run, repeated; a subclass has the formulas."""

    def __init__(
        self,
        start: Floats,
        gradient: Callable[[int, int, Floats], Floats],
        multipliers: Floats,
        decays: Floats,
        *,
        workers: int,
        rate: float,
        decay: float,
    ) -> None:
        self.c, self.version = start.copy(), 0
        self.gradient, self.multipliers, self.decays = gradient, multipliers, decays
        self.workers, self.rate, self.decay = workers, rate, decay
        self.replicas = [Replica() for _ in range(workers)]

    def repeat(self, events: Sequence[tuple[str, int]]) -> Floats:
        for kind, number in events:
            getattr(self, kind)(self.replicas[number], number)
        self.finish()
        return self.c

    def leave(self, at: Replica, number: int) -> None:
        """A worker has left."""

    def finish(self) -> None:
        """All workers have left."""

    def pull(self, at: Replica, number: int) -> None:
        at.read, at.read_version = self.c, self.version
        self.on_pull(at)

    def step(self, at: Replica, number: int) -> None:
        if not at.steps:
            at.version = at.read_version
        gradient = self.gradient(number, at.count, at.x)
        at.count += 1
        at.steps += 1
        self.learn(at, gradient)

    def push(self, at: Replica, number: int) -> None:
        self.serve(self.contribution(at), self.version - at.version, number)
        at.steps = 0

    def decayed(self, gradient: Floats, weights: Floats) -> Floats:
        return gradient + F(self.decay) * self.decays * weights

    def become(self, weights: Floats) -> None:
        self.c = weights
        self.version += 1

    def sgd(self, gradient: Floats, factor: float) -> None:
        """The job's own rule: plain SGD with multipliers and decay."""
        step = F(self.rate * factor) * self.multipliers * self.decayed(gradient, self.c)
        self.become(self.c - step)

    # to be filled in

    def on_pull(self, at: Replica) -> None:
        at.x = at.read

    def learn(self, at: Replica, gradient: Floats) -> None:
        at.sum = gradient if at.sum is None else at.sum + gradient

    def contribution(self, at: Replica) -> Floats:
        found: Floats = at.sum
        at.sum = None
        return found

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.sgd(pushed, 1.0)


class Scaled(Oracle):
    """asp, ssp, downpour: each gradient at a W-th of the rate."""

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.sgd(pushed, 1 / self.workers)


class DownpourOwnSteps(Scaled):
    """n_fetch > 1: the worker's own copy takes each gradient, too."""

    def learn(self, at: Replica, gradient: Floats) -> None:
        at.x = at.x - F(self.rate) * self.multipliers * gradient
        super().learn(at, gradient)


class StaleRate(Oracle):
    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.sgd(pushed, 1 / max(1, staleness))


class Rounds(Oracle):
    """bsp: the mean of a round, in the order of names."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.round: dict[int, Floats] = {}

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.round[number] = pushed
        if len(self.round) == self.workers:
            total = self.round[0].copy()
            for other in range(1, self.workers):
                total = total + self.round[other]
            self.round = {}
            self.merged(total / F(self.workers))

    def merged(self, mean: Floats) -> None:
        self.sgd(mean, 1.0)


class Softsync(Oracle):
    def __init__(self, *args: Any, n: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.n, self.size = n, max(1, self.workers // n)
        self.s, self.held = np.zeros_like(self.c), 0

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.s = self.s + (pushed if self.n == 1 else F(1 / self.n) * pushed)
        self.held += 1
        if self.held == self.size:
            self.apply()

    def apply(self) -> None:
        self.sgd(self.s / F(self.size), 1.0)
        self.s, self.held = np.zeros_like(self.c), 0

    def finish(self) -> None:
        if self.held:
            self.apply()


class DCASGD(Oracle):
    """The shards remember the last 2W versions, and take the oldest of them for an older one."""

    def __init__(self, *args: Any, adaptive: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.adaptive, self.v = adaptive, np.zeros_like(self.c)
        self.history: list[Floats] = []

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.history.append(self.c)
        backup = self.history[self.version - min(staleness, 2 * self.workers)]
        g = self.decayed(pushed, self.c)
        strength: Any = F(0.04)
        if self.adaptive:
            keep = F(0.95)
            self.v = keep * self.v + (F(1) - keep) * (g * g)
            strength = F(2.0) / np.sqrt(self.v + F(1e-7))
        g = g + strength * (g * g) * (self.c - backup)
        self.become(self.c - F(self.rate / self.workers) * self.multipliers * g)


class Deltas(Oracle):
    """Windows of local SGD; the shards add what a subclass makes of the deltas."""

    def learn(self, at: Replica, gradient: Floats) -> None:
        at.x = at.x - F(self.rate) * self.multipliers * self.decayed(gradient, at.x)

    def contribution(self, at: Replica) -> Floats:
        delta: Floats = at.read - at.x
        return delta

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.become(self.c - pushed)


class DynSGD(Deltas):
    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.become(self.c - F(1 / (staleness + 1)) * pushed)


class ADAG(Deltas):
    def contribution(self, at: Replica) -> Floats:
        return super().contribution(at) / F(at.steps)


class LocalSGD(Deltas, Rounds):
    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        Rounds.serve(self, pushed, staleness, number)

    def merged(self, mean: Floats) -> None:
        self.become(self.c - mean)


class SparkNet(LocalSGD):
    def learn(self, at: Replica, gradient: Floats) -> None:
        step = F(self.rate) * self.multipliers * self.decayed(gradient, at.x)
        at.slots["v"] = F(0.9) * at.slots.get("v", np.zeros_like(at.x)) + step
        at.x = at.x - at.slots["v"]


def adamw(oracle: Oracle, at: Replica, gradient: Floats, weight_decay: float) -> None:
    """A local step of AdamW with the usual constants."""
    g = oracle.decayed(gradient, at.x)
    zero = np.zeros_like(at.x)
    b1, b2 = F(0.9), F(0.999)
    m = at.slots["m"] = b1 * at.slots.get("m", zero) + (F(1) - b1) * g
    v = at.slots["v"] = b2 * at.slots.get("v", zero) + (F(1) - b2) * (g * g)
    correction = sqrt(1 - 0.999**at.count) / (1 - 0.9**at.count)
    rates = F(oracle.rate * correction) * oracle.multipliers
    fade = F(weight_decay / correction)
    at.x = at.x - rates * (m / (np.sqrt(v) + F(1e-8)) + fade * at.x)


class DiLoCo(LocalSGD):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.m = np.zeros_like(self.c)

    def learn(self, at: Replica, gradient: Floats) -> None:
        adamw(self, at, gradient, 0.1)

    def merged(self, mean: Floats) -> None:
        mu = F(0.9)
        new = mu * self.m + F(0.7) * mean
        self.become(self.c - ((F(1) + mu) * new - mu * self.m))
        self.m = new


class AsyncDiLoCo(Deltas):
    """Delayed Nesterov."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.m, self.s = np.zeros_like(self.c), np.zeros_like(self.c)

    def learn(self, at: Replica, gradient: Floats) -> None:
        adamw(self, at, gradient, 0.1)

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        mu, part = F(0.9), F(1 / self.workers)
        self.s = self.s + pushed
        move = part * pushed
        if (self.version + 1) % self.workers == 0:
            self.m = mu * self.m + part * self.s
            self.s = np.zeros_like(self.s)
            move = move + mu * self.m
        self.become(self.c - F(0.7) * move)


class MLA(Deltas):
    """Momentum look-ahead."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.m = np.zeros_like(self.c)

    def learn(self, at: Replica, gradient: Floats) -> None:
        adamw(self, at, gradient, 0.1)

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        step = F(0.9) * self.m
        self.m = step + (F(1) - F(0.9)) * pushed
        self.become(self.c - F(0.7 * (1 / self.workers)) * (step + pushed))


class HeLoCo(Deltas):
    """Deltas turned towards the momentum, tensor by tensor."""

    def __init__(self, *args: Any, tensors: Sequence[slice], **options: Any) -> None:
        super().__init__(*args, **options)
        self.m, self.tensors = np.zeros_like(self.c), tensors

    def learn(self, at: Replica, gradient: Floats) -> None:
        adamw(self, at, gradient, 0.1)

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        g: Floats = pushed.copy()
        for keys in self.tensors:
            d, m = pushed[keys].astype(np.float64), self.m[keys].astype(np.float64)
            dd, dm, mm = (float((a * b).sum()) for a, b in ((d, d), (d, m), (m, m)))
            if dd == 0 or mm == 0 or (c := dm / sqrt(dd) / sqrt(mm)) >= 0.5:
                continue
            share = sqrt(dd) / (sqrt(dd) + sqrt(mm))
            part, along = 1.0, share * c * c * sqrt(dd) / sqrt(mm)
            if c >= 0:
                turn = 0.5 * (1 - c) * share
                norm = sqrt((1 - turn) ** 2 + 2 * turn * (1 - turn) * c + turn**2)
                part, along = (1 - turn) / norm, turn * (sqrt(dd) / sqrt(mm)) / norm
            g[keys] = F(part) * pushed[keys] + F(along) * self.m[keys]
        self.m = F(0.9) * self.m + (F(1) - F(0.9)) * g
        step: Floats = g + F(0.9) * self.m
        self.become(self.c - F(0.7 * (1 / self.workers)) * step)


class Fragments(DiLoCo):
    """One fragment: w = window^2 / window for a sample a step, sums in the order of arrival."""

    merges_each = False

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.open: dict[int, tuple[int, Floats]] = {}
        self.changed = 0
        self.active = set(range(self.workers))

    def pull(self, at: Replica, number: int) -> None:
        at.slots["arrived"] = self.c, self.version
        if at.x is None:
            at.x = self.c
            self.receive(at)

    def receive(self, at: Replica) -> None:
        at.read, at.read_version = at.slots.pop("arrived")
        at.steps = 0

    def take(self, at: Replica, number: int) -> None:
        self.receive(at)
        at.x = F(0.5) * at.x + F(0.5) * at.read

    def push(self, at: Replica, number: int) -> None:
        if at.read_version >= self.changed:
            self.open[number] = at.steps, at.read - at.x
        self.merge_open()

    def leave(self, at: Replica, number: int) -> None:
        self.active.remove(number)
        self.merge_open()

    def merge_open(self) -> None:
        if not self.open or not (self.merges_each or self.active <= set(self.open)):
            return
        total = np.zeros_like(self.c)
        for weight, report in self.open.values():
            total = total + F(weight) * report
        self.merged(total / F(sum(weight for weight, _ in self.open.values())))
        self.open, self.changed = {}, self.version


class TimedFragments(Fragments):
    """Reports that wait for the end of their grace, an event of its own."""

    merges_each = True

    def push(self, at: Replica, number: int) -> None:
        if at.read_version >= self.changed:
            self.open[number] = at.steps, at.read - at.x

    def merge(self, at: Replica, number: int) -> None:
        self.merge_open()


class DecoupledFragments(Fragments):
    merges_each = True


class FedBuff(Deltas):
    def __init__(self, *args: Any, k: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self.k, self.held, self.s = k, 0, np.zeros_like(self.c)

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        factor = 1 / sqrt(1 + staleness)
        self.s = self.s + (pushed if factor == 1 else F(factor) * pushed)
        self.held += 1
        if self.held == self.k:
            self.apply()

    def apply(self) -> None:
        self.become(self.c - self.s / F(self.k))
        self.held, self.s = 0, np.zeros_like(self.c)

    def finish(self) -> None:
        if self.held:
            self.apply()


class EASGD(Oracle):
    """The exchange uses x as it is; the force acts on x with the step that follows."""

    def on_pull(self, at: Replica) -> None:
        if at.x is None:
            at.x = at.read
        else:
            at.slots["force"] = F(0.9 / self.workers) * (at.read - at.x)

    def learn(self, at: Replica, gradient: Floats) -> None:
        at.x = at.x - F(self.rate) * self.multipliers * self.decayed(gradient, at.x)
        if "force" in at.slots:
            at.x = at.x + at.slots.pop("force")

    def contribution(self, at: Replica) -> Floats:
        force: Floats = at.slots["force"]
        return force

    def serve(self, pushed: Floats, staleness: int, number: int) -> None:
        self.become(self.c - pushed)


class EAMSGD(EASGD):
    """The gradient is at x + momentum * v."""

    def on_pull(self, at: Replica) -> None:
        if at.x is None:
            at.x = at.slots["x"] = at.read
            at.slots["v"] = np.zeros_like(at.read)
        else:
            at.slots["force"] = F(0.9 / self.workers) * (at.read - at.slots["x"])

    def learn(self, at: Replica, gradient: Floats) -> None:
        mu = F(0.99)
        step = self.decayed(gradient, at.x) * (F(self.rate) * self.multipliers)
        at.slots["v"] = mu * at.slots["v"] - step
        at.slots["x"] = at.slots["x"] + at.slots["v"]
        if "force" in at.slots:
            at.slots["x"] = at.slots["x"] + at.slots.pop("force")
        at.x = mu * at.slots["v"] + at.slots["x"]
