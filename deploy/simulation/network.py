"""The simulated links, which deliver messages, and delay, lose or mangle them under faults.

The ends of a link are names of processes. The network keeps a list of its present faults, and
decides the delivery of a message when it is sent. Headers travel as bytes. Frames travel as the
arrays themselves, as with ZeroMQ, plus a copy to compare with on arrival.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from math import inf
from typing import Any, NamedTuple

import msgspec

from deploy.simulation.invariants import Counted, Promise, Violation
from deploy.virtual_clock import Action, Clock
from shards.wire_format import Buffer

MIN_S = 0.005  # the shortest time that a message takes

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

    kind: FaultKind
    end: float
    a: str | None = None
    b: str | None = None
    one_way: bool = False
    share: float = 1.0
    slow_s: float = 0.0

    def affects(self, sender: str, to: str) -> bool:
        """Return whether the fault affects messages in this direction."""
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
        self.faults: list[LinkFault] = []
        self._next_end = inf
        self.quiet_since = 0.0  # when the last of all faults has ended, or will end
        self._clock, self._delay_s, self._counted = clock, delay_s, counted
        self._near_s = min(delay_s, 0.05)

    def begin(self, fault: LinkFault) -> None:
        """Start a fault."""
        self.faults.append(fault)
        self.quiet_since = max(self.quiet_since, fault.end + fault.slow_s)
        self._next_end = min(self._next_end, fault.end)

    def is_cut_off(self, name: str) -> bool:
        """Return whether a fault cuts or holds the links of a process."""
        self._drop_ended()
        return any(
            fault.kind in {FaultKind.HELD, FaultKind.LOST}
            and fault.share == 1.0
            and name in {fault.a, fault.b}
            for fault in self.faults
        )

    @property
    def has_faults(self) -> bool:
        """True if any link has a fault."""
        self._drop_ended()
        return bool(self.faults)

    def carry(
        self, sender: str, to: str, header: bytes, frames: Sequence[Any], deliver: Deliver
    ) -> None:
        """Send a message between a worker and a shard."""
        delivery = self._delivery(sender, to, self._delay_s)
        copies = [bytes(frame) for frame in frames] if frames else ()
        for delay_s in delivery.delays_s:
            if delivery.mangled:
                self._clock.after(delay_s, deliver, *self._cut_short(header, copies))
            else:
                self._clock.after(delay_s, self._arrive, header, frames, copies, deliver)

    def post(
        self, sender: str, to: str, action: Action, *arguments: Any, size_s: float = 0.0
    ) -> None:
        """Send a message among copies and coordinator, which are close to each other.

        A large message takes `size_s` seconds longer.
        """
        delivery = self._delivery(sender, to, self._near_s)
        for delay_s in delivery.delays_s:
            self._clock.after(delay_s + size_s, action, *arguments)

    def _arrive(
        self, header: bytes, frames: Sequence[Any], copies: Sequence[bytes], deliver: Deliver
    ) -> None:
        for frame, copy in zip(frames, copies, strict=True):
            if bytes(frame) != copy:
                raise Violation(Promise.UNTORN, "a frame changed on its way")
        self._counted.delivered += 1
        deliver(header, frames)

    def _delivery(self, sender: str, to: str, longest_s: float) -> Delivery:
        chance = self._clock.random.random
        delay_s = MIN_S + chance() * longest_s
        if not self.faults:
            return Delivery((delay_s,), False)
        self._drop_ended()
        doubled = mangled = False
        for fault in self.faults:
            if not fault.affects(sender, to) or (fault.share < 1.0 and chance() >= fault.share):
                continue
            match fault.kind:
                case FaultKind.LOST:
                    self._counted.lost += 1
                    return Delivery((), False)
                case FaultKind.DOUBLED:
                    doubled = True
                case FaultKind.SLOW:
                    delay_s += chance() * fault.slow_s
                case FaultKind.MANGLED:
                    mangled = True
                case FaultKind.HELD:
                    delay_s = max(delay_s, fault.end - self._clock.now + MIN_S)
        if not doubled:
            return Delivery((delay_s,), mangled)
        self._counted.doubled += 1
        return Delivery((delay_s, delay_s + MIN_S + chance() * longest_s), mangled)

    def _drop_ended(self) -> None:
        now = self._clock.now
        if now >= self._next_end:
            self.faults = [fault for fault in self.faults if fault.end > now]
            self._next_end = min((fault.end for fault in self.faults), default=inf)

    def _cut_short(self, header: bytes, frames: Sequence[bytes]) -> tuple[bytes, list[Buffer]]:
        """Replace a message by noise or by a part of it.

        Flipped bits that still form a valid message are left out: TCP's checksum detects them, not
        this protocol.
        """
        self._counted.mangled += 1
        random = self._clock.random
        if frames and random.random() < 0.5:
            cut = random.randrange(len(frames))
            parts: list[Buffer] = list(frames)
            parts[cut] = frames[cut][: random.choice((4, 8, len(frames[cut]) - 4))]
            return header, parts
        if random.random() < 0.5:
            return random.randbytes(random.randrange(1, 40)), list(frames)
        return header[: random.randrange(len(header))], list(frames)
