"""A worker's registration with every shard: the greeting, and its clock.

Theory. The greeting is a request like the others: Hello to every shard; the smallest push number
they report is where this worker goes on (shards that are ahead will recognise the repetition); then
Join to shard 0, which says the clock, then to the others. A shard that restarted, or one where the
lease ran out, is greeted by itself, and joined at the clock that shard 0 has said.

A worker has one clock for all shards, or two workers could wait for each other at two of them. When
its lease has run out and the others have gone on without it, shard 0 has it count on from beside
them; the difference is then added to every clock that goes out, and told to the other shards by a
Join. The driver's own count is not touched.
"""

from ps.protocol.events import Ready, Send
from ps.protocol.outstanding import Outstanding
from shards.errors import GiveUp
from shards.messages import PROTOCOL, FromWorker, Hello, Join, Joined, Push, Welcome


class Registration:
    """One life of a worker, as its shards know it.

    `ready` is set once all have registered it; `joined` are those that have it registered now, and
    `boots` their lives. `reached` is the clock, on the wire, that its pushes reach with the weights
    it has been given so far, and `ahead` how far the wire's clock is ahead of the driver's.
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
        self.reached = self.ahead = 0
        self._admission: int | None = None  # the clock at which shard 0 has last let this life in
        self._welcomes: dict[int, Welcome] = {}
        self._acknowledged: dict[int, int] = {}
        self._outstanding = outstanding
        self._shards = shards
        self._job, self._worker = job, worker
        self._incarnation, self._build = incarnation, build

    @property
    def versions(self) -> tuple[int, ...]:
        """Of each shard the version that it had when it was last greeted, once this is ready."""
        return tuple(self._welcomes[shard].version for shard in range(self._shards))

    def had(self, shard: int) -> int:
        """The last push of this worker that `shard` had when it was last greeted."""
        return self._welcomes[shard].seq

    def may_send(self, shard: int, message: FromWorker) -> bool:
        """Until a shard has registered this worker, only the greeting may go there."""
        return shard in self.joined or isinstance(message, Hello | Join)

    def greet(self, shard: int, seq: int, now: float) -> Send:
        """Say hello to `shard`; `seq` is the worker's last push."""
        self.joined.discard(shard)
        self._outstanding.drop_greetings(shard)
        owed = [pending.message for pending in self._outstanding.to(shard)]
        pushes = [message.seq for message in owed if isinstance(message, Push)]
        self._acknowledged[shard] = min(pushes, default=seq + 1) - 1
        request = self._outstanding.count()
        hello = Hello(request, self._job, self._worker, self._incarnation, PROTOCOL, self._build)
        return self._outstanding.keep(shard, request, hello, (), now)

    def welcomed(self, shard: int, reply: Welcome, now: float) -> list[Send]:
        """`shard` has said what it has of this worker; raises GiveUp where that is too little."""
        self.boots[shard] = reply.boot
        self._welcomes[shard] = reply
        if self.ready is not None:
            self._check_memory(shard, reply)
        if self._admission is not None:
            return [self._join(shard, self._admission, now)]
        if len(self._welcomes) < self._shards or self._joining(0):
            return []
        return [self._join(0, 0, now)]

    def admitted(self, shard: int, reply: Joined, now: float) -> tuple[list[Send], Ready | None]:
        """`shard` has registered this worker, who was not ready; is now, if it was the last."""
        self.joined.add(shard)
        if self._admission is None:
            assert shard == 0, "shard 0 admits first"
            self._admission = reply.clock
            sends = [self._join(other, reply.clock, now) for other in range(1, self._shards)]
            if sends:
                return sends, None
        if len(self.joined) == self._shards:
            behind = min(self._welcomes.values(), key=lambda welcome: welcome.seq)
            self.ready = Ready(behind.seq, behind.step, self._admission, behind.lease_s)
            self.reached = self._admission
        return [], self.ready

    def readmitted(self, shard: int, reply: Joined, now: float) -> tuple[int, list[Send]]:
        """It was ready, and `shard` has it back; how far shard 0 sees it overtaken, and the Joins.

        Whatever has been asked at the clock before is to be asked anew.
        """
        self.joined.add(shard)
        behind = reply.clock - self.reached if shard == 0 else 0
        if behind <= 0:
            return 0, []
        self._admission = reply.clock
        # As one: if Ctrl-C came between, the next greeting would count it twice.
        self.ahead, self.reached = self.ahead + behind, reply.clock
        return behind, [
            self._join(other, reply.clock, now)
            for other in range(1, self._shards)
            if other in self.joined or self._joining(other)
        ]

    def follow(self, former: "Registration") -> None:
        """Once ready, count as `former` did with other shards, or from beside the others there.

        That is if they have gone on beyond what this worker has told and been given already.
        """
        assert self.ready is not None, "the driver waits for Ready first"
        self.ahead = former.ahead + max(0, self.ready.clock - former.reached)

    def _check_memory(self, shard: int, reply: Welcome) -> None:
        """A shard that comes back must still have every push it had acknowledged when greeted."""
        acknowledged = self._acknowledged[shard]
        if reply.seq < acknowledged:
            raise GiveUp(
                f"shard {shard} came back at push {reply.seq} of {self._worker} but had"
                f" acknowledged {acknowledged}: resume the job from its last snapshot"
            )

    def _join(self, shard: int, clock: int, now: float) -> Send:
        request = self._outstanding.count()
        boot = self.boots[shard]
        join = Join(request, self._job, self._worker, self._incarnation, boot, clock)
        return self._outstanding.keep(shard, request, join, (), now)

    def _joining(self, shard: int) -> bool:
        return any(isinstance(owed.message, Join) for owed in self._outstanding.to(shard))
