"""What goes wrong, when and for how long: a function of a seed, and of nothing else.

A run is a sequence of rounds. In a round faults begin together, each lasts its time and heals, and
the round ends when every worker that it touched has been acknowledged again. So each wait has one
cause, and a seed says the whole sequence: kinds, targets, lengths, pauses. How long the waits take
is the machine's affair.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import NamedTuple


class Kind(StrEnum):
    """A kind of fault, by the name that reports have."""

    KILL_WORKER = "kill -9 of a worker"
    ABSENCE = "kill -9 and absence of a worker"
    KILL_SHARD = "kill -9 of a shard"
    KILL_BACKUP = "kill -9 of a backup"
    KILL_COORDINATOR = "kill -9 of the coordinator"
    LEAVE = "leave and join of a worker"
    FORK = "fork of a process with a job"
    STOP_WORKER = "SIGSTOP of a worker"
    STOP_SHARD = "SIGSTOP of a shard"
    LINK_DOWN = "link down"
    BLACKHOLE = "blackhole route"
    LOSS_ONE_WAY = "packets lost one way"
    LOSS = "packets lost both ways"
    FULL_DISK = "full disk under a snapshot"
    SLOW_READERS = "readers that do not read"
    FUZZ = "garbage from a stranger"
    DESCRIPTORS = "no descriptors left"
    MOVE = "move to other shards"


LINK_KINDS = (Kind.LINK_DOWN, Kind.BLACKHOLE, Kind.LOSS_ONE_WAY, Kind.LOSS)

KILLS = (
    Kind.KILL_WORKER,
    Kind.ABSENCE,
    Kind.KILL_SHARD,
    Kind.KILL_BACKUP,
    Kind.KILL_COORDINATOR,
)

SUDDEN = (*KILLS, Kind.LEAVE, Kind.FORK, Kind.MOVE)
"""They happen in a moment; the others last."""


class Fault(NamedTuple):
    """One fault: what happens to whom, `after_s` into its round, for `for_s` (0: it is sudden)."""

    kind: Kind
    target: str
    after_s: float = 0.0
    for_s: float = 0.0

    def __str__(self) -> str:
        length = f" for {self.for_s:.2f} s" if self.for_s else ""
        return f"{self.kind} ({self.target}){length}"


class Round(NamedTuple):
    """Faults that begin together, `pause_s` after everyone was acknowledged."""

    pause_s: float
    faults: tuple[Fault, ...]


class Mix(NamedTuple):
    """What may be drawn: how often each kind, whom it may meet, and how long it may last.

    `targets[kind]` are names; a kind without any is not drawn. `together` is how many shards may
    die in one round. With `tour` the first rounds are one of each kind that has targets.
    """

    weights: Mapping[Kind, float]
    targets: Mapping[Kind, Sequence[str]]
    shortest_s: float
    longest_s: float
    together: int = 1
    tour: bool = False


def rounds(seed: int, mix: Mix) -> Iterator[Round]:
    """The rounds of `seed`, without end.

    Lengths are drawn evenly on a scale of magnitudes: as many from 0.2 to 0.6 s as from 3 to 10 s.
    """
    dice = random.Random(seed)
    if mix.tour:
        every = [kind for kind in Kind if mix.targets.get(kind)]
        for kind in dice.sample(every, len(every)):
            yield Round(dice.uniform(0.0, 0.05), tuple(_faults(dice, kind, mix)))
    kinds = [kind for kind in mix.weights if mix.targets.get(kind)]
    weights = [mix.weights[kind] for kind in kinds]
    while True:
        (kind,) = dice.choices(kinds, weights)
        yield Round(dice.uniform(0.0, 0.05), tuple(_faults(dice, kind, mix)))


def _faults(dice: random.Random, kind: Kind, mix: Mix) -> Iterator[Fault]:
    match kind:
        case Kind.KILL_WORKER:
            most = len(mix.targets[kind])
        case Kind.KILL_SHARD:
            most = min(mix.together, len(mix.targets[kind]))
        case _:
            most = 1
    for target in dice.sample(list(mix.targets[kind]), dice.randint(1, most)):
        lasts = kind not in SUDDEN
        for_s = mix.shortest_s * (mix.longest_s / mix.shortest_s) ** dice.random() if lasts else 0.0
        yield Fault(kind, target, dice.uniform(0.0, 0.03), for_s)
