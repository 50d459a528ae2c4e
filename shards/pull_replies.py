"""Answers to pulls, and their entries in the metrics.

A pull names the encoding of each table: the version as float32 or as 16-bit floats, made once for
all workers (pull_encodings.py), or the changes since the version that the worker has
(delta_pulls.py). The gate decides earlier whether the pull may be answered yet (gate.py).
"""

from typing import Any

from numpy.typing import NDArray

from shards.errors import BadMessage
from shards.messages import AskedPart, Pull, Weights
from shards.metrics import Metrics
from shards.parameters import ParameterStore
from shards.spec import ShardSpec

Answer = tuple[Weights, tuple[NDArray[Any], ...]]
"""The header, and the frames that follow it; receivers must not write into them."""


class PullReplies:
    """One incarnation of a shard's answers from `parameters`; they are counted in `metrics`.

    `plain` are the parts of a pull of all tables as plain floats, which needs no `check`.
    """

    def __init__(
        self, spec: ShardSpec, boot: int, parameters: ParameterStore, metrics: Metrics
    ) -> None:
        self._shard = spec.shard
        self._boot = boot
        self._epoch = spec.map.epoch
        self._parameters = parameters
        self._metrics = metrics
        self.plain = [AskedPart(name) for name in parameters.parts]

    def check(self, pull: Pull) -> None:
        """Raise BadMessage or BadInput if weights cannot be served as `pull` requests."""
        parts = self._parameters.parts
        for ask in pull.parts:
            if ask.table not in parts:
                raise BadMessage(
                    f"pull: expected tables among {', '.join(parts)} of shard {self._shard},"
                    f" got {ask.table}"
                )
            parts[ask.table].check_ask(ask)

    def pull(self, message: Pull, waited_s: float, now: float) -> Answer:
        """The answer to a worker's checked pull, which was parked for `waited_s`."""
        # Recorded when it is answered, not when it came: the age of a push counts from there.
        self._metrics.read(message.worker, self._parameters.version, now)
        return self._answer(message.request, message.parts, message.worker, waited_s)

    def whole(self, request: int) -> Answer:
        """The whole present version as plain floats, for an operator."""
        return self._answer(request, self.plain, "", 0.0)

    def forget(self, worker: str) -> None:
        """Answer the worker's next pull of changes with whole weights."""
        for part in self._parameters.parts.values():
            part.forget(worker)

    def _answer(self, request: int, asks: list[AskedPart], worker: str, waited_s: float) -> Answer:
        parameters = self._parameters
        # Read once, so that all parts of an answer are of one version.
        weights, parts, frames, sent_bytes = parameters.host_weights(), [], [], 0
        for ask in asks:
            part, frame = parameters.parts[ask.table].read(weights, parameters.version, ask, worker)
            parts.append(part)
            frames.append(frame)
            sent_bytes += frame.nbytes
        self._metrics.pulls += 1
        self._metrics.bytes_out += sent_bytes
        origin = request, self._shard, self._boot, self._epoch
        return Weights(*origin, parameters.version, parts, waited_s), tuple(frames)
