"""Operators of the job: the real plans (ps/session/admin_plans.py) over faulty links.

A request is repeated until each shard has answered, as the admin client does.

`ReshardOperator` moves the job to other shards. What the shards hand over is recorded for the
checks at the end of the run: the records of each block of floats, and the pushes that a shard
lacked when their worker had fallen silent. Such a push stays incomplete, which is the only
exception to exactly-once: no further part of it may be applied later.

`HoldOperator` quiesces the shards for a while, as a consistent read or an aligned snapshot does.

`SettingsOperator` changes the staleness bound or the rate (live_checks.py has what must hold then).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deploy.simulation.addresses import address_of
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.process import SimulatedProcess
from deploy.simulation.shard_hosts import ShardHost
from ps.session import admin_plans
from ps.session.admin_plans import (
    Answer,
    Answers,
    Ask,
    Pause,
    Plan,
    Query,
    SettingsChange,
    Side,
)
from ps.session.events import Unreachable
from shards import wire_format
from shards.errors import DownpourError
from shards.live_settings import newest_settings
from shards.messages import ChangeSettings, HandOver, Install, Refusal, Remedy
from shards.refusals import error_of
from shards.shard_state import SavedProgress
from shards.shard_status import Standing

if TYPE_CHECKING:
    from deploy.simulation.faults import ReshardFault
    from deploy.simulation.simulation import Simulation

PATIENCE_S = 30.0
RETRY_S = 0.7
HOLD_S = 20.0  # after which shards resume by themselves, if the operator only holds them
ELSEWHERE_S = 0.2  # the pause before asking another copy if the first does not serve


class Operator(SimulatedProcess):
    """One operator, and its one attempt at a plan; `number` distinguishes it from all others."""

    def __init__(self, world: "Simulation", number: int, *sides: Sequence[ShardHost]) -> None:
        super().__init__(world.clock, "operator")
        self._world = world
        self.address = f"operator/{number}".encode()
        job_and_layout, piece_bytes = (world.job, world.layout), world.setting.piece_bytes
        self._sides = {
            Side(*job_and_layout, hosts[0].map, number, PATIENCE_S, piece_bytes=piece_bytes): hosts
            for hosts in sides
        }
        self._plan = self._make_plan()
        self._request = 0  # the last one used
        self._asked: Ask | None = None
        self._queries: dict[int, Query] = {}  # by request number
        self._answers: dict[int, Answer] = {}
        self._since = 0.0
        self._asks_elsewhere = False

    def _make_plan(self) -> Plan[None]:
        """Make the plan of questions to the shards, which `begin` starts."""
        raise NotImplementedError

    def _before(self, step: Ask) -> None:
        """Called just before the questions of `step` are first sent."""

    def begin(self) -> None:
        """Start the plan."""
        self._advance(lambda: next(self._plan))

    def _advance(self, on: Callable[[], Ask | Pause]) -> None:
        self._asked = None
        try:
            step = on()
        except StopIteration:
            self._end(f"{self} has succeeded")
        except DownpourError as error:
            self._end(f"{self} has failed: {error}")
        else:
            if isinstance(step, Pause):
                self.after(
                    step.seconds, self._advance, lambda: self._plan.send(Answers(self.now, ()))
                )
            else:
                self._before(step)
                self._asked, self._answers, self._since = step, {}, self.now
                self._queries = dict(enumerate(step.queries, self._request + 1))
                self._request += len(step.queries)
                self._ask(self._request, RETRY_S)

    def _end(self, how: str) -> None:
        self._world.note(how)
        self.alive = False

    def _ask(self, request: int, wait_s: float) -> None:
        asked = self._asked
        if asked is None or request != self._request:
            return
        if self.now - self._since > PATIENCE_S:
            missing = next(iter(self._missing().values())).shard
            error = Unreachable(f"shard {missing} has not answered the operator", missing)
            self._advance(lambda: self._plan.throw(error))
            return
        self._send(asked)
        self.after(wait_s, self._ask, request, 2 * wait_s)

    def _missing(self) -> dict[int, Query]:
        return {n: query for n, query in self._queries.items() if n not in self._answers}

    def _send(self, asked: Ask) -> None:
        for number, query in self._missing().items():
            header = wire_format.encode(query.question(number))
            route = self._sides[asked.of][query.shard].route(self)
            if route is not None:
                self._world.network.carry(self.name, route[0], header, query.frames, route[1])

    def _ask_elsewhere(self) -> None:
        self._asks_elsewhere = False
        if self._asked is not None:
            self._send(self._asked)

    def receive(self, host: ShardHost, header: bytes, frames: Sequence[Any]) -> None:
        """Process an answer."""
        asked = self._asked
        if asked is None or host not in self._sides[asked.of]:
            return
        try:
            reply = wire_format.decode_reply(header)
        except DownpourError:
            return  # the request will be repeated
        if reply.request and reply.request not in self._queries:
            return
        if isinstance(reply, Refusal):
            if reply.remedy is Remedy.RETRY:  # another copy serves
                if not self._asks_elsewhere:
                    self._asks_elsewhere = True
                    self.after(ELSEWHERE_S, self._ask_elsewhere)
                return
            if asked.kind is Install and reply.remedy is Remedy.GIVE_UP:
                # Only this operator knows the new shards, so their whole state comes from here.
                raise Violation(Promise.NO_SURPRISE, f"the operator was refused: {reply.text!r}")
            error = error_of(reply)
            self._advance(lambda: self._plan.throw(error))
        elif reply.request and host.number == self._queries[reply.request].shard:
            self._answers.setdefault(reply.request, (reply, wire_format.wrap(frames)))
            if not self._missing():
                answers = [self._answers[number] for number in self._queries]
                self._advance(lambda: self._plan.send(Answers(self.now, answers)))


class ReshardOperator(Operator):
    """Reshards the job to the shards of a generation of its own."""

    def __init__(self, world: "Simulation", fault: "ReshardFault", number: int) -> None:
        self._fault, self._death_is_due = fault, True
        self._old: Sequence[ShardHost] = world.hosts
        after = world.cut(fault.shards, self._old[0].map.epoch + 1)
        self._generation, self._new = world.add_generation(after)
        self._exported: list[SavedProgress] = []
        super().__init__(world, number, self._old, self._new)

    def __str__(self) -> str:
        return "the resharding"

    def _make_plan(self) -> Plan[None]:
        """Reshard the job, and record what the shards hand over."""
        old, new = self._sides
        states = yield from admin_plans.move(old, new)
        self._exported = [state.saved for state in states]
        cuts, settings = [saved.ledger.cut for saved in self._exported], newest_settings(states)
        yield from admin_plans.hand_over(old, address_of(self._generation), cuts, settings)
        if self._old[0].new_address is None:
            raise Violation(Promise.FINAL, "shard 0 confirmed the hand-over, but still serves")

    def _before(self, step: Ask) -> None:
        if step.kind is HandOver:
            self._hand_over()
        if self._death_is_due and step.kind.__name__ == self._fault.before:
            self._death_is_due = False
            side = self._new if self._fault.fresh else self._old
            self._strike(side[self._fault.shard % len(side)])

    def _strike(self, host: ShardHost) -> None:
        if self._fault.after_s:
            self._world.clock.after(self._fault.after_s, host.kill_serving)
        else:
            host.kill_serving()

    def _hand_over(self) -> None:
        """Record, for each block, the pushes with which the new shards start."""
        states = self._exported
        furthest: dict[str, int] = {}
        for saved in states:
            for worker, entry in saved.ledger.entries.items():
                furthest[worker] = max(entry.seq, furthest.get(worker, 0))
        for host, saved in zip(self._old, states, strict=True):
            short: dict[str, set[int]] = {}
            for worker, last in furthest.items():
                worker_entry = saved.ledger.entries.get(worker)
                seq = worker_entry.seq if worker_entry else 0
                if (
                    seq < last
                    and worker_entry
                    and worker_entry.standing in (Standing.ACTIVE, Standing.KNOWN)
                ):
                    raise Violation(
                        Promise.ONE_CUT, f"shard {host.number} is handed over without push {last}"
                    )
                short[worker] = set(range(seq + 1, last + 1))
            host.hand_over(self._new, saved, short)


class HoldOperator(Operator):
    """Quiesces the shards for `for_s` seconds, and checks that none has gone beyond the cut."""

    def __init__(self, world: "Simulation", for_s: float, number: int) -> None:
        self._for_s = for_s
        self._hosts: Sequence[ShardHost] = world.hosts
        super().__init__(world, number, self._hosts)

    def __str__(self) -> str:
        return "the quiesce"

    def _make_plan(self) -> Plan[None]:
        (side,) = self._sides
        began = self.now
        cut = yield from admin_plans.quiesce(side, HOLD_S)
        yield Pause(self._for_s)
        # A shard's clock may run at 1.25 times this one's.
        if self._world.durable and self._world.ordered and self.now - began < HOLD_S / 1.3:
            for host in self._hosts:
                self._check(host, cut)
        yield from admin_plans.resume(side)

    def _check(self, host: ShardHost, cut: Mapping[str, int]) -> None:
        for process in host.serving:
            for worker, seq in process.shard.ledger.cut.items():
                if seq > cut.get(worker, 0):
                    raise Violation(
                        Promise.ONE_CUT,
                        f"shard {host.number} has push {seq} of {worker} and is quiesced at"
                        f" {cut.get(worker, 0)}",
                    )


class SettingsOperator(Operator):
    """Changes settings of the job while it trains, and checks that every shard follows."""

    def __init__(self, world: "Simulation", change: SettingsChange, number: int) -> None:
        self._change = change
        self._hosts: Sequence[ShardHost] = world.hosts
        super().__init__(world, number, self._hosts)

    def __str__(self) -> str:
        return f"the change of settings {self._change}"

    def _make_plan(self) -> Plan[None]:
        (side,) = self._sides
        settings = yield from admin_plans.change_settings(side, self._change)
        if not self._world.durable or self._world.lossy:
            return
        for host in self._hosts:
            for process in host.serving:
                known = process.shard.part.settings
                if known.revision < settings.revision:
                    raise Violation(
                        Promise.SETTINGS,
                        f"{self} has succeeded, and shard {host.number} trains with {known}",
                    )

    def _before(self, step: Ask) -> None:
        asked = step.queries[0].question(0)
        if isinstance(asked, ChangeSettings):
            self._world.proposed.append(asked.settings)
