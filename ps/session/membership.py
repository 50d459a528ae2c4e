"""The registration of a worker with every shard: the greeting, and its clock.

Theory. The greeting is a request like the others. The worker sends Hello to every shard and
continues after the largest push number that any of them reports. It then sends Join to shard 0,
which answers with a clock, and joins the other shards at that clock. A shard that has restarted, or
where the worker's lease has run out, is greeted alone and joined at the worker's present clock.

Shards report different numbers if an earlier incarnation died before all of them had its last
pushes, or if a shard has rolled back. No one can repeat those pushes: what the next incarnation
would send under their numbers comes from other weights, and a shard that has the earlier push would
take it for a repetition. So each Join says after which push the worker continues, and a shard that
lacks pushes up to there goes without them.

A worker has one clock for all shards. With a clock for each, two workers could wait for each other,
one at each of two shards. No shard admits a worker below the slowest clock that it knows, and that
clock may have risen since another shard answered: at this shard, other workers then read as if this
worker had advanced that far. So the worker takes the largest clock at which any shard admits it,
and joins the other shards at that clock. It is ready once all of them have it at that clock. When a
lease has run out and the other workers have continued without this one, it catches up in the same
way: the difference is added to every clock that it sends from then on. The driver's own count does
not change.
"""

from typing import NamedTuple

from ps.session.events import Ready, RolledBack, Send
from ps.session.retransmit import RetransmitTable
from shards.errors import GiveUp
from shards.messages import PROTOCOL, FromWorker, Hello, Join, Joined, Push, Welcome
from shards.schema_digest import SCHEMA


class AppliedAtShard(NamedTuple):
    """A shard's record of this worker: its last push, and the step and clock of that push."""

    seq: int
    step: int
    clock: int


