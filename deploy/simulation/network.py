"""The simulated links, which deliver messages, and delay, lose or mangle them under faults.

The ends of a link are names of processes. The network keeps a list of its present faults, the
*spells*, and decides the delivery of a message when it is sent. Headers travel as bytes. Frames
travel as the arrays themselves, as with ZeroMQ, plus a copy to compare with on arrival.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

import msgspec

from deploy.simulation.clock import Action, Clock
from deploy.simulation.invariants import Counted, Promise, Violation
from shards.wire_format import Buffer

LEAST_S = 0.005  # the shortest time that a message takes

Deliver = Callable[[bytes, Sequence[Any]], None]


class FaultKind(StrEnum):
    """The effect of a fault on a message: lost, doubled, delayed, cut short, or held back."""

    LOST = "lost"
    DOUBLED = "doubled"
    SLOW = "slow"
    MANGLED = "mangled"
    HELD = "held"


class LinkFault(msgspec.Struct, frozen=True):
    """A fault of the messages between `a` and `b` (None: any process), until the time `end`.

    It affects a random `share` of them. SLOW adds up to `slow_s` seconds. `one_way` spares the
    messages from `b` to `a`.
    """

    ill: FaultKind
    end: float
    a: str | None = None
    b: str | None = None
    one_way: bool = False
    share: float = 1.0
    slow_s: float = 0.0

    def meets(self, sender: str, to: str) -> bool:
        """Whether the fault affects messages in this direction."""
        a, b = self.a, self.b
        if (a is None or a == sender) and (b is None or b == to):
            return True
        return not self.one_way and (a is None or a == to) and (b is None or b == sender)


class Delivery(NamedTuple):
    """The delay in seconds of each copy of a message, and whether the message is mangled."""

    delays_s: tuple[float, ...]
    mangled: bool


class Network:
    """All links; `delay_s` is the longest time that a message takes without faults."""

    def __init__(self, clock: Clock, delay_s: float, counted: Counted) -> None:
        self.spells: list[LinkFault] = []
        self._next_end = inf
        self.quiet_since = 0.0  # when the last of all spells has ended, or will end
        self._clock, self._delay_s, self._counted = clock, delay_s, counted
        self._near_s = min(delay_s, 0.05)

    def suffer(self, spell: LinkFault) -> None:
        """Start a spell."""
        self.spells.append(spell)
        self.quiet_since = max(self.quiet_since, spell.end + spell.slow_s)
        self._next_end = min(self._next_end, spell.end)

    def touched(self, name: str) -> bool:
        """Whether a spell cuts or holds the links of a process."""
        self._forget_the_past()
        return any(
            spell.ill in {FaultKind.HELD, FaultKind.LOST}
            and spell.share == 1.0
            and name in {spell.a, spell.b}
            for spell in self.spells
        )

    @property
    def disturbed(self) -> bool:
        """Whether any link has a spell."""
        self._forget_the_past()
        return bool(self.spells)

    def carry(
        self, sender: str, to: str, header: bytes, frames: Sequence[Any], deliver: Deliver
    ) -> None:
        """Send a message between a worker and a shard."""
        fate = self._fate(sender, to, self._delay_s)
        copies = [bytes(frame) for frame in frames] if frames else ()
        for delay_s in fate.delays_s:
            if fate.mangled:
                self._clock.after(delay_s, deliver, *self._cut_short(header, copies))
            else:
                self._clock.after(delay_s, self._arrive, header, frames, copies, deliver)

    def post(
        self, sender: str, to: str, action: Action, *arguments: Any, size_s: float = 0.0
    ) -> None:
        """Send a message among copies and coordinator, which are close to each other.

        A large message takes `size_s` seconds longer.
        """
        fate = self._fate(sender, to, self._near_s)
        for delay_s in fate.delays_s:
            self._clock.after(delay_s + size_s, action, *arguments)

    def _arrive(
        self, header: bytes, frames: Sequence[Any], copies: Sequence[bytes], deliver: Deliver
    ) -> None:
        for frame, copy in zip(frames, copies, strict=True):
            if bytes(frame) != copy:
                raise Violation(Promise.UNTORN, "a frame changed on its way")
        self._counted.delivered += 1
        deliver(header, frames)

    def _fate(self, sender: str, to: str, longest_s: float) -> Delivery:
        luck = self._clock.random.random
        delay_s = LEAST_S + luck() * longest_s
        if not self.spells:
            return Delivery((delay_s,), False)
        self._forget_the_past()
        doubled = mangled = False
        for spell in self.spells:
            if not spell.meets(sender, to) or (spell.share < 1.0 and luck() >= spell.share):
                continue
            match spell.ill:
                case FaultKind.LOST:
                    self._counted.lost += 1
                    return Delivery((), False)
                case FaultKind.DOUBLED:
                    doubled = True
                case FaultKind.SLOW:
                    delay_s += luck() * spell.slow_s
                case FaultKind.MANGLED:
                    mangled = True
                case FaultKind.HELD:
                    delay_s = max(delay_s, spell.end - self._clock.now + LEAST_S)
        if not doubled:
            return Delivery((delay_s,), mangled)
        self._counted.doubled += 1
        return Delivery((delay_s, delay_s + LEAST_S + luck() * longest_s), mangled)

    def _forget_the_past(self) -> None:
        now = self._clock.now
        if now >= self._next_end:
            self.spells = [spell for spell in self.spells if spell.end > now]
            self._next_end = min((spell.end for spell in self.spells), default=inf)

    def _cut_short(self, header: bytes, frames: Sequence[bytes]) -> tuple[bytes, list[Buffer]]:
        """Replace a message by noise or by a part of it.

        Flipped bits that still form a valid message are left out: TCP's checksum detects them, not
        this protocol.
        """
        self._counted.mangled += 1
        random = self._clock.random
        if frames and random.random() < 0.5:
            cut = random.randrange(len(frames))
            kept: list[Buffer] = list(frames)
            kept[cut] = frames[cut][: random.choice((4, 8, len(frames[cut]) - 4))]
            return header, kept
        if random.random() < 0.5:
            return random.randbytes(random.randrange(1, 40)), list(frames)
        return header[: random.randrange(len(header))], list(frames)
