"""How a shard's weights are told to who asks: the answer to a pull, and what it counts as.

A pull names the form that it wants: the version as it is or as halves, made once for all who ask
(served.py), or the changes since what the worker has (views.py). Whether the pull may be answered
yet is settled before it comes here (gate.py).
"""

from shards import codec, packing, served, views
from shards.journal import Journal
from shards.messages import Kind, Pull, Weights
from shards.served import Frames, Served
from shards.spec import ShardSpec
from shards.state import Held
from shards.views import Change, Views

Answer = tuple[Weights, Frames]
"""The header, and the frames behind it; whoever gets them must not write into them."""


class Serving:
    """What one life of a shard answers out of `held`; it counts that in `journal`."""

    def __init__(self, spec: ShardSpec, boot: int, held: Held, journal: Journal) -> None:
        ranges = spec.map.ranges[spec.shard]
        self._spec = spec
        self._boot = boot
        self._held = held
        self._journal = journal
        self._keys = codec.flatten(ranges)
        self._served = Served(ranges)
        self._views = Views(ranges)

    def check(self, pull: Pull) -> None:
        """Raise BadMessage or BadInput where weights cannot be served as `pull` wants them."""
        served.check(pull.kind, pull.zstd, pull.share)

    def pull(self, message: Pull, waited_s: float, now: float) -> Answer:
        """The answer to a worker's checked pull, which was parked for `waited_s`."""
        self._journal.read(message.worker, self._held.version, now)
        if message.kind in views.KINDS:
            return self._change(message, waited_s)
        return self.whole(message.request, waited_s, message.kind, message.zstd)

    def whole(
        self, request: int, waited_s: float = 0.0, kind: Kind = Kind.F4, zstd: bool = False
    ) -> Answer:
        """The present version, for anybody."""
        frames = self._served.frames(self._held.on_the_host(), self._held.version, kind, zstd)
        return self._answer(request, waited_s, zstd, Change(kind, 0, 0, frames))

    def forget(self, worker: str) -> None:
        """Its next pull of changes gets the weights whole."""
        self._views.forget(worker)

    def begin_anew(self) -> None:
        """Other weights come, under whatever version."""
        self._served.forget()

    def _change(self, message: Pull, waited_s: float) -> Answer:
        change = self._views.serve(
            message.worker, self._held.on_the_host(), message.kind, message.share, message.base
        )
        if message.zstd:
            packed = tuple(packing.pack(frame) for frame in change.frames)
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
