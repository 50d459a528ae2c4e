"""A worker's registration with every shard: the greeting, and its clock.

Theory. The greeting is a request like the others: Hello to every shard; the smallest push number
they report is where this worker goes on (shards that are ahead will recognise the repetition); then
Join to shard 0, which says the clock, then to the others at that clock. A shard that restarted, or
one where the lease ran out, is greeted by itself, and joined at the clock that the worker has.

A worker has one clock for all shards, or two workers could wait for each other at two of them. No
shard admits anyone below its own slowest clock, and that of one may have risen since another has
answered. It then lets the others read as if this worker had come that far. So the worker takes the
largest clock that any shard admits it at, and joins the others at that; it is ready once all of
them count it there. When a lease has run out and the others have continued without this worker, it
catches up with them in the same way: the difference is added to every clock that it sends from then
on. The driver's own count does not change.
"""

from typing import NamedTuple

from ps.protocol.events import Ready, RolledBack, Send
from ps.protocol.outstanding import Outstanding
from shards.errors import GiveUp
from shards.messages import PROTOCOL, FromWorker, Hello, Join, Joined, Push, Welcome


class Had(NamedTuple):
    """What a shard has had of this worker: its last push, the steps that covers, its clock then."""

    seq: int
    step: int
    clock: int


class Registration:
    """One life of a worker, as its shards know it.

    `ready` is set once all have registered it; `joined` are those that have it registered now, and
    `boots` their lives. `reached` is the clock, on the wire, that its pushes reach with the weights
    it has been given so far, and `ahead` how far the wire's clock is before the driver's.
    `acknowledged` is the last push that each shard has acknowledged.
    """

    def __init__(
        self,
        outstanding: Outstanding,
        shards: int,
        *,
        job: str,
        worker: str,
        incarnation: int,
        build: str,
    ) -> None:
        self.ready: Ready | None = None
        self.boots: dict[int, int] = {}
        self.joined: set[int] = set()
        self.acknowledged: dict[int, Push] = {}
        self.reached = self.ahead = 0
        self._follows = False  # whether its job has moved here from other shards
        self._admission: int | None = None  # the largest clock that a shard has let this life in at
        self._welcomes: dict[int, Welcome] = {}
        self._reported: dict[int, Had] = {}
        self._lost_to: dict[int, int] = {}  # the last push that was due when a shard rolled back
        self._due: dict[int, int] = {}  # the push that a shard must have when it answers a greeting
        self._outstanding = outstanding
        self._shards = shards
        self._job, self._worker = job, worker
        self._incarnation, self._build = incarnation, build

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each shard the version that it had when it was last greeted, once this is ready."""
        return tuple(self._welcomes[shard].version for shard in range(self._shards))

    def had(self, shard: int) -> int:
        """The last push of this worker that `shard` had when it was greeted."""
        return self._reported[shard].seq

    def may_send(self, shard: int, message: FromWorker) -> bool:
        """Until a shard has registered this worker, only the greeting may go there."""
        return shard in self.joined or isinstance(message, Hello | Join)

    def greet(self, shard: int, now: float) -> Send:
        """Say hello to `shard`."""
        self.joined.discard(shard)
        self._outstanding.drop_greetings(shard)
        if self.ready is not None:
            # What it says to this may have been true before it acknowledged more.
            self._due[shard] = self._had(shard).seq
        request = self._outstanding.count()
        hello = Hello(request, self._job, self._worker, self._incarnation, PROTOCOL, self._build)
        return self._outstanding.keep(shard, request, hello, (), now)

    def rolled_back(self, shard: int, reply: Welcome) -> RolledBack | None:
        """Whether a shard that welcomes this worker again has lost what it had acknowledged.

        Raises GiveUp if it has, and does not say so.
        """
        if self.ready is None:
            return None
        due = self._due.get(shard, 0)
        if reply.rolled_back:
            if reply.boot == self.boots[shard]:
                return None
            # The save that it goes on from may be older than the last loss, told of then.
            lost = max(0, due - max(reply.seq, self._lost_to.get(shard, 0)))
            self._lost_to[shard] = due
            return RolledBack(shard, reply.boot, reply.version, lost)
        if reply.seq < due:
            raise GiveUp(
                f"shard {shard} came back at push {reply.seq} of {self._worker} but had"
                f" acknowledged {due}: resume the job from its last snapshot"
            )
        return None

    def welcomed(self, shard: int, reply: Welcome, now: float) -> list[Send]:
        """`shard` has said what it has of this worker."""
        self.boots[shard] = reply.boot
        self._welcomes[shard] = reply
        if self.ready is None or reply.seq > self._reported[shard].seq:
            self._reported[shard] = Had(reply.seq, reply.step, 0)
        if len(self._welcomes) < self._shards:
            return []
        if self.ready is None:  # also of a shard that came back while others were being joined
            self._check_losses()
        if self._admission is not None:
            return [self._join(shard, self._admission, now)]
        if self._joining(0):
            return []
        return [self._join(0, 0, now)]

    def admitted(self, shard: int, reply: Joined, now: float) -> tuple[list[Send], Ready | None]:
        """`shard` has registered this worker, which was not ready; it is if this was the last."""
        self.joined.add(shard)
        if self._admission is None or reply.clock > self._admission:
            # The others count it at an earlier clock, or not at all.
            self._admission = reply.clock
            self.joined.intersection_update({shard})
            return self._join_others(shard, now), self._ready_if_joined()
        return [], self._ready_if_joined()

    def readmitted(self, shard: int, reply: Joined, now: float) -> tuple[int, list[Send]]:
        """It was ready, and `shard` has it back; how far that shard sees it overtaken, and Joins.

        Whatever has been asked at the clock before must be asked again.
        """
        self.joined.add(shard)
        behind = reply.clock - self.reached
        if behind <= 0:
            return 0, []
        self._admission = reply.clock
        # As one: if Ctrl-C came between, the next greeting would count it twice.
        self.ahead, self.reached = self.ahead + behind, reply.clock
        return behind, self._join_others(shard, now)

    def _check_losses(self) -> None:
        """Raise GiveUp if a shard lacks pushes that it has acknowledged, and does not say so.

        Shards differ by pushes that were on their way when a former life ended: none of those had
        been acknowledged by all. One that was rolled back says so, and may lack more.
        """
        welcomes = self._welcomes.items()
        witness, most = max(welcomes, key=lambda one: one[1].acknowledged)
        short = [shard for shard, w in welcomes if w.seq < most.acknowledged and not w.rolled_back]
        if short:
            has = ", ".join(f"shard {shard} has {self._welcomes[shard].seq}" for shard in short)
            raise GiveUp(
                f"pushes of {self._worker}: {has}, but all shards had acknowledged"
                f" {most.acknowledged} when shard {witness} was sent its last: a log of"
                f" {'these' if len(short) > 1 else 'that'} is cut or missing; resume the job from"
                " its last snapshot"
            )

    def _ready_if_joined(self) -> Ready | None:
        if len(self.joined) == self._shards:
            assert self._admission is not None, "every shard has said a clock"
            behind = min(self._welcomes.values(), key=lambda welcome: welcome.seq)
            self.ready = Ready(behind.seq, behind.step, self._admission, behind.lease_s)
            self.reached = self._admission
        return self.ready

    def _join_others(self, shard: int, now: float) -> list[Send]:
        """Joins at the present clock to all but `shard`; who is being greeted is joined later."""
        assert self._admission is not None, "a shard has said it"
        return [
            self._join(other, self._admission, now)
            for other in range(self._shards)
            if other != shard and not self._greeting(other)
        ]

    def follow(self, former: "Registration", now: float) -> list[Send]:
        """Once ready, count as `former` did with other shards, or catch up with the others there.

        It has to catch up if they have gone beyond what this worker has pushed and been given.

        What these shards know of its clock may be older than its pushes that they have, and than
        what the former have let it in at: a life that repeats the pushes of the one before counts
        further with each.
        """
        assert self.ready is not None, "the driver waits for Ready first"
        overtaken = max(0, self.ready.clock - former.reached)
        self.ahead = former.ahead + overtaken
        self._follows = True
        clock = former._counted_to(self.ready.seq) + overtaken
        if clock <= self.ready.clock:
            return []
        self._admission, self.reached = clock, max(self.reached, clock)
        return [self._join(shard, clock, now) for shard in range(self._shards)]

    def reads_at(self, clock: int) -> None:
        """The driver asks for weights at this clock of its own.

        After a move it may ask again for what it had been given and has dropped: its shards count
        it further by then, so that read has to be a later one.
        """
        if self._follows and self._admission is not None:
            self.ahead = max(self.ahead, self._admission - clock)

    def _counted_to(self, seq: int) -> int:
        """The clock, on the wire, that it was let in at, or its pushes up to `seq` have reached."""
        owed = [pending.message for _, pending in self._outstanding]
        pushes = [*self.acknowledged.values(), *(one for one in owed if isinstance(one, Push))]
        return max([self._admission or 0, *(p.clock for p in pushes if p.seq <= seq)])

    def _had(self, shard: int) -> Had:
        """The last push that `shard` has told this worker to have, in any of its lives."""
        told, push = self._reported[shard], self.acknowledged.get(shard)
        if push is None or push.seq < told.seq:
            return told
        return Had(push.seq, push.step, push.clock)

    def _join(self, shard: int, clock: int, now: float) -> Send:
        request = self._outstanding.count()
        told = self._job, self._worker, self._incarnation, self.boots[shard]
        again = self.ready is not None
        had = self._had(shard) if again else Had(0, 0, 0)
        self._outstanding.drop_greetings(shard)  # an earlier Join: this one says more
        join = Join(request, *told, max(clock, had.clock), again, had.seq, had.step)
        return self._outstanding.keep(shard, request, join, (), now)

    def _joining(self, shard: int) -> bool:
        return any(isinstance(owed.message, Join) for owed in self._outstanding.to(shard))

    def _greeting(self, shard: int) -> bool:
        return any(isinstance(owed.message, Hello) for owed in self._outstanding.to(shard))
