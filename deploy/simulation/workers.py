"""One incarnation of a worker: a real session, driven like the client but without blocking."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from deploy.simulation import invariants, row_model
from deploy.simulation.addresses import generation_of
from deploy.simulation.config import LONGEST_S
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.lease_checks import renewal_s
from deploy.simulation.process import SimulatedProcess
from deploy.simulation.read_checks import Due
from ps.session import reshard_client
from ps.session.events import Departed, Event, Pulled, Pushed, Ready, Relocated, RolledBack, Send
from ps.session.flow_control import PushTimes
from ps.session.payload_encoder import Gradients
from ps.session.session import Session
from shards import wire_format
from shards.errors import BadMessage, DownpourError
from shards.messages import Joined, Renew

if TYPE_CHECKING:
    from deploy.simulation.shard_hosts import ShardHost
    from deploy.simulation.simulation import Simulation

PUMP_S = 0.3
PATIENCE_S = 60.0


class SimulatedWorker(SimulatedProcess):
    """One incarnation of a worker: it pulls, computes and pushes until it has taken its steps."""

    def __init__(self, world: "Simulation", number: int, incarnation: int) -> None:
        super().__init__(world.clock, f"w{number}")
        self.number, self.incarnation = number, incarnation
        self.address = f"w{number}/{incarnation}".encode()
        self.departed = self._computing = False
        self.clocks: dict[int, int] = {}  # the clock of each push, by sequence number
        self._world = world
        self._step = self._reached = 0
        self._ready: Ready | None = None
        self.began_with: Sequence[ShardHost] = ()  # the shards that first registered it
        self._versions = (0,) * world.setting.shards
        self.ready_at = 0.0  # when its shards last had all registered it, by true time
        self._read = 0  # the request that returned these versions
        self._remaining = 0  # pushes still to be made with the weights of this read
        self._turned: dict[int, int] = {}  # by shard, the last request before it was rolled back
        self._boots: tuple[int, ...] = ()  # the boots of the shards that it last read from
        self._asked_in: dict[int, tuple[int, ...]] = {}  # by request, the boots when it was sent
        self._pulled: dict[int, Pulled] = {}
        self._asked: list[tuple[int, int]] = []  # request and clock
        self._former: Session | None = None
        self.leaving = self._owes = False
        self._takes_s = 0.0  # of the step that is being computed
        # A worker that starts late knows only the job's first shards.
        self._open(world.generations[0])

    def _open(self, hosts: "Sequence[ShardHost]") -> None:
        """Open a session with these shards, without sending anything yet."""
        world, self.hosts = self._world, hosts
        self.due = {host: Due() for host in hosts}  # the promises of reads about its pushes
        self.session = Session(
            job=world.job,
            worker=self.name,
            incarnation=self.incarnation,
            layout=world.layout,
            shard_map=hosts[0].map,
            retry_s=0.5,
            patience_s=PATIENCE_S,
            compression=world.compression,
        )

    def __repr__(self) -> str:
        state = "done" if self.departed else f"at step {self._step}, asked for {self._asked}"
        return f"{self.address.decode()} {state}, {self.session.pending_pushes} in flight"

    def begin(self) -> None:
        """Greet the shards, and start the timers of the session and the lease."""
        self._send(self.session.hello(self.now))
        self.every(PUMP_S, self._pump)
        self.every(renewal_s(self._world.setting), self._renew)

    def _pump(self) -> None:
        try:
            self._send(self.session.tick(self.now))
        except DownpourError as error:
            self._world.note_failure(self, error)

    def _renew(self) -> None:
        if self.session.ready is not None and not self.departed:
            self._send(
                Send(shard, Renew(0, self._world.job, self.name, self.incarnation, boot))
                for shard, boot in enumerate(self.session.boots)
            )

    def _send(self, sends: Any) -> None:
        for send in sends:
            self._world.send(self, send)

    def receive(self, host: "ShardHost", header: bytes, frames: Sequence[Any]) -> None:
        """Process an answer; one from shards that it has left is ignored."""
        if self.hosts[min(host.number, len(self.hosts) - 1)] is not host:
            return
        ahead = self.session.ahead
        try:
            reply = wire_format.decode_reply(header)
            sends, events = self.session.receive(
                host.number, reply, wire_format.wrap(frames), self.now
            )
        except DownpourError as error:
            self._world.note_failure(self, error)
            return
        if type(reply) is Joined:
            # When overtaken, it joins all shards again; such a Join may arrive before its pushes.
            overtaken = self.session.ahead > ahead
            self._note_registration(*(self.due.values() if overtaken else [self.due[host]]))
        self._send(sends)
        invariants.check_pending(self.session, self._world.setting.in_flight)
        for event in events:
            self._note(event)

    def _note_registration(self, *dues: Due) -> None:
        """These shards have registered the worker; its pushes in flight count as late.

        Those are the first push from the weights that it has read, and all pushes before that.
        """
        last_seq = max(self.clocks, default=self.session.seq)
        under_way = self._remaining + 1 if self._pulled else min(self._remaining, 1)
        for due in dues:
            due.late = last_seq + under_way

    def _note(self, event: Event) -> None:
        match event:
            case Ready():
                if event.seq != event.step:
                    raise Violation(
                        Promise.ORDER, f"{self} continues after push {event.seq}, step {event.step}"
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
                    self._world.note_failure(self, error)
                return
            case RolledBack():
                self._turned[event.shard] = max([request for request, _ in self._asked], default=0)
            case Pulled():
                self._check_pulled(event)
                self._pulled[event.request] = event
            case Pushed():
                for host in self.hosts:
                    host.check_applied(self.name, event.seq)
                self._check_named(event)
            case Departed():
                self.departed = True
                self._world.note_departure(self)
        self._continue()

    def _check_nothing_lost(self, ready: Ready) -> None:
        """Check that each shard of this incarnation has every push that all shards had
        acknowledged, as far as one reports it. A shard that reports a rollback may have lost some.
        """
        welcomes = self.session._registration._welcomes.values()
        known = max(welcome.acknowledged for welcome in welcomes)
        least = min([welcome.seq for welcome in welcomes if not welcome.rolled_back], default=known)
        if least < known:
            raise Violation(
                Promise.EXACTLY_ONCE,
                f"{self} begins after push {ready.seq}, and a shard has pushes up to {least}, where"
                f" all had acknowledged {known}",
            )

    def _check_named(self, pushed: Pushed) -> None:
        """Check that a push is acknowledged as dropped if a shard has dropped it, and only then."""
        dropped = [host.number for host in self.hosts if host.drops(self.name, pushed.seq)]
        if bool(dropped) != bool(pushed.dropped):
            raise Violation(
                Promise.NAMED,
                f"{self} has acks of push {pushed.seq}, {pushed.dropped} of them as dropped, and"
                f" shards {dropped} have dropped it",
            )

    def _check_pulled(self, pulled: Pulled) -> None:
        """Check that versions do not decrease, and that both ends of a view have equal floats."""
        boots = self.session.boots
        if self._asked_in.pop(pulled.request) != boots:
            boots = ()  # a part may come from an earlier incarnation of its shard
        if self._world.ordered or (boots and boots == self._boots):
            read = self._versions
            # After a resharding, all shards start from the highest version of the former ones.
            if len(read) != len(pulled.versions):
                read = (max(read),) * len(pulled.versions)
            for shard, (version, former) in enumerate(zip(pulled.versions, read, strict=True)):
                if version < former and self._read > self._turned.get(shard, -1):
                    raise Violation(Promise.VERSIONS, f"{self} read {version} after {former}")
        self._boots = boots
        for gathered in pulled.rows.values():
            # The last id that it asks for is never pushed, and has its first values for ever.
            first = row_model.first_row(row_model.NEVER_PUSHED)
            first = row_model.round_row(self._world.setting.row_pull, first)
            if gathered.stored[-1] or not np.array_equal(gathered.rows[-1], first):
                raise Violation(Promise.SERIAL, f"{self} read a row that nobody has pushed")
        for (number, table), view in self.session.encoder.views.items():
            if view.weights.tobytes() != self.hosts[number].views[table, view.boot, view.number]:
                raise Violation(Promise.UNTORN, f"{self} has another view than was sent")

    def _continue(self) -> None:
        """Take the next action of the plan, if it is possible now."""
        if self._computing or self.departed or self.leaving or self.session.ready is None:
            return
        setting, session = self._world.setting, self.session
        if self._step >= setting.steps:
            if not session.pending_pushes:
                self.leaving = True
                self._send(session.leave(self.now))
            return
        if not self._remaining and not self._asked:
            self._ask(self._reached)
        if session.pending_pushes < setting.in_flight and (self._remaining or self._take_read()):
            self._computing = True
            self._takes_s = self._clock.random.expovariate(1 / setting.step_s)
            self.after(self._takes_s, self._push)

    def _take_read(self) -> bool:
        """Take the weights of the next read, if they have arrived; returns whether they have."""
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
        setting = self._world.setting
        gather = row_model.gather_for(self.number, clock) if setting.rows else None
        # A learner waits for no report of its own but the one on the table that it reports on next.
        reports = setting.merge == "quorum"
        following = self.session.seq + self._remaining + 1
        tables = setting.tables_of_push(following) if reports else None
        request, sends = self.session.pull(clock, self.now, tables, gather)
        self._asked_in[request] = self.session.boots
        self._asked.append((request, clock))
        self._send(sends)

    def _relocate(self, generation: int) -> None:
        """Greet the shards that hold the job now, as the client does."""
        if self.session.ready is not None:
            self._former = self.session
        self._open(self._world.generations[generation])
        self._send(self.session.hello(self.now))

    def _follow(self) -> None:
        """Repeat pushes that the former shards have not applied, and pending pulls."""
        former, self._former = self._former, None
        if former is not None:
            joins, owed = reshard_client.resume_at(former, self.session, self.now)
            self._send(joins)
            for _, sends in owed:
                self._send(sends)
            self._note_registration(*self.due.values())
            pulls, self._asked = self._asked, []
            self._pulled.clear()
            for _, clock in pulls:
                self._ask(clock)
        if self.leaving:
            self._send(self.session.leave(self.now))
        if self._owes:
            self._push()

    def _push(self) -> None:
        self._owes = self.session.ready is None  # push later, when the new shards have admitted it
        if self._owes:
            return
        self._computing, self._remaining = False, self._remaining - 1
        self._step, self._reached = self._step + 1, self._reached + 1
        seq, clock = self.session.seq + 1, self._reached + self.session.ahead
        self.clocks[seq] = clock
        for host, due in self.due.items():
            if host.number in self.session._registration.joined:
                due.check(seq, clock, f"shard {host.number}")
        reports = self._world.setting.merge == "quorum"
        _, sends = self.session.push(
            self._gradient(seq),
            reshard_client.versions(self._versions, self.session.map.shards),
            clock=self._reached,
            step=self._step,
            steps=1,
            samples=1,
            loss=0.0,
            times=PushTimes(compute_s=min(self._takes_s, LONGEST_S)),
            now=self.now,
            tokens=self.number + 1 if reports else 0,
            window=1 if reports else 0,
        )
        self._send(sends)
        self._continue()

    def _gradient(self, seq: int) -> Gradients:
        """The gradient of push `seq`, for the tables that it is for."""
        world = self._world
        arena = invariants.gradient(world.blocks, self.number, seq, self.incarnation)
        tables = world.layout.split(arena)
        gradients: dict[str, Any] = {
            table: tables[table] for table in world.setting.tables_of_push(seq)
        }
        rows = row_model.gradient_of_push(self.number, seq, self.incarnation)
        if world.setting.rows and rows is not None:
            gradients[row_model.NAME] = rows
        return gradients
