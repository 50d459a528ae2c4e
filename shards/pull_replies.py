"""How a shard's weights are told to who asks: the answer to a pull, and what it counts as.

A pull names the form that it wants: the version as it is or as halves, made once for all who ask
(pull_encodings.py), or the changes since what the worker has (delta_pulls.py). Whether the pull may
be answered yet is settled before it comes here (gate.py).
"""

from shards import delta_pulls, pull_encodings, wire_format, zstd_frames
from shards.delta_pulls import Change, DeltaViews
from shards.messages import Kind, Pull, Weights
from shards.metrics import Metrics
from shards.parameters import ParameterStore
from shards.pull_encodings import Frames, PullEncodings
from shards.spec import ShardSpec

Answer = tuple[Weights, Frames]
"""The header, and the frames behind it; whoever gets them must not write into them."""


class PullReplies:
    """What one life of a shard answers out of `held`; it counts that in `journal`."""

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
        """Raise BadMessage or BadInput where weights cannot be served as `pull` wants them."""
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
        """The present version, for anybody."""
        frames = self._served.frames(self._held.host_weights(), self._held.version, kind, zstd)
        return self._answer(request, waited_s, zstd, Change(kind, 0, 0, frames))

    def forget(self, worker: str) -> None:
        """Its next pull of changes gets the weights whole."""
        self._views.forget(worker)

    def reset(self) -> None:
        """Other weights come, under whatever version."""
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