class Membership:
    """One incarnation of a worker, as its shards know it.

    `ready` is set once all shards have registered it; `joined` are the shards that have it
    registered now, and `boots` their incarnations. `reached` is the highest wire clock that it has
    been granted or has pushed, and `ahead` how far the wire clock is ahead of the driver's.
    `acknowledged` is the last push that each shard has acknowledged.
    """

    def __init__(
        self,
        outstanding: RetransmitTable,
        shards: int,
        *,
        job: str,
        worker: str,
        incarnation: int,
    ) -> None:
        self.ready: Ready | None = None
        self.boots: dict[int, int] = {}
        self.joined: set[int] = set()
        self.acknowledged: dict[int, Push] = {}
        self.reached = self.ahead = 0
        self.follows = False  # whether the job was resharded and this continues another session
        self._admission: int | None = None  # the largest clock at which a shard has admitted it
        self._welcomes: dict[int, Welcome] = {}
        self._reported: dict[int, AppliedAtShard] = {}
        self._begin = AppliedAtShard(0, 0, 0)  # the last push that any shard has reported
        self._lost_to: dict[int, int] = {}  # the last push expected when a shard rolled back
        self._due: dict[int, int] = {}  # the push that a shard must have when it answers a Hello
        self._outstanding = outstanding
        self._shards = shards
        self._job, self._worker = job, worker
        self._incarnation = incarnation

    @property
    def versions(self) -> tuple[int, ...]:
        """The version that each shard had at its last greeting, once this is ready."""
        return tuple(self._welcomes[shard].version for shard in range(self._shards))

    def may_send(self, shard: int, message: FromWorker) -> bool:
        """Return whether `message` may go to `shard`: before registration only a greeting may."""
        return shard in self.joined or isinstance(message, Hello | Join)

    def greet(self, shard: int, now: float) -> Send:
        """Say hello to `shard`."""
        # Until it has joined again, only the greeting may be sent there.
        self.joined.discard(shard)
        self._outstanding.drop_greetings(shard)
        if self.ready is not None:
            # Its answer may be older than an acknowledgement that arrives meanwhile, so note what
            # is known now.
            self._due[shard] = self._last_applied(shard).seq
        request = self._outstanding.count()
        hello = Hello(request, self._job, self._worker, self._incarnation, PROTOCOL, SCHEMA)
        return self._outstanding.add(shard, request, hello, (), now)

    def find_rollback(self, shard: int, reply: Welcome) -> RolledBack | None:
        """The loss, if a shard that welcomes this worker again has lost pushes that it had
        acknowledged.

        Raises GiveUp if the shard has lost some without reporting a rollback.
        """
        if self.ready is None:
            return None
        due = self._due.get(shard, 0)
        if reply.rolled_back:
            if reply.boot == self.boots[shard]:
                return None
            # The restored autosave may be older than the last loss: do not count a push twice.
            lost = max(0, due - max(reply.seq, self._lost_to.get(shard, 0)))
            self._lost_to[shard] = due
            return RolledBack(shard, reply.boot, reply.version, lost)
        if reply.seq < due:
            raise GiveUp(
                f"shard {shard} came back at push {reply.seq} of {self._worker} but had"
                f" acknowledged {due}: resume the job from its last snapshot"
            )
        return None

    def on_welcome(self, shard: int, reply: Welcome, now: float) -> list[Send]:
        """`shard` has reported what it has of this worker; returns the Joins to send."""
        self.boots[shard] = reply.boot
        self._welcomes[shard] = reply
        self._record_report(shard, AppliedAtShard(reply.seq, reply.step, 0))
        # A Join says after which push the worker continues, and that is the largest of all reports.
        if len(self._welcomes) < self._shards:
            return []
        if self.ready is None:  # includes a shard that came back while others were being joined
            self._check_losses()
        if self._admission is not None:
            return [self._join(shard, self._admission, now)]
        # Shard 0 was asked already, and its answer decides the clock of all.
        if self._joining(0):
            return []
        return [self._join(0, 0, now)]

    def _record_report(self, shard: int, reported: AppliedAtShard) -> None:
        if self.ready is None:
            # It never decreases: a shard may already have joined this worker after that push when
            # another one comes back with less.
            self._begin = max(self._begin, reported)
        elif reported.seq > self._reported[shard].seq:
            self._reported[shard] = reported

    def on_joined(self, shard: int, reply: Joined, now: float) -> tuple[list[Send], Ready | None]:
        """`shard` has registered this worker for the first time; ready if it was the last shard."""
        self.joined.add(shard)
        if self._admission is None or reply.clock > self._admission:
            # The other shards count it at an earlier clock, or not at all: join them again.
            self._admission = reply.clock
            self.joined.intersection_update({shard})
            return self._join_others(shard, now), self._ready_if_joined()
        return [], self._ready_if_joined()

    def on_rejoined(self, shard: int, reply: Joined, now: float) -> tuple[int, list[Send]]:
        """`shard` has registered this worker again; returns by how much its clock was raised, and
        the Joins.

        All weights that were requested at the earlier clock must be requested again.
        """
        self.joined.add(shard)
        behind = reply.clock - self.reached
        if behind <= 0:
            return 0, []
        self._admission = reply.clock
        # One statement: if Ctrl-C came in between, the next greeting would add `behind` twice.
        self.ahead, self.reached = self.ahead + behind, reply.clock
        return behind, self._join_others(shard, now)

    def _check_losses(self) -> None:
        """Raise GiveUp if a shard lacks acknowledged pushes without having reported a rollback.

        Shards may differ by pushes that were in flight when a former incarnation ended: not all
        shards had acknowledged those. A shard that was rolled back reports it, and may lack more.
        """
        welcomes = self._welcomes.items()
        witness, most = max(welcomes, key=lambda entry: entry[1].acknowledged)
        short = [shard for shard, w in welcomes if w.seq < most.acknowledged and not w.rolled_back]
        if short:
            has = ", ".join(f"shard {shard} has {self._welcomes[shard].seq}" for shard in short)
            raise GiveUp(
                f"pushes of {self._worker}: {has}, but all shards had acknowledged"
                f" {most.acknowledged} when shard {witness} was sent its last: a WAL of"
                f" {'these shards' if len(short) > 1 else 'that shard'} is truncated or missing;"
                " resume the job from its last snapshot"
            )

    def _ready_if_joined(self) -> Ready | None:
        if len(self.joined) == self._shards:
            assert self._admission is not None, "every shard has reported a clock"
            lease_s = min(welcome.lease_s for welcome in self._welcomes.values())
            self._reported = dict.fromkeys(self.joined, self._begin)
            self.ready = Ready(self._begin.seq, self._begin.step, self._admission, lease_s)
            self.reached = self._admission
        return self.ready

    def _join_others(self, shard: int, now: float) -> list[Send]:
        """Joins at the present clock for all shards but `shard` and those being greeted, which are
        joined later.
        """
        assert self._admission is not None, "a shard has reported it"
        return [
            self._join(other, self._admission, now)
            for other in range(self._shards)
            if other != shard and not self._greeting(other)
        ]

    def follow(self, former: "Membership", now: float) -> list[Send]:
        """Continue from `former`'s clock, or catch up with the others at these shards; call it once
        ready.

        It has to catch up if the others have advanced beyond what this worker has pushed and
        received.

        These shards may record an older clock for this worker than its applied pushes, or its
        admission at the former shards, imply.
        """
        assert self.ready is not None, "the driver waits for Ready first"
        overtaken = max(0, self.ready.clock - former.reached)
        self.ahead = former.ahead + overtaken
        self.follows = True
        clock = former._clock_at(self.ready.seq) + overtaken
        if clock <= self.ready.clock:
            return []
        self._admission, self.reached = clock, max(self.reached, clock)
        return [self._join(shard, clock, now) for shard in range(self._shards)]

    def reads_at(self, clock: int) -> None:
        """The driver requests weights at `clock`, its own count; only where this `follows` another.

        After a reshard the driver may request weights again that it had received and dropped. By
        then the shards have this worker at a later clock, so it must read at that later clock.
        """
        if self._admission is not None:
            self.ahead = max(self.ahead, self._admission - clock)

    def _clock_at(self, seq: int) -> int:
        """The wire clock at which this worker was admitted or, if higher, that of its pushes up to
        `seq`.
        """
        owed = [pending.message for _, pending in self._outstanding]
        pushes = [
            *self.acknowledged.values(),
            *(message for message in owed if isinstance(message, Push)),
        ]
        return max([self._admission or 0, *(p.clock for p in pushes if p.seq <= seq)])

    def _last_applied(self, shard: int) -> AppliedAtShard:
        """The last push that `shard` has reported or acknowledged, in any of its incarnations."""
        reported, push = self._reported[shard], self.acknowledged.get(shard)
        if push is None or push.seq < reported.seq:
            return reported
        return AppliedAtShard(push.seq, push.step, push.clock)

    def _join(self, shard: int, clock: int, now: float) -> Send:
        request = self._outstanding.count()
        identity = self._job, self._worker, self._incarnation, self.boots[shard]
        again = self.ready is not None
        had = self._last_applied(shard) if again else self._begin
        self._outstanding.drop_greetings(shard)  # this Join replaces an earlier one
        join = Join(request, *identity, max(clock, had.clock), again, had.seq, had.step)
        return self._outstanding.add(shard, request, join, (), now)

    def _joining(self, shard: int) -> bool:
        return any(isinstance(owed.message, Join) for owed in self._outstanding.to(shard))

    def _greeting(self, shard: int) -> bool:
        return any(isinstance(owed.message, Hello) for owed in self._outstanding.to(shard))
