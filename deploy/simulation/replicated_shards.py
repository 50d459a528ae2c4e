"""A replicated shard: all its present and former copies, and the checks on their answers.

Within the fault budget, copies are killed only while their group is in sync and whole, because that
is what `replicated` promises to survive. Stops, cuts and deaths of the coordinator come at any
time. A copy that dies or retires is followed by an empty one.
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from deploy.simulation import invariants
from deploy.simulation.invariants import Promise, Violation
from deploy.simulation.network import Deliver
from deploy.simulation.shard_hosts import ShardHost, ShardProcess
from ps.replication.coordinator import ShardGroup
from shards.messages import Ack, Refusal, Remedy
from shards.replica import Effects, Post, ShardReplica
from shards.replication_messages import Assignment, Beat, Replicate, Sync
from shards.shard import Shard
from shards.transition_io import Arrival, Outgoing

if TYPE_CHECKING:
    from deploy.simulation.coordinator import SimulatedCoordinator
    from deploy.simulation.shard_hosts import Client
    from deploy.simulation.simulation import Simulation

BEAT_S = 0.4
TICK_S = 0.5
RETRY_S = 0.4
RESTART_S = 1.5
FOLLOWED_S = 20.0  # an undisturbed backup has to get in sync, or closer to it, within this time
TRIES = 12  # refusals in a row, after which a client knows which copy serves
KEPT = 64  # the number of states kept, by entry, for comparison with a backup


class Copy(ShardProcess):
    """One process of one copy."""

    def __init__(self, group: "ReplicatedShardHost", boot: int) -> None:
        super().__init__(group._world.clock, f"copy {boot}")
        self.boot, self._group = boot, group
        spec = group._world.spec(group.number, group.map)
        piece_bytes = group._world.setting.piece_bytes
        self.replica = ShardReplica(
            group.number,
            boot,
            lambda: Shard(spec, boot),
            retry_s=RETRY_S,
            piece_bytes=piece_bytes,
        )
        self.shard = self.replica.shard
        self._disturbed_at = 0.0
        self._behind = inf  # the smallest number of entries that its backup has lacked so far
        self.every(BEAT_S, lambda: group.report(self, self.replica.beat()))
        self.every(TICK_S, self._tick)

    @property
    def epoch(self) -> int:
        """The epoch of its active configuration; 0 without one."""
        return self.replica._active.epoch if self.replica._active else 0

    def _tick(self) -> None:
        if self.replica.serving and self.shard.ledger.silent(self.now):
            self._group._world.calm = False
        before = self._group.open_reports(self.shard)
        self._group.perform(self, self.replica.tick(self.now))
        if self.replica.serving:
            self._group.check_not_early(self.shard, before, self.now)
            self._group.check_merged(self.shard, self.now)
        self._check_followed()

    def _check_followed(self) -> None:
        """Check that a backup catches up once the faults have ended."""
        world, active = self._group._world, self.replica._active
        backup = active.backup if active is not None and self.replica.serving else None
        apart = backup is not None and not self.replica.in_sync and self._group.copies[backup].alive
        behind = inf if self.replica.behind is None else self.replica.behind
        if not apart or world.network.has_faults or world.clock.now < world.setting.quiet_s:
            self._disturbed_at, self._behind = world.clock.now, inf
        elif behind < self._behind:
            self._disturbed_at, self._behind = world.clock.now, behind
        elif world.clock.now - self._disturbed_at > FOLLOWED_S:
            raise Violation(
                Promise.PROGRESS, f"copy {backup} got no closer in {FOLLOWED_S:g} s: {active}"
            )


class ReplicatedShardHost(ShardHost):
    """All present and former copies of one shard."""

    coordinator: "SimulatedCoordinator"

    def __init__(self, world: "Simulation", number: int, *, fresh: bool = False) -> None:
        super().__init__(world, number, fresh=fresh)
        self.copies: dict[int, Copy] = {}
        self._images: dict[tuple[int, int], tuple[object, ...]] = {}
        self._installed = fresh
        self._primaries: dict[int, int] = {}
        self._routes: dict[str, Copy] = {}
        self._refusals: Counter[str] = Counter()  # in a row, by client

    def begin(self) -> None:
        self._start_copy()
        self._world.clock.after(0.3, self._start_copy)

    def _start_copy(self) -> None:
        boot = self._world.next_boot()
        self.copies[boot] = Copy(self, boot)

    @property
    def _group(self) -> ShardGroup:
        return self.coordinator.record[self.number]

    @property
    def promotable(self) -> Sequence[Copy]:
        return [self.copies[boot] for boot in self._group.promotable]

    @property
    def serving(self) -> Sequence[Copy]:
        return [copy for copy in self.promotable if copy.alive]

    def process(self, role: str) -> Copy | None:
        boot = getattr(self._group.settled, role.partition(" ")[0], None)
        copy = self.copies.get(boot) if boot is not None else None
        return copy if copy is not None and copy.alive else None

    # --- requests and answers ---------------------------------------------------------------------

    def route(self, client: "Client") -> tuple[str, Deliver] | None:
        """The copy that this client uses; if it is dead, another one at random.

        After `TRIES` refusals in a row it is the copy that serves: chance alone could keep a client
        from that copy, of which the coordinator informs a real client (primary_resolver.py).
        """
        copy = self._routes.get(client.name)
        if copy is None or not copy.alive:
            living = [copy for copy in self.copies.values() if copy.alive]
            if not living:
                return None
            if self._refusals[client.name] >= TRIES:
                living = [copy for copy in living if copy.replica.serving] or living
            copy = self._routes[client.name] = self._world.clock.random.choice(living)
        return copy.name, partial(copy.at, self._take, copy, client.address)

    def handle(self, process: ShardProcess, arrival: Arrival) -> None:
        assert isinstance(process, Copy), "copies alone take requests of this shard"
        effects = process.replica.handle(
            arrival.sender, arrival.message, arrival.frames, process.now
        )
        if process.replica.serving:
            self.note_reports(process.shard, [arrival], process.now)
        self.perform(process, effects)

    def assign(self, copy: Copy, assignment: Assignment) -> None:
        """Process an assignment; the first primary gets the first weights, as by an operator."""
        self.perform(copy, copy.replica.assign(assignment, copy.now))
        if copy.replica.serving and not self._installed:
            self._installed = True
            self.perform(copy, copy.replica.handle(b"", *self.blank(), copy.now))

    def _receive(self, copy: Copy, origin: int, post: Post) -> None:
        """Process a message from another copy."""
        frames = [frame.data if isinstance(frame, np.ndarray) else frame for frame in post.frames]
        replica, before = copy.replica, copy.replica.position
        effects = replica.receive(origin, post.message, frames, copy.now)
        if replica.shard is not copy.shard:
            copy.shard, copy.former = replica.shard, self.copies[origin].records()
        if isinstance(post.message, Replicate) and replica.position == before + 1:
            image = _image(copy.shard)
            if self._images.get((post.message.epoch, replica.position), image) != image:
                raise Violation(
                    Promise.SAME_COPY, f"backup {copy.boot} after entry {replica.position}"
                )
        self.perform(copy, effects)

    def perform(self, copy: Copy, effects: Effects) -> None:
        """Check the effects that a replica returns, and carry them out."""
        replica, key = copy.replica, (copy.epoch, copy.replica.position)
        if replica.serving and key not in self._images:
            self._images[key] = _image(copy.shard)
            if len(self._images) > KEPT:
                del self._images[next(iter(self._images))]
        if effects.answers:
            self.reply(copy, [answer for answer in effects.answers if answer.to])
        for post in effects.posts:
            self._post(copy, post)
        if effects.beat is not None:
            self.report(copy, effects.beat)
        if replica.retired and copy.alive:
            copy.alive = False
            self._world.note(f"{copy.name} of shard {self.number} retires")
            self._world.clock.after(RESTART_S, self._start_copy)

    def reply(self, process: ShardProcess, answers: Sequence[Outgoing]) -> None:
        super().reply(process, answers)
        assert isinstance(process, Copy), "copies alone answer for this shard"
        for answer in answers:
            client = self._world.end_at(answer.to).name
            refused = type(answer.message) is Refusal and answer.message.remedy is Remedy.RETRY
            self._refusals[client] = self._refusals[client] + 1 if refused else 0
            if type(answer.message) is Ack:
                first = self._primaries.setdefault(process.epoch, process.boot)
                if first != process.boot:
                    text = f"copies {first} and {process.boot} commit in {process.epoch}"
                    raise Violation(Promise.ONE_PRIMARY, text)
                self.check_durable(f"{process.name} acknowledges a push")
            elif refused:
                # After a refusal by a copy that does not serve, the client tries another one.
                self._routes.pop(client, None)

    def _post(self, copy: Copy, post: Post) -> None:
        other = self.copies[post.to]

        def deliver() -> None:
            # Messages that a killed process had queued may be lost with it.
            if copy.alive or self._world.clock.random.random() < 0.5:
                other.at(self._receive, other, copy.boot, post)

        size_s = self._world.setting.state_s if isinstance(post.message, Sync) else 0.0
        self._world.network.post(copy.name, other.name, deliver, size_s=size_s)

    def report(self, copy: Copy, beat: Beat) -> None:
        """Send a heartbeat to the coordinator."""
        to = self.coordinator
        self._world.network.post(copy.name, to.name, to.at, to.hear, beat)

    def is_drained(self) -> bool:
        group = self._group
        if group.settled is None or group.pending is not None:
            return False
        primary = self.copies[group.settled.primary].replica
        return primary.serving and not primary._pending_answers and not primary._unreported

    # --- promises ---------------------------------------------------------------------------------

    def check_decision(self, before: ShardGroup, group: ShardGroup) -> None:
        """Check the new state of the coordinator's record, and spring an ambush if one is set."""
        self._world.note(f"shard {self.number}: {group}")
        self.check_durable("the record changes")
        primary = group.newest.primary if group.newest is not None else None
        if before.settled is not None and before.settled.primary != primary:
            self._world.calm = False
        if group.in_sync and not before.in_sync and self.ambushes:
            ambush = self.ambushes.pop()
            crash = partial(self.crash, reckless=False, reported=False)
            self._world.clock.after(ambush.after_s, crash, ambush.target, ambush.back_s)

    # --- dying ------------------------------------------------------------------------------------

    def _whole(self) -> bool:
        """True if the group is in sync and undisturbed, so that one death is within the budget."""
        group, now = self._group, self._world.clock.now
        ready = group.pending is None and group.in_sync and self._installed
        return ready and all(
            copy.alive
            and copy.frozen_until <= now
            and not self._world.network.is_cut_off(copy.name)
            for copy in self.promotable
        )

    def crash(self, role: str, back_s: float, *, reckless: bool, reported: bool) -> bool:
        late = self._world.clock.now > self._world.setting.quiet_s
        if not reckless and (late or not self._whole()):
            return False
        copy = self.process(role)
        if copy is not None:
            copy.alive = False
            self._world.calm = False
            self._world.counted.deaths += 1
            self._world.note(f"{copy.name}, {role}, dies")
            if reported:
                self.coordinator.report_break(copy.boot)
            self._world.clock.after(back_s, self._start_copy)
        return True

    def kill_serving(self) -> None:
        reported = self._world.clock.random.random() < 0.5
        self.crash("primary", RESTART_S, reckless=False, reported=reported)

    def lose_connection(self, role: str) -> None:
        copy = self.process(role)
        if copy is not None:
            self.coordinator.report_break(copy.boot)


def _image(shard: Shard) -> tuple[object, ...]:
    """The state that a backup shares with its primary."""
    quiesce = shard.progress.quiesce
    # Not the time at which a quiesce ends: a shard clears it when it notices the end, which is not
    # an entry that its backup receives.
    quiesce_state = quiesce.cut, quiesce.seconds, quiesce.owner
    return (*invariants.image(shard), *quiesce_state, shard.progress.moved_to)
