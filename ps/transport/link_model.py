"""A model of a slow link: computes when bytes that enter it come out at the other end.

Pure: times are passed in, random numbers come from a seed, and nothing is sent. `link_emulator.py`
carries real bytes by it, so that any run can be tested on the link that it will use.

The two directions are independent, as on a full-duplex line. Bytes wait for the line (a token
bucket of small depth), leave at the line's rate, travel for half the round trip and some jitter,
and come out in order. If bytes were waiting, a driver that wakes late does not lower the line's
rate. A lost packet costs its connection one more round trip, in which TCP would have retransmitted
it and held back what follows. In an outage nothing leaves. The bytes that a connection has sent and
that are not yet acknowledged are bounded by its window, as in TCP.
"""

import math
import re
from collections import deque
from enum import StrEnum
from random import Random

import msgspec

from shards import argument_checks
from shards.errors import BadInput

_PACKET_BYTES = 1448  # what a TCP segment carries on Ethernet
_CHUNK_S = 0.005  # the longest that one chunk occupies the line
_QUEUE_S = 0.02  # the longest queue before the line
_BURST_S = 0.002
_LONGEST_S = 3600.0
_LARGEST_CHUNK = 64 << 10
_WINDOW = 64 << 20
_PARETO_SHAPE = 2.5

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BITS = {"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20}


class Jitter(StrEnum):
    """The distribution of the delay: uniform, normal, or with a long tail above the mean."""

    UNIFORM = "uniform"
    NORMAL = "normal"
    PARETO = "pareto"


class LinkModel(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of one link. `rate` is in bytes a second, each way; `loss` a share of packets.

    `jitter_s` is the round trip's standard deviation. An outage lasts `outage_s` and comes every
    `outage_every_s` on average. `window` is the most bytes that a connection may have in flight.
    """

    rtt_s: float = 0.0
    jitter_s: float = 0.0
    shape: Jitter = Jitter.NORMAL
    rate: float = math.inf
    loss: float = 0.0
    outage_s: float = 0.0
    outage_every_s: float = math.inf
    window: int = _WINDOW
    seed: int = 0

    @property
    def chunk(self) -> int:
        """The number of bytes to carry at a time: small enough for a smooth rate."""
        return int(min(max(_PACKET_BYTES, self.rate * _CHUNK_S), _LARGEST_CHUNK))

    @property
    def one_way_s(self) -> float:
        return self.rtt_s / 2


def parse_link(text: str) -> LinkModel:
    """Parse a user's text, such as `rtt=100ms,jitter=10ms,rate=1Gbit,loss=0.1%,outage=2s/60s`.

    Also `shape=normal|uniform|pareto`, `window=4MB` and `seed=7`; an omitted part has no effect.
    `outage=2s/60s` is two seconds about every minute. Raises BadInput naming the invalid part.
    """
    text = argument_checks.text("link", text, "a text such as rtt=100ms,rate=100Mbit")
    names: set[str] = set()
    fields: dict[str, float | int | str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.strip().partition("=")
        if name in names:
            raise BadInput("link", expected=f"{name} once", got="it again")
        names.add(name)
        match name:
            case "rtt" | "jitter":
                fields[f"{name}_s"] = _quantity(part, value, _SECONDS)
            case "rate":
                fields["rate"] = _quantity(part, value, _BITS) / 8
            case "loss":
                fields["loss"] = _quantity(part, value, {"": 1.0, "%": 0.01})
            case "outage":
                length, _, every = value.partition("/")
                fields["outage_s"] = _quantity(part, length, _SECONDS)
                fields["outage_every_s"] = _quantity(part, every, _SECONDS)
            case "window":
                fields["window"] = int(_quantity(part, value, _BYTES))
            case "shape" | "seed":
                fields[name] = value
            case _:
                raise BadInput(
                    "link",
                    expected="rtt, jitter, shape, rate, loss, outage, window or seed",
                    got=f"{part!r}",
                )
    try:
        model = msgspec.convert(fields, LinkModel, strict=False)
    except msgspec.ValidationError as error:
        name = str(error).rpartition("$.")[2].rstrip("`")
        expected = f"one of {', '.join(Jitter)}" if name == "shape" else "a whole number"
        raise BadInput(f"link: {name}", expected=expected, got=f"{fields[name]!r}") from None
    _check(model)
    return model


def link_of(value: object) -> LinkModel | None:
    """The LinkModel for `value`: itself, None, or a text to parse; raises BadInput."""
    if value is None or isinstance(value, LinkModel):
        return value
    return parse_link(
        argument_checks.text("link", value, "a text such as rtt=100ms, or a LinkModel")
    )


def _quantity(part: str, text: str, units: dict[str, float]) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)([A-Za-z%]*)", text)
    if match is None or match[2] not in units:
        known = ", ".join(unit for unit in units if unit)
        raise BadInput("link", expected=f"a number with one of {known}", got=f"{part!r}")
    return float(match[1]) * units[match[2]]


def _check(model: LinkModel) -> None:
    for option, fits, expected in (
        ("rtt", model.rtt_s <= _LONGEST_S, f"at most {_LONGEST_S:g} s"),
        ("jitter", model.jitter_s <= _LONGEST_S, f"at most {_LONGEST_S:g} s"),
        ("seed", 0 <= model.seed < 1 << 63, "0 to 2^63 - 1"),
        ("rate", model.rate > 0, "more than 0 bit/s"),
        ("loss", model.loss < 1, "less than 100 %"),
        ("outage", model.outage_s < model.outage_every_s, "LENGTH/EVERY, EVERY the longer"),
        ("window", model.window >= _LARGEST_CHUNK, f"at least {_LARGEST_CHUNK >> 10} KiB"),
        ("window", model.window <= 1 << 40, "at most 1024 GiB"),
    ):
        if not fits:
            raise BadInput(f"link: {option}", expected=expected)


class Lane:
    """One direction of a link: the line that all connections over it share."""

    def __init__(self, model: LinkModel, seed: str, since: float) -> None:
        """Two lanes with one `seed`, begun at one time, have their outages at the same times."""
        self.model = model
        self._free_at = since
        self._dice = Random(seed)
        self._outage = since, since  # begin and end of the last one drawn

    def room(self, now: float) -> float:
        """The bytes that the queue before the line has room for now."""
        if self.model.rate == math.inf:
            return math.inf
        waiting = max(0.0, self._free_at - now) * self.model.rate
        return max(_QUEUE_S * self.model.rate, 2.0 * self.model.chunk) - waiting

    def room_at(self, size: int, now: float) -> float:
        """When the queue will have room for `size` bytes, if no other connection fills it first."""
        short = size - self.room(now)
        return now + short / self.model.rate if short > 0 else now

    def leave(self, size: int, now: float, waited: bool) -> float:
        """Put `size` bytes on the line; returns when the last of them has left.

        `waited`: the bytes were waiting when the line became free for them.
        """
        earliest = self._free_at if waited else max(self._free_at, now - _BURST_S)
        start = self._after_outage(earliest)
        self._free_at = start + size / self.model.rate
        return max(now, self._free_at)

    def _after_outage(self, at: float) -> float:
        model = self.model
        if model.outage_s == 0 or model.outage_every_s == math.inf:
            return at
        while at >= self._outage[1]:
            gap = self._dice.expovariate(1 / (model.outage_every_s - model.outage_s))
            begins = self._outage[1] + gap
            self._outage = begins, begins + model.outage_s
        return self._outage[1] if at >= self._outage[0] else at


class LinkStream:
    """One direction of one connection: its window, and the order in which its bytes come out."""

    def __init__(self, lane: Lane, seed: str) -> None:
        self._lane = lane
        self._model = lane.model
        self._dice = Random(seed)
        self._last = -math.inf
        self._unacknowledged: deque[tuple[float, int]] = deque()
        self._flying = 0

    def may_enter(self, size: int, now: float) -> bool:
        """Return whether window and queue have room for `size` bytes."""
        return self._in_window(size, now) and self._lane.room(now) >= size

    def must_queue(self, size: int, now: float) -> bool:
        """Return whether `size` bytes fit into the window, and only the line has no room."""
        return self._in_window(size, now) and self._lane.room(now) < size

    def _in_window(self, size: int, now: float) -> bool:
        while self._unacknowledged and self._unacknowledged[0][0] <= now:
            self._flying -= self._unacknowledged.popleft()[1]
        return self._flying + size <= self._model.window

    def enter_at(self, size: int, now: float) -> float:
        """When to ask `may_enter` again, after it was False."""
        at = self._lane.room_at(size, now)
        if self._flying + size > self._model.window:
            at = max(at, self._unacknowledged[0][0])
        return at

    def enter(self, size: int, now: float, *, waited: bool = False) -> float:
        """Send `size` bytes; returns when the last of them comes out. `waited` is as in `leave`."""
        left_at = self._lane.leave(size, now, waited)
        arrives = left_at + self._delay_s() + self._retransmission_s(size)
        self._last = max(self._last, arrives)
        self._unacknowledged.append((self._last + self._model.one_way_s, size))
        self._flying += size
        return self._last

    def _delay_s(self) -> float:
        model = self._model
        if model.jitter_s == 0:
            return model.one_way_s
        sigma = model.jitter_s / math.sqrt(2)  # a round trip is the sum of two independent delays
        match model.shape:
            case Jitter.UNIFORM:
                scatter = self._dice.uniform(-1, 1) * math.sqrt(3)
            case Jitter.NORMAL:
                scatter = self._dice.gauss()
            case Jitter.PARETO:
                a = _PARETO_SHAPE
                mean, deviation = a / (a - 1), math.sqrt(a / (a - 2)) / (a - 1)
                scatter = (self._dice.paretovariate(a) - mean) / deviation
        return max(0.0, model.one_way_s + sigma * scatter)

    def _retransmission_s(self, size: int) -> float:
        model = self._model
        if model.loss == 0:
            return 0.0
        arrived_whole = (1 - model.loss) ** math.ceil(size / _PACKET_BYTES)
        return model.rtt_s if self._dice.random() > arrived_whole else 0.0
