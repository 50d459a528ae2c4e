"""A replica: one copy of a shard, as primary or as backup.

Theory. A shard is a deterministic state machine: the same requests in the same order make the same
weights, slots and ledger, bit for bit. So a backup is a second shard that is handed the primary's
requests in the primary's order (Schneider 1990, the state-machine approach), and the promise that
an acknowledged push is never lost is one rule about *answers*: an answer leaves only once all that
it shows is *committed*, that is, held by every copy that the configuration counts on.

- The primary numbers each request that changes something (a hello, a join, a push, a departure, an
  install, a standstill, a move, a lease that ran out, a gradient that is refused, for that counts)
  and sends it to the backup. It applies it at once; the answers are held back until the backup has
  reported that number. A request that only reads shows the state after the newest entry, so its
  answer waits for that one.
- Without a backup everything is committed at once.
- A backup counts as *in sync* once it has been sent the whole state and has reported everything
  that was committed. From that moment nothing is committed without it, and only then does the
  primary say so to the coordinator, which from then on may promote it. Until then each second entry
  that it reports lets another one be committed without it: so workers never wait for all that came
  while its state travelled, and it catches up, be the link slower than they are.
- A state may travel for minutes, while workers push. So every entry since the first state of an
  epoch is kept until it is reported, whichever state the backup then has: a state that is sent
  again never makes the report of an earlier one worthless. It is sent again each time after twice
  as long, for behind a state on its way another one only delays what follows.
- A primary acts under the newest configuration that the coordinator has *confirmed*; before that it
  goes on under the one before. Who has accepted a newer configuration ignores the entries of an
  older one, so a primary of the past can commit nothing more. It does not retire for that: until
  the newer configuration is confirmed, it may yet be called back.
- A backup that is promoted serves only once confirmed. It may hold entries that were never
  committed; they are now. A worker that repeats such a push is told that it is a duplicate.

The workers' parked pulls, which change nothing, die with the primary: a worker learns from the new
one's boot number that it must say hello again, and asks anew.

It leaves to others: carrying messages, telling the time, choosing configurations (ps/coordinator),
and finding the primary. A driver calls a transition and carries out the `Effects`, in order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain

import msgspec
import numpy as np
from numpy.typing import NDArray

from shards import codec
from shards.codec import Buffer
from shards.errors import Retry
from shards.group import (
    MOST_EXPIRED,
    Assignment,
    Beat,
    Configuration,
    Replicate,
    Replicated,
    Sync,
    ToPeer,
)
from shards.messages import CHANGING, Registered, Request
from shards.move import Stance
from shards.refusals import changed_nothing
from shards.shard import Shard
from shards.state import Saved
from shards.transitions import Outgoing

Frames = tuple[NDArray[np.float32] | Buffer, ...]


class Post(msgspec.Struct, frozen=True):
    """A message for the replica whose boot number is `to`."""

    to: int
    message: ToPeer
    frames: Frames = ()


class Effects(msgspec.Struct, frozen=True):
    """What a driver is to send: answers to clients, posts to peers, a beat to the coordinator."""

    answers: list[Outgoing] = []
    posts: list[Post] = []
    beat: Beat | None = None


class _Entry(msgspec.Struct, frozen=True):
    """One entry of the log, kept until the backup has it."""

    position: int
    at: float
    frames: Frames
    expired: tuple[str, ...]


class Replica:
    """One life of one copy of a shard; `make_shard` makes an empty one with this boot number."""

    def __init__(
        self, shard: int, boot: int, make_shard: Callable[[], Shard], *, retry_s: float = 0.5
    ) -> None:
        self.number = shard
        self.boot = boot
        self.shard = make_shard()
        self.retry_s = retry_s
        self.position = 0
        self._make_shard = make_shard
        self._accepted: Configuration | None = None
        self._active: Configuration | None = None  # what a primary acts under
        self._holds: int | None = None  # as a backup: the last entry applied
        # As a primary: what the backup has reported; and, once it has, the last entry that was
        # committed without it; at the first report these were `_first`.
        self._reported: int | None = None
        self._alone_until: int | None = None
        self._first = (0, 0)
        self._unreported: deque[_Entry] = deque()
        self._held: deque[tuple[int, list[Outgoing]]] = deque()
        self._quiet_since = 0.0
        self._patience_s = retry_s  # until the state is sent again
        self.retired = False

    # --- what it is -------------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """Whether it is a primary whose configuration is confirmed."""
        return not self.retired and self._active is not None and self._active.primary == self.boot

    @property
    def called(self) -> bool:
        """Whether it is to be the primary, and waits for the word that it is."""
        accepted = self._accepted
        called = accepted is not None and accepted.primary == self.boot
        return called and not self.serving and not self.retired

    @property
    def committed(self) -> int:
        """The last entry that every copy which counts holds."""
        if self._reported is None or self._alone_until is None:
            return self.position
        return max(self._alone_until, min(self._reported, self.position))

    @property
    def behind(self) -> int | None:
        """Entries that its backup has yet to report to be in sync; None before its first report."""
        if self._reported is None or self._alone_until is None:
            return None
        return max(0, self._alone_until - self._reported)

    @property
    def in_sync(self) -> bool:
        """Whether its backup holds all that is committed, and nothing is committed without it."""
        return self.behind == 0 and self._accepted == self._active

    def beat(self) -> Beat:
        """What to tell the coordinator, now and every so often."""
        accepted = self._accepted
        return Beat(self.number, self.boot, accepted.epoch if accepted else 0, self.in_sync)

    # --- transitions ------------------------------------------------------------------------------

    def assign(self, told: Assignment, now: float) -> Effects:
        """Take the coordinator's decision; an old one changes nothing."""
        new = told.configuration
        known = self._accepted.epoch if self._accepted else 0
        if self.retired or new.epoch < known:
            return Effects()
        if not new.holds(self.boot):
            if told.confirmed and self._accepted is not None:
                self._retire()  # a newcomer is told so too, and has nothing to lose
            return Effects()
        fresh = new.epoch > known
        if fresh:
            self._accept(new)
        effects = Effects()
        if told.confirmed and new.primary == self.boot and self._active != new:
            effects = self._act_under(new, now)
        return Effects(effects.answers, effects.posts, self.beat() if fresh else None)

    def handle(
        self, sender: bytes, message: Request, frames: Sequence[Buffer], now: float
    ) -> Effects:
        """Answer a worker or an operator."""
        if not self.serving:
            reason = Retry(
                f"this copy of shard {self.number} does not serve; if no other copy does, all that"
                " held its state have died: resume the job from its last snapshot"
            )
            return Effects([self.shard.refuse(sender, message.request, reason)])
        answers = self.shard.handle(sender, message, frames, now)
        in_vain = any(changed_nothing(answer.message) for answer in answers)
        if in_vain or not isinstance(message, CHANGING):
            return self._answer(answers)
        return self._log(now, (codec.encode(message), *frames), (), answers)

    def tick(self, now: float) -> Effects:
        """Let leases run out, and repeat to a silent backup what it has not reported."""
        if not self.serving:
            return Effects()
        answers: list[Outgoing] = []
        posts = self._repeat(now)
        silent = self.shard.ledger.silent(now)
        for begin in range(0, len(silent), MOST_EXPIRED):
            some = tuple(silent[begin : begin + MOST_EXPIRED])
            effects = self._log(now, (), some, self.shard.expire(some, now))
            answers += effects.answers
            posts += effects.posts
        return Effects(answers, posts)

    def receive(
        self, origin: int, message: ToPeer, frames: Sequence[Buffer], now: float
    ) -> Effects:
        """Take a message of the peer whose boot number is `origin`."""
        match message:
            case Replicated():
                return self._heard(origin, message, now)
            case Sync() | Replicate():
                return self._copied(origin, message, frames)

    # --- configurations ---------------------------------------------------------------------------

    def _accept(self, new: Configuration) -> None:
        assert self._accepted is None or new.epoch > self._accepted.epoch
        self._accepted = new
        if new.backup == self.boot:
            self._holds = None  # the primary sends everything anew in each epoch

    def _act_under(self, new: Configuration, now: float) -> Effects:
        """It is confirmed, and this is its primary."""
        promoted = self._active is None
        self._active = new
        self._reported = self._alone_until = None
        self._unreported.clear()
        self._patience_s = self.retry_s
        if promoted:
            self.shard.take_over(now)
        posts = self._send_state(now) if new.backup is not None else []
        return Effects(self._released(), posts)

    def _retire(self) -> None:
        """It has no part any more: what it held back was never acknowledged, and never will be."""
        self.retired = True
        self._held.clear()
        self._unreported.clear()

    # --- as a primary -----------------------------------------------------------------------------

    def _log(
        self, now: float, frames: Frames, expired: tuple[str, ...], answers: list[Outgoing]
    ) -> Effects:
        """Number what was just applied, send it to the backup, and hold back its answers."""
        self.position += 1
        posts = []
        if self._active is not None and self._active.backup is not None:
            entry = _Entry(self.position, now, frames, expired)
            if not self._unreported and self._reported is not None:
                self._quiet_since = now
            self._unreported.append(entry)
            posts = [self._replicate(entry)]
        effects = self._answer(answers)
        return Effects(effects.answers, posts)

    def _answer(self, answers: list[Outgoing]) -> Effects:
        """Let answers go that show only what is committed; the others wait."""
        # Nobody waits for the answer to a request that came through a primary of the past.
        awaited = [answer for answer in answers if answer.to]
        if awaited:
            self._held.append((self.position, awaited))
        return Effects(self._released())

    def _released(self) -> list[Outgoing]:
        out: list[Outgoing] = []
        while self._held and self._held[0][0] <= self.committed:
            out += self._held.popleft()[1]
        return out

    def _send_state(self, now: float) -> list[Post]:
        """Everything, to a backup that has reported nothing in this epoch yet."""
        assert self._active is not None
        assert self._active.backup is not None
        self._quiet_since = now
        if self.shard.held.empty:
            return [Post(self._active.backup, Sync(self._active.epoch, self.position, []))]
        saved, weights, slots = self.shard.copy()
        waiting = [(codec.encode(one), *payload) for one, payload in self.shard.waiting()]
        counts = [len(frames) for frames in waiting]
        message = Sync(self._active.epoch, self.position, list(slots), now, counts)
        kept: Frames = codec.encode_state(saved), codec.encode_state(self.shard.stance)
        frames: Frames = (*kept, weights, *slots.values(), *chain(*waiting))
        return [Post(self._active.backup, message, frames)]

    def _replicate(self, entry: _Entry) -> Post:
        assert self._active is not None
        assert self._active.backup is not None
        message = Replicate(self._active.epoch, entry.position, entry.at, list(entry.expired))
        return Post(self._active.backup, message, entry.frames)

    def _repeat(self, now: float) -> list[Post]:
        """What a backup has not reported for long may have been sent in vain."""
        if self._active is None or self._active.backup is None:
            return []
        quiet_s = now - self._quiet_since
        if self._reported is None:
            if quiet_s < self._patience_s:
                return []
            self._patience_s *= 2
            return self._send_state(now)
        if not self._unreported or quiet_s < self.retry_s:
            return []
        self._quiet_since = now
        return [self._replicate(entry) for entry in self._unreported]

    def _heard(self, origin: int, message: Replicated, now: float) -> Effects:
        active = self._active
        if active is None or active.backup != origin or message.epoch != active.epoch:
            return Effects()
        if message.position is None:
            return Effects()
        was_in_sync = self.in_sync
        self._reported = max(self._reported or 0, message.position)
        self._quiet_since = now
        while self._unreported and self._unreported[0].position <= self._reported:
            self._unreported.popleft()
        if self._alone_until is None:
            self._alone_until = self.position
            self._first = (self._reported, self.position)
        elif self._reported < self._alone_until:
            reported, alone = self._first
            further = alone + (self._reported - reported) // 2
            self._alone_until = max(self._alone_until, min(self.position, further))
        return Effects(
            self._released(), [], self.beat() if self.in_sync and not was_in_sync else None
        )

    # --- as a backup ------------------------------------------------------------------------------

    def _copied(self, origin: int, message: Sync | Replicate, frames: Sequence[Buffer]) -> Effects:
        accepted = self._accepted
        if accepted is None or message.epoch > accepted.epoch:
            return Effects()  # the coordinator has not told this copy yet; the primary repeats it
        if message.epoch < accepted.epoch or accepted.backup != self.boot:
            return Effects()
        if isinstance(message, Sync):
            self._take_state(message, frames)
        elif self._holds is not None and message.position == self._holds + 1:
            self._apply(message, frames)
        return Effects(posts=[Post(origin, Replicated(message.epoch, self._holds))])

    def _take_state(self, message: Sync, frames: Sequence[Buffer]) -> None:
        if self._holds is not None and message.position <= self._holds:
            return  # a repetition that comes late
        self.shard = self._make_shard()
        if frames:
            rest = 3 + len(message.slots)
            saved = codec.decode_state(frames[0], Saved)
            weights, *slots = [np.frombuffer(frame, np.float32) for frame in frames[2:rest]]
            self.shard.restore(saved, weights, dict(zip(message.slots, slots, strict=True)))
            self.shard.stance = codec.decode_state(frames[1], Stance)
            for count in message.waiting:
                request = codec.decode_request(frames[rest])
                self.shard.let_wait(request, frames[rest + 1 : rest + count], message.at)
                rest += count
        self._holds = self.position = message.position

    def _apply(self, message: Replicate, frames: Sequence[Buffer]) -> None:
        """The primary's entry, as this shard's own; the answers are the primary's to give."""
        if message.expired:
            self.shard.expire(message.expired, message.at)
        else:
            request = codec.decode_request(frames[0])
            if isinstance(request, Registered):
                request = msgspec.structs.replace(request, boot=self.shard.boot)
            self.shard.handle(b"", request, frames[1:], message.at)
        self._holds = self.position = message.position
