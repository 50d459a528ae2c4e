"""Records a worker's pushes that the shards' last exported states lack, for a snapshot.

Theory. A snapshot of the shards states for each worker the push after which it was taken,
separately at each shard. The residual of compressed pushes is held by the worker, which is a few
pushes further when it hears of the snapshot. The worker's state then, together with the pushes in
between, is its state at the snapshot: the channel between the two, recorded (Chandy and Lamport
1985). No process waits for another.

Every acknowledgement states the push after which the shard's state was last exported. The first one
with a new value is therefore for a push that this state does not hold, and until it arrived all
pushes since were outstanding at this shard: recording from then on misses none. A part that another
shard had acknowledged before is gone, and is not needed: that shard's state is exported later and
holds it.
"""

from collections.abc import Iterable

from ps.session.events import Exported, Frames, Noted
from shards.messages import FromWorker, Push

_MORE = 16  # pushes recorded, beyond twice those in flight, while other shards have not reported


class ChannelRecorder:
    """The recorded pushes of one session with `shards` shards."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._saved: dict[int, int] = {}
        self._reported: set[int] = set()
        self._noted: Noted = {}
        self._most = 0

    def pushed(self, shard: int, message: FromWorker, frames: Frames) -> None:
        """A message is sent; it is recorded while some shards have reported an export and others
        have not.
        """
        if not self._reported:
            return
        self._note(shard, message, frames)
        if len(self._noted) > self._most:  # a shard that has not reported was probably not exported
            self._reported, self._noted = set(), {}

    def record_export(
        self, shard: int, saved: int, outstanding: Iterable[tuple[int, FromWorker, Frames]]
    ) -> Exported | None:
        """`shard` acknowledges a push and reports that `saved` was exported; `outstanding` has that
        push.
        """
        if saved <= self._saved.get(shard, 0):
            return None
        self._saved[shard] = saved
        self._reported.add(shard)
        for to, message, frames in outstanding:
            self._note(to, message, frames)
        self._most = 2 * len(self._noted) + _MORE
        if len(self._reported) < self._shards:
            return None
        base = min(self._saved.values())
        noted = {seq: self._noted[seq] for seq in sorted(self._noted) if seq > base}
        self._reported, self._noted = set(), {}
        return Exported(base, noted)

    def _note(self, shard: int, message: FromWorker, frames: Frames) -> None:
        if isinstance(message, Push):
            self._noted.setdefault(message.seq, {})[shard] = message, frames
