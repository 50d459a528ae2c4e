"""Real sessions and real shards on a virtual clock, with a network between them that misbehaves.

One heap of events and one seeded generator: messages are lost, doubled and overtake each other;
lives are killed, or frozen like a stopped process, and replaced by a higher incarnation while the
old one may linger on; a worker and a shard stop hearing each other; a shard comes back from its
exported state. After `quiet_s` nothing more goes wrong, and everyone must come to an end.

Worker i pushes, as its n-th push, SCALE at float 2i of every shard and SCALE * n beside it, at rate
1 under plain SGD. Both sums are exact in float32, so any weights show how many pushes of which
worker they hold, and a push that is lost, doubled or torn shows in them. Headers travel as bytes;
frames as the arrays themselves, as ZeroMQ sends them, with a copy to compare with on arrival.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from itertools import count

import msgspec
import numpy as np

from ps.compression import Compression
from ps.events import Send
from shards import codec
from shards.rules import SGD, Decay
from shards.schedules import Fixed
from shards.shard import Outgoing
from shards.spec import Merge, ShardSpec
from shards.tables import DenseTable, TensorSpec, cut_evenly
from tests.ps.parties import BLOCK, BUILD, HORIZON_S, JOB, SCALE, Array, Host, Life


class Setting(msgspec.Struct, frozen=True, kw_only=True):
    """What is run and what goes wrong: `drop` and `duplicate` are shares, the rest are numbers.

    For `busy_s` a shard lets messages gather, and then takes them together.
    """

    shards: int = 2
    workers: int = 3
    bound: int | None = 1
    steps: int = 12
    in_flight: int = 2
    prefetch: bool = False
    merge: Merge = Merge.EACH
    warm_steps: int = 0
    lease_s: float = 10.0
    drop: float = 0.1
    duplicate: float = 0.1
    delay_s: float = 0.3
    busy_s: float = 0.0
    kills: int = 0
    freezes: int = 0
    cuts: int = 0
    restarts: int = 0
    quiet_s: float = 60.0
    compression: Compression | None = None


def swarm(seed: int) -> Setting:
    """A setting drawn from the seed: each run leaves out some of what can go wrong."""
    draw = random.Random(seed)
    rounds = draw.random() < 0.4
    bound = 0 if rounds else draw.choice([0, 1, 2, 4, None])
    return Setting(
        shards=draw.randint(1, 3),
        workers=draw.randint(1, 4),
        bound=bound,
        steps=draw.choice([5, 10, 20]),
        in_flight=draw.randint(1, 3),
        prefetch=bound != 0 and draw.random() < 0.5,
        merge=Merge.ROUND if rounds else Merge.EACH,
        warm_steps=draw.choice([0, 0, 6, 30]),
        lease_s=draw.choice([3.0, 10.0]),
        drop=draw.choice([0.0, 0.1, 0.3]),
        duplicate=draw.choice([0.0, 0.1, 0.3]),
        delay_s=draw.choice([0.05, 0.3, 1.0]),
        kills=draw.choice([0, 0, 3]),
        freezes=draw.choice([0, 0, 3]),
        cuts=draw.choice([0, 0, 3]),
        restarts=draw.choice([0, 0, 3]),
        busy_s=draw.choice([0.0, 0.0, 0.5]),
    )


class Network:
    """One run: `run` plays it to the end and checks the sums."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.setting = setting
        self.random = random.Random(seed)
        self.now = 0.0
        self.delivered = 0
        # Until somebody is lost, clocks count exactly the pushes applied.
        self.calm = setting.merge is Merge.EACH and setting.compression is None
        self.table = DenseTable("sim", (TensorSpec("w", (BLOCK * setting.shards,)),))
        self.map = cut_evenly(self.table, setting.shards)
        self._heap: list[tuple[float, int, Life | None, Callable[[], None]]] = []
        self._order = count()
        self._cut_until: dict[tuple[int, int], float] = {}
        self.hosts = [self.make_host(shard) for shard in range(setting.shards)]
        self.lives: dict[int, Life] = {}
        self._addresses: dict[bytes, Life] = {}
        for number in range(setting.workers):
            self._live(number, 0, self.random.uniform(0, 5))

    def make_host(self, shard: int) -> Host:
        return Host(self, shard)

    def spec(self, shard: int) -> ShardSpec:
        return ShardSpec(
            job=JOB,
            shard=shard,
            table=self.table,
            map=self.map,
            rule=SGD(),
            schedule=Fixed(base_rate=1.0),
            decay=Decay(),
            bound=self.setting.bound,
            workers=self.setting.workers,
            build=BUILD,
            merge=self.setting.merge,
            lease_s=self.setting.lease_s,
            warm_steps=self.setting.warm_steps,
        )

    def gradient(self, number: int, seq: int) -> Array:
        gradient = self.table.empty()
        for shard in range(self.setting.shards):
            gradient[BLOCK * shard + 2 * number] = SCALE
            gradient[BLOCK * shard + 2 * number + 1] = SCALE * seq
        return gradient

    # --- time -------------------------------------------------------------------------------------

    def after(self, delay_s: float, life: Life | None, action: Callable[[], None]) -> None:
        """Do it later, unless `life` has died by then; a frozen one does it when it thaws."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), life, action))

    def every(self, period_s: float, life: Life | None, action: Callable[[], None]) -> None:
        def again() -> None:
            action()
            self.after(period_s, life, again)

        self.after(period_s, life, again)

    def run(self) -> "Network":
        """Play until every worker is done; fail if they are not within the horizon."""
        self.tick_hosts()
        for accident, times in (
            (self._kill, self.setting.kills),
            (self._freeze, self.setting.freezes),
            (self._cut, self.setting.cuts),
            (self._restart, self.setting.restarts),
        ):
            for _ in range(times):
                self.after(self.random.uniform(1, self.setting.quiet_s), None, accident)
        while not all(life.departed for life in self.lives.values()):
            self.now, _, life, action = heapq.heappop(self._heap)
            assert self.now < HORIZON_S, f"stuck: {self.lives}"
            if life is not None and life.frozen_until > self.now:
                self.after(life.frozen_until - self.now, life, action)
            elif life is None or life.alive:
                action()
        for host in self.hosts:
            host.check_sums()
        return self

    def tick_hosts(self) -> None:
        for host in self.hosts:
            self.every(self.setting.lease_s / 4, None, host.tick)

    # --- the network ------------------------------------------------------------------------------

    def send(self, life: Life, sends: Sequence[Send]) -> None:
        for send in sends:
            header, frames, host = codec.encode(send.message), send.frames, self.hosts[send.shard]

            def deliver(
                host: Host = host, header: bytes = header, frames: Sequence[Array] = frames
            ) -> None:
                host.handle(life.address, header, frames)

            self._carry((life.number, send.shard), None, frames, deliver)

    def answer(self, shard: int, outgoing: Outgoing) -> None:
        life = self._addresses[outgoing.to]
        header = codec.encode(outgoing.message)
        frames = [frame for frame in outgoing.frames if isinstance(frame, np.ndarray)]
        self._carry((life.number, shard), life, frames, lambda: life.receive(shard, header, frames))

    def _carry(
        self,
        link: tuple[int, int],
        to: Life | None,
        frames: Sequence[Array],
        deliver: Callable[[], None],
    ) -> None:
        copies = [frame.copy() for frame in frames]

        def arrive() -> None:
            if self._cut_until.get(link, 0.0) <= self.now:
                for frame, copy in zip(frames, copies, strict=True):
                    assert np.array_equal(frame, copy), "changed on its way"
                self.delivered += 1
                deliver()

        luck = 1.0 if self.now > self.setting.quiet_s else self.random.random()
        times = (
            0
            if luck < self.setting.drop
            else 1 + (luck < self.setting.drop + self.setting.duplicate)
        )
        for _ in range(times):
            self.after(self.random.uniform(0.01, self.setting.delay_s), to, arrive)

    # --- accidents --------------------------------------------------------------------------------

    def _live(self, number: int, incarnation: int, delay_s: float) -> None:
        life = Life(self, number, incarnation)
        self.lives[number] = self._addresses[life.address] = life
        self.after(delay_s, life, life.begin)

    def _kill(self) -> None:
        """End a life, or leave it as a zombie, and start the next one."""
        number, life = self.random.choice(sorted(self.lives.items()))
        life.alive = self.random.random() < 0.3
        self.calm = False
        self._live(number, life.incarnation + 1, self.random.uniform(0, 2 * self.setting.lease_s))

    def _freeze(self) -> None:
        life = self.random.choice(sorted(self.lives.items()))[1]
        life.frozen_until = self.now + self.random.uniform(0, 3 * self.setting.lease_s)

    def _cut(self) -> None:
        link = self.random.randrange(self.setting.workers), self.random.randrange(len(self.hosts))
        self._cut_until[link] = self.now + self.random.uniform(0, 1.5 * self.setting.lease_s)

    def _restart(self) -> None:
        self.calm = False
        self.random.choice(self.hosts).restart()
