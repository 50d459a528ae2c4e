"""The retransmission table: the messages that a session has sent and no shard has answered.

Theory. A message is sent again until it is answered; the shards recognise repetitions. The wait for
an answer follows the link: first `retry_s`, or twice the duration of the last push; then twice as
long each time, up to eightfold, because on a slow link the first copy may still be in flight.
Silence is measured per shard, not per message: it begins when the shard is asked something while it
owes nothing, ends with any message from it, and does not count while the driver was away.

A copy that has just taken over may not serve yet, and a link that is new may lose what was sent
before it was open. For some seconds (`hurry`) waits for its answers are therefore short: greetings,
which are small, are repeated every `HURRIED_S`; the first repetition of anything else comes after
as long, or after twice a push's duration where that is known to be longer.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator

import msgspec

from ps.session.events import Frames, NotReady, Send, Unreachable
from shards.messages import FromWorker, Hello, Join, Push, Registered

_TRIES = 3  # at least, before patience ends
_LONGEST = 8  # times the first wait: the longest interval between repetitions
HURRIED_S = 0.1
_TAKING_OVER_S = 2.0  # how long answers of a copy that has taken over are waited for briefly


class UnansweredMessage(msgspec.Struct):
    """One unanswered message to one shard; `asked` is the request that it belongs to.

    `repeated`: more than one copy of it may have been sent. Times are in seconds.
    """

    message: FromWorker
    frames: Frames
    asked: int
    resend_at: float
    wait_s: float
    repeated: bool = False


class RetransmitTable:
    """The messages of one session. All times are the driver's, in seconds.

    `next_deadline` is when to ask which messages are `due`; None while nothing is outstanding. No
    message is due earlier. The deadline may be too early, because an answer does not postpone it:
    finding the next one takes a scan of all messages. `first_s` is the wait for a first answer.
    """

    def __init__(self, worker: str, retry_s: float, patience_s: float) -> None:
        self.retry_s = min(retry_s, patience_s / _TRIES)
        self.patience_s = patience_s
        self.next_deadline: float | None = None
        self.rtt_s = 0.0
        self.first_s = self.retry_s
        self._worker = worker
        self._number = 0
        self._pending: defaultdict[int, dict[int, UnansweredMessage]] = defaultdict(dict)
        self._heard: dict[int, float] = {}
        self._put_off: dict[int, tuple[float, str]] = {}  # since when, and why
        self._hurried: dict[int, float] = {}  # shards whose copy has just taken over: until when

    def count(self) -> int:
        """A number for the next request."""
        self._number += 1
        return self._number

    def add(self, shard: int, asked: int, message: FromWorker, frames: Frames, now: float) -> Send:
        """Record a message that is sent now, or as soon as the shard accepts it."""
        owed, wait_s = self._pending[shard], self.first_s
        if self._hurried:
            wait_s = self._limit_wait_s(shard, message, wait_s, now)
        if not owed:
            self._heard[shard] = now  # nothing was outstanding, so its silence begins here
        resend_at = now + wait_s
        owed[message.request] = UnansweredMessage(message, frames, asked, resend_at, wait_s)
        if self.next_deadline is None or resend_at < self.next_deadline:  # as `_schedule`
            self.next_deadline = resend_at
        return Send(shard, message, frames)

    def record_answer(self, shard: int, request: int, now: float) -> UnansweredMessage | None:
        """`shard` has sent something; returns the message that it answers, if that is still
        unanswered.
        """
        self._heard[shard] = now
        # Any message is a sign of life, even one that answers nothing.
        return self._pending[shard].get(request)

    def put_off(self, shard: int, why: str, now: float) -> None:
        """`shard` has answered a greeting, but cannot register the worker at present."""
        # The time of the first deferral: patience is counted from there.
        self._put_off.setdefault(shard, (now, why))

    def end_deferral(self, shard: int) -> None:
        """`shard` can register the worker, or another copy of the shard has become its primary."""
        self._put_off.pop(shard, None)

    def remove(self, shard: int, request: int) -> None:
        """Message `request` to `shard` has been answered."""
        owed = self._pending[shard]
        del owed[request]
        if not owed and not any(self._pending.values()):
            self.next_deadline = None

    def to(self, shard: int) -> list[UnansweredMessage]:
        """The messages that `shard` has not answered, in the order asked."""
        return list(self._pending[shard].values())

    def __len__(self) -> int:
        return sum(map(len, self._pending.values()))

    def __iter__(self) -> Iterator[tuple[int, UnansweredMessage]]:
        """Each shard and message, every shard's in the order asked.

        Messages that are added or removed during the iteration do not affect it.
        """
        return iter(
            [(to, pending) for to, owed in self._pending.items() for pending in owed.values()]
        )

    def empty(self, pending: UnansweredMessage, now: float) -> None:
        """A push that its shard refuses to apply: from now on it has no parts, and is `due`."""
        assert isinstance(pending.message, Push), "only a push carries values"
        # Emptied instead of dropped: the shard must count the number, or the next push would be a
        # gap.
        pending.message = msgspec.structs.replace(pending.message, parts=[])
        pending.frames = ()
        pending.resend_at = self.next_deadline = now

    # --- sending again ----------------------------------------------------------------------------

    def due(self, now: float, may_send: Callable[[int, FromWorker], bool]) -> list[Send]:
        """The messages to send again because they have waited long enough.

        Raises Unreachable when a shard stays silent, NotReady when it defers the worker for as
        long. A message that may not be sent yet is rescheduled all the same.
        """
        if self.next_deadline is None or self.next_deadline > now:
            return []
        deadline = self._reschedule()
        if deadline is None or deadline > now:
            return []
        if now - deadline > self.retry_s:
            # The driver was away, computing or stopped: that time does not count as silence.
            away_s = now - deadline
            self._heard = {shard: min(now, at + away_s) for shard, at in self._heard.items()}
            self._put_off = {
                shard: (min(now, at + away_s), why) for shard, (at, why) in self._put_off.items()
            }
        self._check_put_off(now)
        sends = []
        for shard, pending in self:
            if pending.resend_at > now:
                continue
            self._check_patience(shard, pending, now)
            wait_s = min(2 * pending.wait_s, self._longest_s)
            if isinstance(pending.message, Hello | Join):
                wait_s = self._limit_wait_s(shard, pending.message, wait_s, now)
            self._schedule(pending, wait_s, now)
            pending.repeated = True
            if may_send(shard, pending.message):
                sends.append(Send(shard, pending.message, pending.frames))
        self._reschedule()
        return sends

    def repeat_pushes(self, shard: int, since: int, now: float) -> list[Send]:
        """Send the pushes to `shard` from number `since` again."""
        return [
            self._again(shard, pending, now)
            for pending in self.to(shard)
            if isinstance(pending.message, Push) and pending.message.seq >= since
        ]

    def again(self, shard: int, now: float) -> list[Send]:
        """Send everything to `shard` again, in the order asked."""
        return [self._again(shard, pending, now) for pending in self.to(shard)]

    def readdress(self, shard: int, boot: int, now: float) -> list[Send]:
        """Send everything to `shard` again, addressed to its incarnation `boot`, in the order
        asked.
        """
        sends = []
        for pending in self.to(shard):
            if isinstance(pending.message, Registered):
                pending.message = msgspec.structs.replace(pending.message, boot=boot)
            sends.append(self._again(shard, pending, now))
        return sends

    def drop_greetings(self, shard: int) -> None:
        """Drop the greetings of `shard`, because another one replaces them."""
        owed = self._pending[shard]
        # A list, because entries are deleted in the loop.
        for request, pending in list(owed.items()):
            if isinstance(pending.message, Hello | Join):
                del owed[request]

    def hurry(self, shard: int, now: float) -> None:
        """Another copy of `shard` has taken over: wait for its answers only briefly for a while."""
        self._hurried[shard] = now + _TAKING_OVER_S

    def expect(self, rtt_s: float) -> None:
        """Adapt the wait for first answers to a link on which a push takes `rtt_s` seconds."""
        self.rtt_s = rtt_s
        self.first_s = min(max(self.retry_s, 2 * rtt_s), self.patience_s / _TRIES)

    @property
    def _longest_s(self) -> float:
        """The longest wait for any later answer, in seconds."""
        return min(_LONGEST * self.first_s, self.patience_s / _TRIES)

    def _again(self, shard: int, pending: UnansweredMessage, now: float) -> Send:
        pending.repeated = True
        wait_s = self._limit_wait_s(shard, pending.message, self.first_s, now)
        self._schedule(pending, wait_s, now)
        return Send(shard, pending.message, pending.frames)

    def _limit_wait_s(self, shard: int, message: FromWorker, wait_s: float, now: float) -> float:
        """`wait_s`, or less if a copy of `shard` has just taken over."""
        until = self._hurried.get(shard)
        if until is None:
            return wait_s
        if now >= until:
            del self._hurried[shard]
            return wait_s
        greets = isinstance(message, Hello | Join)
        # Where no push was timed, copies of a large one could fill a slow link.
        brief_s = HURRIED_S if greets else max(HURRIED_S, 2 * (self.rtt_s or wait_s))
        return min(wait_s, brief_s)

    def _schedule(self, pending: UnansweredMessage, wait_s: float, now: float) -> None:
        """Make a message `due` after `wait_s`."""
        pending.wait_s, pending.resend_at = wait_s, now + wait_s
        if self.next_deadline is None or pending.resend_at < self.next_deadline:
            self.next_deadline = pending.resend_at

    def _reschedule(self) -> float | None:
        """Find the next deadline in a scan of all messages."""
        self.next_deadline = min((pending.resend_at for _, pending in self), default=None)
        return self.next_deadline

    def _check_put_off(self, now: float) -> None:
        if any(now - since > self.patience_s for since, _ in self._put_off.values()):
            shards = sorted(self._put_off)
            names = f"shard{'s' * (len(shards) > 1)} {', '.join(map(str, shards))}"
            error = NotReady(
                f"worker {self._worker} has waited {self.patience_s:g} s for {names}:"
                f" {self._put_off[shards[0]][1]}"
            )
            error.shard = shards[0]
            raise error

    def _check_patience(self, shard: int, pending: UnansweredMessage, now: float) -> None:
        if now - self._heard[shard] > self.patience_s:
            kind = type(pending.message).__name__.lower()
            raise Unreachable(
                f"shard {shard} has not answered {self._worker}'s {kind} for {self.patience_s:g} s",
                shard,
            )
