"""What a worker has pushed beyond the state that its shards last gave away, for a snapshot.

Theory. A snapshot of the shards says for each worker after which push it was taken, at each shard
of its own. The residual of compressed pushes lives with the worker, who stands a few pushes further
when it hears of it. Its state then, and the pushes in between, are together what it was at the
snapshot: the channel between the two, recorded (Chandy and Lamport 1985). Nobody waits for anybody.

Every acknowledgement says after which push the shard's state was last given away. So the first that
says something new comes for a push which that state does not hold, and until it came all since were
outstanding at this shard: none is missed that is noted from then on. A part that another shard had
acknowledged before is gone, and is not needed: that shard's state, given away later, holds it.
"""

from collections.abc import Iterable

from ps.session.events import Exported, Frames, Noted
from shards.messages import FromWorker, Push

_MORE = 16  # pushes, beyond twice those on their way, that are noted for shards yet to speak


class ChannelRecorder:
    """The notes of one session with `shards` shards."""

    def __init__(self, shards: int) -> None:
        self._shards = shards
        self._saved: dict[int, int] = {}
        self._told: set[int] = set()
        self._noted: Noted = {}
        self._most = 0

    def pushed(self, shard: int, message: FromWorker, frames: Frames) -> None:
        """A message goes out; it is noted while some shards have spoken and others have not."""
        if not self._told:
            return
        self._note(shard, message, frames)
        if len(self._noted) > self._most:  # one that stays silent was probably not asked
            self._told, self._noted = set(), {}

    def record_export(
        self, shard: int, saved: int, outstanding: Iterable[tuple[int, FromWorker, Frames]]
    ) -> Exported | None:
        """`shard` acknowledges a push and says what was `saved`; `outstanding` holds that push."""
        if saved <= self._saved.get(shard, 0):
            return None
        self._saved[shard] = saved
        self._told.add(shard)
        for to, message, frames in outstanding:
            self._note(to, message, frames)
        self._most = 2 * len(self._noted) + _MORE
        if len(self._told) < self._shards:
            return None
        base = min(self._saved.values())
        noted = {seq: self._noted[seq] for seq in sorted(self._noted) if seq > base}
        self._told, self._noted = set(), {}
        return Exported(base, noted)

    def _note(self, shard: int, message: FromWorker, frames: Frames) -> None:
        if isinstance(message, Push):
            self._noted.setdefault(message.seq, {})[shard] = message, frames
