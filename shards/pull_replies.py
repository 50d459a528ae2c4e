"""Answers to pulls, and their entries in the metrics.

A pull names its encoding: the version as float32 or as 16-bit floats, made once for all workers
(pull_encodings.py), or the changes since the version that the worker has (delta_pulls.py). The gate
decides earlier whether the pull may be answered yet (gate.py).
"""

from shards import delta_pulls, pull_encodings, wire_format, zstd_frames
from shards.delta_pulls import Change, DeltaViews
from shards.messages import Kind, Pull, Weights
from shards.metrics import Metrics
from shards.parameters import ParameterStore
from shards.pull_encodings import Frames, PullEncodings
from shards.spec import ShardSpec

Answer = tuple[Weights, Frames]
"""The header, and the frames that follow it; receivers must not write into them."""


class PullReplies:
    """One life of a shard's answers from `held`; they are counted in `journal`."""

    def __init__(self, spec: ShardSpec, boot: int, held: ParameterStore, journal: Metrics) -> None:
        ranges = spec.map.ranges[spec.shard]
        self._spec = spec
        self._boot = boot
        self._held = held
        self._journal = journal
        self._keys = wire_format.flatten(ranges)
        self._served = PullEncodings(ranges)
        self._views = DeltaViews(ranges)

    def check(self, pull: Pull) -> None:
        """Raise BadMessage or BadInput if weights cannot be served as `pull` requests."""
        pull_encodings.check(pull.kind, pull.zstd, pull.share)

    def pull(self, message: Pull, waited_s: float, now: float) -> Answer:
        """The answer to a worker's checked pull, which was parked for `waited_s`."""
        self._journal.read(message.worker, self._held.version, now)
        if message.kind in delta_pulls.KINDS:
            return self._change(message, waited_s)
        return self.whole(message.request, waited_s, message.kind, message.zstd)

    def whole(
        self, request: int, waited_s: float = 0.0, kind: Kind = Kind.F4, zstd: bool = False
    ) -> Answer:
        """The whole present version, for a worker or an operator."""
        frames = self._served.frames(self._held.host_weights(), self._held.version, kind, zstd)
        return self._answer(request, waited_s, zstd, Change(kind, 0, 0, frames))

    def forget(self, worker: str) -> None:
        """Answer the worker's next pull of changes with whole weights."""
        self._views.forget(worker)

    def reset(self) -> None:
        """Drop encoded weights: others are being installed, perhaps under the same version."""
        self._served.forget()

    def _change(self, message: Pull, waited_s: float) -> Answer:
        change = self._views.serve(
            message.worker, self._held.host_weights(), message.kind, message.share, message.base
        )
        if message.zstd:
            packed = tuple(zstd_frames.pack(frame) for frame in change.frames)
            change = change._replace(frames=packed)
        return self._answer(message.request, waited_s, message.zstd, change)

    def _answer(self, request: int, waited_s: float, zstd: bool, change: Change) -> Answer:
        self._journal.pulls += 1
        self._journal.bytes_out += sum([frame.nbytes for frame in change.frames])
        weights = Weights(
            request,
            self._spec.shard,
            self._boot,
            self._spec.map.epoch,
            self._spec.table.name,
            self._held.version,
            change.kind,
            self._keys,
            waited_s,
            zstd,
            change.base,
            change.number,
        )
        return weights, change.frames
