"""Answers to pulls, and their entries in the metrics.

A pull names the encoding of each table: the version as float32 or as 16-bit floats, made once for
all workers (pull_encodings.py), or the changes since the version that the worker has
(delta_pulls.py). The gate decides earlier whether the pull may be answered yet (gate.py).
"""

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from shards.errors import BadMessage
from shards.messages import AskedPart, Pull, PulledPart, Read, Weights
from shards.metrics import Metrics
from shards.parameters import ParameterStore
from shards.spec import ShardSpec
from shards.wire_format import Buffer

Answer = tuple[Weights, tuple[NDArray[Any], ...]]
"""The header, and the frames that follow it; receivers must not write into them."""


class PullReplies:
    """One incarnation of a shard's answers from `parameters`; they are counted in `metrics`.

    `plain` are the parts of a pull of all dense tables as plain floats, which needs no `check`
    unless it has frames.
    """

    def __init__(
        self, spec: ShardSpec, boot: int, parameters: ParameterStore, metrics: Metrics
    ) -> None:
        self._shard = spec.shard
        self._boot = boot
        self._epoch = spec.map.epoch
        self._parameters = parameters
        self._metrics = metrics
        dense = (name for name, part in parameters.parts.items() if part.dense)
        self.plain = [AskedPart(name) for name in dense]

    def check(self, asks: Sequence[AskedPart], frames: Sequence[Buffer]) -> None:
        """Raise BadMessage or BadInput if weights cannot be served as a pull's parts request."""
        parts = self._parameters.parts
        for ask in asks:
            if ask.table not in parts:
                raise BadMessage(
                    f"pull: expected tables among {', '.join(parts)} of shard {self._shard},"
                    f" got {ask.table}"
                )
        if len({ask.table for ask in asks}) < len(asks):  # each would cost as much again
            raise BadMessage("pull: expected each table at most once")
        expected = sum([parts[ask.table].ask_frames for ask in asks])
        if len(frames) != expected:
            raise BadMessage(f"pull: expected {expected} frames, got {len(frames)}")
        end = 0
        for ask in asks:
            part = parts[ask.table]
            start, end = end, end + part.ask_frames
            part.check_ask(ask, frames[start:end])

    def pull(self, message: Pull, frames: Sequence[Buffer], waited_s: float, now: float) -> Answer:
        """The answer to a worker's checked pull, which was parked for `waited_s`."""
        # Recorded when it is answered, not when it came: the age of a push counts from there.
        self._metrics.read(message.worker, self._parameters.version, now)
        return self._answer(message.request, message.parts, frames, message.worker, waited_s)

    def read(self, message: Read, frames: Sequence[Buffer]) -> Answer:
        """The present version for an operator: the parts asked for, or all dense tables.

        Raises BadMessage or BadInput.
        """
        asks = message.parts or self.plain
        self.check(asks, frames)
        self._parameters.weights()  # raises Retry: a shard without a state has no rows either
        return self._answer(message.request, asks, frames, "", 0.0)

    def forget(self, worker: str) -> None:
        """Answer the worker's next pull of changes with whole weights."""
        for part in self._parameters.parts.values():
            part.forget(worker)

    def _answer(
        self,
        request: int,
        asks: Sequence[AskedPart],
        asked: Sequence[Buffer],
        worker: str,
        waited_s: float,
    ) -> Answer:
        parameters = self._parameters
        # Read once, so that all parts of an answer are of one version.
        weights, version = parameters.host_weights(), parameters.version
        parts: list[PulledPart] = []
        frames: list[NDArray[Any]] = []
        end = 0
        for ask in asks:
            table_part = parameters.parts[ask.table]
            start, end = end, end + table_part.ask_frames
            part, part_frames = table_part.read(weights, version, ask, asked[start:end], worker)
            parts.append(part)
            frames += part_frames
        sent_bytes = sum([frame.nbytes for frame in frames])
        self._metrics.pulls += 1
        self._metrics.bytes_out += sent_bytes
        origin = request, self._shard, self._boot, self._epoch
        return Weights(*origin, version, parts, waited_s), tuple(frames)
