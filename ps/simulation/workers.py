"""A life of a worker: a real session, driven as the blocking client drives it, without blocking."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ps.protocol import moving
from ps.protocol.events import Departed, Event, Pulled, Pushed, Ready, Relocated, RolledBack, Send
from ps.protocol.session import Session
from ps.simulation import invariants
from ps.simulation.addresses import generation_of
from ps.simulation.clock import Party
from ps.simulation.invariants import Promise, Violation
from ps.simulation.leases import renewal_s
from ps.simulation.reads import Due
from shards import codec
from shards.errors import BadMessage, DownpourError
from shards.messages import Joined, Renew

if TYPE_CHECKING:
    from ps.simulation.hosts import Host
    from ps.simulation.world import World

PUMP_S = 0.3
PATIENCE_S = 60.0


class Life(Party):
    """One incarnation: pull, compute, push, until its plan is done."""

    def __init__(self, world: "World", number: int, incarnation: int) -> None:
        super().__init__(world.clock, f"w{number}")
        self.number, self.incarnation = number, incarnation
        self.address = f"w{number}/{incarnation}".encode()
        self.departed = self._computing = False
        self.clocks: dict[int, int] = {}  # that its pushes were made at
        self._world = world
        self._step = self._reached = 0
        self._ready: Ready | None = None
        self.began_with: Sequence[Host] = ()  # the shards that first registered it
        self._versions = (0,) * world.setting.shards
        self.ready_at = 0.0  # when its shards last had all registered it, by true time
        self._read = 0  # the request that these came with
        self._remaining = 0  # pushes still to be made with them
        self._turned: dict[int, int] = {}  # the last request before a shard was rolled back
        self._boots: tuple[int, ...] = ()  # the lives of the shards that it last read from
        self._asked_in: dict[int, tuple[int, ...]] = {}  # the lives when it asked
        self._pulled: dict[int, Pulled] = {}
        self._asked: list[tuple[int, int]] = []  # request and clock
        self._former: Session | None = None
        self.leaving = self._owes = False
        # Whoever starts late knows only where the job began.
        self._open(world.generations[0])

    def _open(self, hosts: "Sequence[Host]") -> None:
        """Turn to these shards, without a word."""
        world, self.hosts = self._world, hosts
        self.due = {host: Due() for host in hosts}  # what reads have promised of it
        self.session = Session(
            job=world.job,
            worker=self.name,
            incarnation=self.incarnation,
            build=world.build,
            table=world.table,
            shard_map=hosts[0].map,
            retry_s=0.5,
            patience_s=PATIENCE_S,
            compression=world.compression,
        )

    def __repr__(self) -> str:
        state = "done" if self.departed else f"at step {self._step}, asked for {self._asked}"
        return f"{self.address.decode()} {state}, {self.session.unacknowledged} in flight"

    def begin(self) -> None:
        """Say hello, and keep the session's and the lease's time from here."""
        self._send(self.session.hello(self.now))
        self.every(PUMP_S, self._pump)
        self.every(renewal_s(self._world.setting), self._renew)

    def _pump(self) -> None:
        try:
            self._send(self.session.tick(self.now))
        except DownpourError as error:
            self._world.failed(self, error)

    def _renew(self) -> None:
        if self.session.ready is not None and not self.departed:
            self._send(
                Send(shard, Renew(0, self._world.job, self.name, self.incarnation, boot))
                for shard, boot in enumerate(self.session.boots)
            )

    def _send(self, sends: Any) -> None:
        for send in sends:
            self._world.send(self, send)

    def receive(self, host: "Host", header: bytes, frames: Sequence[Any]) -> None:
        """An answer has come; of shards that it has turned from it is no longer heard."""
        if self.hosts[min(host.number, len(self.hosts) - 1)] is not host:
            return
        ahead = self.session.ahead
        try:
            reply = codec.decode_reply(header)
            sends, events = self.session.receive(host.number, reply, codec.wrap(frames), self.now)
        except DownpourError as error:
            self._world.failed(self, error)
            return
        if type(reply) is Joined:
            # Put ahead, it joins all of them again, and each may hear that before its pushes.
            overtaken = self.session.ahead > ahead
            self._registered(*(self.due.values() if overtaken else [self.due[host]]))
        self._send(sends)
        invariants.check_pending(self.session, self._world.setting.in_flight)
        for event in events:
            self._note(event)

    def _registered(self, *places: Due) -> None:
        """These count it from now on; the pushes that are under way are late.

        Of weights that it has read, that is the first push, and all of those before.
        """
        made = max(self.clocks, default=self.session.seq)
        under_way = self._remaining + 1 if self._pulled else min(self._remaining, 1)
        for due in places:
            due.late = made + under_way

    def _note(self, event: Event) -> None:
        match event:
            case Ready():
                if event.seq != event.step:
                    raise Violation(
                        Promise.ORDER, f"{self} goes on after push {event.seq}, step {event.step}"
                    )
                if self._ready is None:
                    self._check_nothing_lost(event)
                    self._step, self._reached = event.step, event.clock
                    self.began_with = self.hosts
                self._ready, self.ready_at = event, self._clock.now
                self._follow()
            case Relocated():
                try:
                    self._relocate(generation_of(event.cluster))
                except BadMessage as error:
                    self._world.failed(self, error)
                return
            case RolledBack():
                self._turned[event.shard] = max([request for request, _ in self._asked], default=0)
            case Pulled():
                self._check_pulled(event)
                self._pulled[event.request] = event
            case Pushed():
                for host in self.hosts:
                    host.check_applied(self.name, event.seq)
            case Departed():
                self.departed = True
                self._world.departed(self)
        self._go_on()

    def _check_nothing_lost(self, ready: Ready) -> None:
        """Unless a shard says that it was rolled back, a life begins after every push of which a
        shard says that all have acknowledged it.
        """
        welcomes = self.session._registration._welcomes.values()
        known = max(welcome.acknowledged for welcome in welcomes)
        if ready.seq < known and not any(welcome.rolled_back for welcome in welcomes):
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"{self} begins after push {ready.seq}, and all shards had acknowledged {known}",
            )

    def _check_pulled(self, pulled: Pulled) -> None:
        """No older version than was read before; and of a view, both ends hold the same floats."""
        boots = self.session.boots
        if self._asked_in.pop(pulled.request) != boots:
            boots = ()  # a part may be from a life of its shard that has ended
        if self._world.ordered or (boots and boots == self._boots):
            read = self._versions
            if len(read) != len(pulled.versions):  # all were moved as the furthest's next
                read = (max(read),) * len(pulled.versions)
            for shard, (version, former) in enumerate(zip(pulled.versions, read, strict=True)):
                if version < former and self._read > self._turned.get(shard, -1):
                    raise Violation(Promise.VERSIONS, f"{self} read {version} after {former}")
        self._boots = boots
        for number, view in self.session.cargo.views.items():
            kept = self.hosts[number].views[view.boot, view.number]
            if b"".join(map(bytes, view.frames)) != kept:
                raise Violation(Promise.UNTORN, f"{self} has another view than was sent")

    def _go_on(self) -> None:
        """Do whatever comes next, if it can be done now."""
        if self._computing or self.departed or self.leaving or self.session.ready is None:
            return
        setting, session = self._world.setting, self.session
        if self._step >= setting.steps:
            if not session.unacknowledged:
                self.leaving = True
                self._send(session.leave(self.now))
            return
        if not self._remaining and not self._asked:
            self._ask(self._reached)
        if session.unacknowledged < setting.in_flight and (self._remaining or self._take_read()):
            self._computing = True
            takes_s = self._clock.random.expovariate(1 / setting.step_s)
            self.after(takes_s, self._push)

    def _take_read(self) -> bool:
        """Compute from the next weights, if they are there."""
        request, _ = self._asked[0]
        if request not in self._pulled:
            return False
        self._asked.pop(0)
        self._read, self._versions = request, self._pulled.pop(request).versions
        setting = self._world.setting
        self._remaining = min(setting.burst, setting.steps - self._step)
        if setting.prefetch and self._step + self._remaining < setting.steps:
            self._ask(self._reached + self._remaining)
        return True

    def _ask(self, clock: int) -> None:
        request, sends = self.session.pull(clock, self.now)
        self._asked_in[request] = self.session.boots
        self._asked.append((request, clock))
        self._send(sends)

    def _relocate(self, generation: int) -> None:
        """As the client does: greet the shards that hold the job now."""
        if self.session.ready is not None:
            self._former = self.session
        self._open(self._world.generations[generation])
        self._send(self.session.hello(self.now))

    def _follow(self) -> None:
        """Repeat there what the former shards have not applied, and ask again for the rest."""
        former, self._former = self._former, None
        if former is not None:
            joins, owed = moving.go_on(former, self.session, self.now)
            self._send(joins)
            for _, sends in owed:
                self._send(sends)
            self._registered(*self.due.values())
            wanted, self._asked = self._asked, []
            self._pulled.clear()
            for _, clock in wanted:
                self._ask(clock)
        if self.leaving:
            self._send(self.session.leave(self.now))
        if self._owes:
            self._push()

    def _push(self) -> None:
        self._owes = self.session.ready is None  # until its new shards have let it in
        if self._owes:
            return
        self._computing, self._remaining = False, self._remaining - 1
        self._step, self._reached = self._step + 1, self._reached + 1
        seq, clock = self.session.seq + 1, self._reached + self.session.ahead
        self.clocks[seq] = clock
        for host, due in self.due.items():
            if host.number in self.session._registration.joined:
                due.check(seq, clock, f"shard {host.number}")
        _, sends = self.session.push(
            invariants.gradient(self._world.blocks, self.number, self.session.seq + 1),
            moving.versions(self._versions, self.session.map.shards),
            clock=self._reached,
            step=self._step,
            steps=1,
            samples=1,
            loss=0.0,
            rtt_s=0.0,
            wait_s=0.0,
            now=self.now,
        )
        self._send(sends)
        self._go_on()
