"""A replica: one copy of a shard, as primary or as backup.

Theory. A shard is a deterministic state machine: the same requests in the same order make the same
weights, slots and ledger, bit for bit. So a backup is a second shard that receives the primary's
requests in the primary's order (Schneider 1990, the state-machine approach). The promise that an
acknowledged push is never lost is one rule about *answers*: an answer leaves only once everything
that it shows is *committed*, that is, held by every copy that the configuration counts on.

- The primary numbers each change (a hello, join, push, departure, install, quiesce or handover, an
  expired lease, a gradient that the guard refuses, because that is counted) and sends it to the
  backup. It applies the change at once, but holds back the answers until the backup has reported
  that number. A request that only reads shows the state after the newest entry, so its answer waits
  for that entry.
- Without a backup everything is committed at once.
- A backup counts as *in sync* once it has received the whole state and has reported everything that
  was committed. From that moment nothing is committed without it. Only then does the primary report
  it to the coordinator, which from then on may promote it. Before that, every two entries that the
  backup reports allow one more to be committed without it. So workers never wait for all entries
  that were made while the state travelled, and the backup catches up even if its link is slower
  than the workers' pushes.
- A state may travel for minutes, while workers push. It travels in pieces (state_pieces.py), a few
  at a time, so entries and heartbeats do not wait behind it. Each epoch sends one such state. The
  version from which it was taken is kept until the backup reports it, and so is every later entry;
  these entries follow the last piece. Pieces and entries that a silent backup has not reported are
  sent again; each repetition of a piece waits twice as long as the one before.
- A primary acts under the newest configuration that the coordinator has *confirmed*; until then it
  continues under the one before. A copy that has accepted a newer configuration ignores the entries
  of an older one, so a former primary can commit nothing more. The former primary does not step
  down yet: until the newer configuration is confirmed, the coordinator may still call it back.
- A backup that is promoted serves only once confirmed. It may hold entries that were never
  committed; its promotion commits them. A worker that repeats such a push gets a duplicate's Ack.

The workers' parked pulls, which change nothing, die with the primary: a worker learns from the new
one's boot number that it must say hello again, and repeats its request.

The replica leaves to others: carrying messages, keeping time, choosing configurations
(ps/replication/coordinator.py), and finding the primary. A driver calls a transition and carries
out the `Effects`, in order.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any

import msgspec
from numpy.typing import NDArray

from shards import shard_state, wire_format
from shards.errors import BadMessage, Retry
from shards.messages import CHANGING, PIECE_BYTES, Count, Registered, Request
from shards.refusals import leaves_state_unchanged
from shards.replication_messages import (
    MAX_EXPIRED,
    Assignment,
    Beat,
    Configuration,
    Replicate,
    Replicated,
    Sync,
    ToPeer,
)
from shards.reshard_state import ReshardProgress
from shards.shard import Expiry, Shard
from shards.state_pieces import AHEAD, CutState, GatheredState
from shards.transition_io import Outgoing
from shards.wire_format import Buffer

Frames = tuple[NDArray[Any] | Buffer, ...]


class Post(msgspec.Struct, frozen=True):
    """A message for the replica with boot number `to`."""

    to: int
    message: ToPeer
    frames: Frames = ()


class Effects(msgspec.Struct, frozen=True):
    """Messages for the driver to send: answers to clients, posts to peers, a beat."""

    answers: list[Outgoing] = []
    posts: list[Post] = []
    beat: Beat | None = None


_NOTHING_DUE = Expiry([], [])


class _Entry(msgspec.Struct, frozen=True):
    """One entry of the replication log, kept until the backup has reported it."""

    position: int
    at: float
    frames: Frames
    due: Expiry


class _Copied(msgspec.Struct, frozen=True):
    """The first frame of a copied state; the frames of the state and of waiting requests follow.

    `at` is the primary's clock in seconds. The state has `state` frames, none if no weights are
    installed, and each waiting request as many frames as `waiting` says.
    """

    at: float
    progress: ReshardProgress
    state: Count
    waiting: list[Count]


class _Sending(msgspec.Struct):
    """A state in transit to the backup: it has reported `arrived` pieces, and `sent` were sent.

    `all_sent`: each piece was sent once; entries follow now, even if some pieces are sent again.
    """

    position: int
    cut: CutState
    arrived: int = 0
    sent: int = 0
    all_sent: bool = False


class ShardReplica:
    """One incarnation of a copy of a shard; `make_shard` makes an empty shard with its number."""

    def __init__(
        self,
        shard: int,
        boot: int,
        make_shard: Callable[[], Shard],
        *,
        retry_s: float = 0.5,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        self.number = shard
        self.boot = boot
        self.shard = make_shard()
        self.retry_s = retry_s
        self.position = 0
        self._make_shard = make_shard
        self._accepted: Configuration | None = None
        self._active: Configuration | None = None  # what a primary acts under
        self._piece_bytes = piece_bytes
        self._holds: int | None = None  # as a backup: the last entry applied,
        self._gathered: GatheredState | None = None  # or the pieces of the state before it
        self._sending: _Sending | None = None  # as a primary: until the first report
        # As a primary: the last entry that the backup has reported, and the last one that may be
        # committed without it. `_first` holds both as they were at the first report.
        self._reported: int | None = None
        self._alone_until: int | None = None
        self._first = (0, 0)
        self._unreported: deque[_Entry] = deque()
        self._pending_answers: deque[tuple[int, list[Outgoing]]] = deque()
        self._quiet_since = 0.0
        self._patience_s = retry_s  # until pieces of the state are sent again
        self.retired = False

    # --- role and progress ------------------------------------------------------------------------

    @property
    def serving(self) -> bool:
        """True if this copy is the primary of a confirmed configuration."""
        return not self.retired and self._active is not None and self._active.primary == self.boot

    @property
    def awaits_confirmation(self) -> bool:
        """True if this copy has accepted to be the primary and waits for the confirmation."""
        accepted = self._accepted
        called = accepted is not None and accepted.primary == self.boot
        return called and not self.serving and not self.retired

    @property
    def commit_position(self) -> int:
        """The last entry held by every copy that the configuration counts on."""
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
        """True if its backup holds all that is committed, and nothing is committed without it."""
        return self.behind == 0 and self._accepted == self._active

    def beat(self) -> Beat:
        """The report to the coordinator, which the driver sends at regular intervals."""
        accepted = self._accepted
        return Beat(self.number, self.boot, accepted.epoch if accepted else 0, self.in_sync)

    # --- transitions ------------------------------------------------------------------------------

    def assign(self, decision: Assignment, now: float) -> Effects:
        """Follow the coordinator's decision; an old one changes nothing."""
        new = decision.configuration
        known = self._accepted.epoch if self._accepted else 0
        # Assignments may be repeated or overtake each other; only the newest counts.
        if self.retired or new.epoch < known:
            return Effects()
        if not new.holds(self.boot):
            # A newcomer, which has accepted nothing yet, hears this too and must not step down.
            if decision.confirmed and self._accepted is not None:
                self._step_down()
            return Effects()
        fresh = new.epoch > known
        if fresh:
            self._accept(new)
        effects = Effects()
        if decision.confirmed and new.primary == self.boot and self._active != new:
            effects = self._act_under(new, now)
        return Effects(effects.answers, effects.posts, self.beat() if fresh else None)

    def handle(
        self, sender: bytes, message: Request, frames: Sequence[Buffer], now: float
    ) -> Effects:
        """Answer a worker or an operator."""
        if not self.serving:
            reason = Retry(
                f"this copy of shard {self.number} does not serve; if no other copy does, every"
                " copy with its state has died: resume the job from its last snapshot"
            )
            return Effects([self.shard.refuse(sender, message.request, reason)])
        answers = self.shard.handle(sender, message, frames, now)
        unchanged = any(leaves_state_unchanged(answer.message) for answer in answers)
        if unchanged or not isinstance(message, CHANGING):
            return self._answer(answers)
        return self._log(now, (wire_format.encode(message), *frames), answers)

    def tick(self, now: float) -> Effects:
        """Expire leases, and repeat to a silent backup what it has not reported."""
        if not self.serving:
            return Effects()
        answers: list[Outgoing] = []
        posts = self._repeat(now)
        due = self.shard.due(now)
        if due is None:
            return Effects(answers, posts)
        # At least once: an empty list still applies a buffer, and the backup must do so at the same
        # point.
        for begin in range(0, max(1, len(due.workers)), MAX_EXPIRED):
            some = due.workers[begin : begin + MAX_EXPIRED]
            # With the last: a report of a worker that is silent may not be missed any more.
            last = begin + MAX_EXPIRED >= len(due.workers)
            part = Expiry(some, due.merges if last else [])
            effects = self._log(now, (), self.shard.expire(some, now, part.merges), part)
            answers += effects.answers
            posts += effects.posts
        return Effects(answers, posts)

    def receive(
        self, origin: int, message: ToPeer, frames: Sequence[Buffer], now: float
    ) -> Effects:
        """Handle a message of the peer with boot number `origin`."""
        match message:
            case Replicated():
                return self._handle_report(origin, message, now)
            case Sync() | Replicate():
                return self._handle_copy(origin, message, frames)

    # --- configurations ---------------------------------------------------------------------------

    def _accept(self, new: Configuration) -> None:
        assert self._accepted is None or new.epoch > self._accepted.epoch
        self._accepted = new
        if new.backup == self.boot:
            # The primary sends its whole state again in each epoch.
            self._holds = self._gathered = None

    def _act_under(self, new: Configuration, now: float) -> Effects:
        """Act as the primary of a confirmed configuration."""
        promoted = self._active is None
        self._active = new
        # The reports of a former backup say nothing about the present one.
        self._reported = self._alone_until = None
        self._unreported.clear()
        self._sending = None
        # Not where only the backup has changed: the workers would say hello again for nothing.
        if promoted:
            self.shard.take_over(now)
        posts = self._send_state(now) if new.backup is not None else []
        return Effects(self._release(), posts)

    def _step_down(self) -> None:
        """Retire: this copy is in no configuration any more, and never sends the held answers."""
        self.retired = True
        self._pending_answers.clear()
        self._unreported.clear()
        self._sending = None

    # --- as a primary -----------------------------------------------------------------------------

    def _log(
        self, now: float, frames: Frames, answers: list[Outgoing], due: Expiry = _NOTHING_DUE
    ) -> Effects:
        """Number what was just applied, send it to the backup, and hold back its answers."""
        self.position += 1
        posts = []
        if self._active is not None and self._active.backup is not None:
            entry = _Entry(self.position, now, frames, due)
            if not self._unreported and self._reported is not None:
                self._quiet_since = now
            self._unreported.append(entry)
            # A backup without its whole state ignores entries, so these follow the last piece.
            if self._sending is None or self._sending.all_sent:
                posts = [self._replicate(entry)]
        effects = self._answer(answers)
        return Effects(effects.answers, posts)

    def _answer(self, answers: list[Outgoing]) -> Effects:
        """Queue answers, and release those that show only what is committed."""
        # No client waits for answers to requests that were replicated from a former primary; they
        # have no sender's address.
        awaited = [answer for answer in answers if answer.to]
        if awaited:
            # Answers to reads wait as well: they may show an entry that would be lost with this
            # process.
            self._pending_answers.append((self.position, awaited))
        return Effects(self._release())

    def _release(self) -> list[Outgoing]:
        out: list[Outgoing] = []
        # Positions rise along the queue, so the first one that is not committed ends the search.
        while self._pending_answers and self._pending_answers[0][0] <= self.commit_position:
            out += self._pending_answers.popleft()[1]
        return out

    def _send_state(self, now: float) -> list[Post]:
        """Begin to send the whole state to a new backup."""
        self._patience_s = self.retry_s
        state = () if self.shard.parameters.empty else shard_state.encode(self.shard.copy())
        waiting = [
            (wire_format.encode(request), *payload) for request, payload in self.shard.waiting()
        ]
        counts = [len(frames) for frames in waiting]
        first = _Copied(now, self.shard.progress, len(state), counts)
        frames: Frames = (wire_format.encode_state(first), *state, *chain(*waiting))
        self._sending = _Sending(self.position, CutState(frames, self._piece_bytes))
        return self._send_pieces(self._sending, now)

    def _send_pieces(self, sending: _Sending, now: float) -> list[Post]:
        """The next pieces, of which `AHEAD` may be on their way."""
        assert self._active is not None
        assert self._active.backup is not None
        self._quiet_since = now
        posts, epoch = [], self._active.epoch
        last = min(sending.arrived + AHEAD, sending.cut.count)
        for number in range(sending.sent, last):
            piece, frames = sending.cut.piece(number, epoch)
            posts.append(Post(self._active.backup, Sync(epoch, sending.position, piece), frames))
        sending.sent = max(sending.sent, last)
        if last == sending.cut.count and not sending.all_sent:
            sending.all_sent = True
            posts += [self._replicate(entry) for entry in self._unreported]
        return posts

    def _replicate(self, entry: _Entry) -> Post:
        assert self._active is not None
        assert self._active.backup is not None
        message = Replicate(self._active.epoch, entry.position, entry.at, *entry.due)
        return Post(self._active.backup, message, entry.frames)

    def _repeat(self, now: float) -> list[Post]:
        """Resend what a backup has not reported for a while, because it may have been lost."""
        if self._active is None or self._active.backup is None:
            return []
        quiet_s = now - self._quiet_since
        if self._sending is not None:
            if quiet_s < self._patience_s:
                return []
            # On a slow link pieces are late rather than lost, and repeating them makes it slower.
            self._patience_s *= 2
            self._sending.sent = self._sending.arrived
            return self._send_pieces(self._sending, now)
        if not self._unreported or quiet_s < self.retry_s:
            return []
        self._quiet_since = now
        return [self._replicate(entry) for entry in self._unreported]

    def _handle_report(self, origin: int, message: Replicated, now: float) -> Effects:
        active = self._active
        if active is None or active.backup != origin or message.epoch != active.epoch:
            return Effects()
        sending = self._sending
        if message.position is None:
            if sending is None or message.pieces <= sending.arrived:
                return Effects()
            sending.arrived, self._patience_s = message.pieces, self.retry_s
            sending.sent = max(sending.sent, sending.arrived)
            return Effects(posts=self._send_pieces(sending, now))
        was_in_sync = self.in_sync
        # Reports may overtake each other, and what was held once is held.
        self._reported = max(self._reported or 0, message.position)
        self._quiet_since = now
        while self._unreported and self._unreported[0].position <= self._reported:
            self._unreported.popleft()
        # The first report: the whole state has arrived. Entries that were made while it travelled
        # are committed already, and the backup has yet to report them.
        if self._alone_until is None:
            self._alone_until = self.position
            self._first = (self._reported, self.position)
            self._sending = None
        elif self._reported < self._alone_until:
            # Half as many entries as were reported since, so that the backup catches up even if
            # entries are made faster than it reports them.
            reported, alone = self._first
            further = alone + (self._reported - reported) // 2
            self._alone_until = max(self._alone_until, min(self.position, further))
        return Effects(
            self._release(), [], self.beat() if self.in_sync and not was_in_sync else None
        )

    # --- as a backup ------------------------------------------------------------------------------

    def _handle_copy(
        self, origin: int, message: Sync | Replicate, frames: Sequence[Buffer]
    ) -> Effects:
        accepted = self._accepted
        if accepted is None or message.epoch > accepted.epoch:
            # The coordinator's Assignment has yet to reach this copy; the primary will repeat this.
            return Effects()
        if message.epoch < accepted.epoch or accepted.backup != self.boot:
            return Effects()
        if isinstance(message, Sync):
            if self._holds is None:  # otherwise it is a late repetition
                self._take_piece(message, frames)
        # In order and without a gap; an entry that comes early is ignored, and sent again.
        elif self._holds is not None and message.position == self._holds + 1:
            self._apply(message, frames)
        pieces = self._gathered.gapless_count if self._gathered is not None else 0
        # Also where nothing was applied: the earlier report may have been lost.
        return Effects(posts=[Post(origin, Replicated(message.epoch, self._holds, pieces))])

    def _take_piece(self, message: Sync, frames: Sequence[Buffer]) -> None:
        if self._gathered is None:
            self._gathered = GatheredState(message.epoch)
        with suppress(BadMessage):  # not reported, so it is sent again
            self._gathered.take(message.piece, frames)
        if self._gathered.complete:
            self._take_state(self._gathered.frames())
            self._holds = self.position = message.position
            self._gathered = None

    def _take_state(self, frames: Sequence[Buffer]) -> None:
        first, rest = wire_format.decode_state(frames[0], _Copied), frames[1:]
        # A fresh shard, so that nothing of a former state survives in it.
        self.shard = self._make_shard()
        if first.state:
            self.shard.restore(shard_state.decode(rest[: first.state])[0])
        rest = rest[first.state :]
        self.shard.progress = first.progress
        for count in first.waiting:
            (header, *payload), rest = rest[:count], rest[count:]
            self.shard.park_request(wire_format.decode_request(header), payload, first.at)

    def _apply(self, message: Replicate, frames: Sequence[Buffer]) -> None:
        """Apply the primary's entry to this shard and drop the answers, which the primary gives."""
        if not frames:
            self.shard.expire(message.expired, message.at, message.merges)
        else:
            request = wire_format.decode_request(frames[0])
            if isinstance(request, Registered):
                request = msgspec.structs.replace(request, boot=self.shard.boot)
            # Without an address, so that no answer can leave; at the primary's time, because leases
            # must end here as they do there.
            self.shard.handle(b"", request, frames[1:], message.at)
        self._holds = self.position = message.position
