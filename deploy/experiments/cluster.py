"""The cluster of an experiment: how long steps take, and the links between workers and shards.

Everything random is drawn from streams of its own, one for each worker and purpose, which the
trial's seed decides. So what one worker draws does not depend on the order of events, and two
trials that differ in their strategy alone see the same step times.
"""

import math
from collections.abc import Iterator, Sequence
from enum import StrEnum

import msgspec
import numpy as np
from msgspec import structs

from ps.transport.link_model import Lane, LinkModel, LinkStream, link_of
from shards import argument_checks
from shards.errors import BadInput

HEADER_BYTES = 200
"""What a message takes besides its arrays."""

MAX_WORKERS = 4096
_BLOCK = 256


class Law(StrEnum):
    """The distribution of step times."""

    LOGNORMAL = "lognormal"
    EXPONENTIAL = "exponential"
    FIXED = "fixed"


class StepTimes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The seconds that a step takes: `mean_s` on average, by `law`, with `cv` for lognormal ones.

    A random share `slow_share` of the steps takes `slow_factor` times as long.
    """

    mean_s: float = 1.0
    law: Law = Law.LOGNORMAL
    cv: float = 0.1
    slow_share: float = 0.0
    slow_factor: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("mean_s", 0), ("cv", 0), ("slow_share", 0), ("slow_factor", 0)):
            expected = f"{least} or more"
            argument_checks.number(
                f"times: {name}", getattr(self, name), least=least, expected=expected
            )
        if self.slow_share > 1:
            raise BadInput("times: slow_share", expected="at most 1", got=f"{self.slow_share:g}")

    def __str__(self) -> str:
        spread = f", cv {self.cv:g}" if self.law is Law.LOGNORMAL else ""
        slow = f", {self.slow_share:.2%} of them {self.slow_factor:g}x" if self.slow_share else ""
        return f"of {self.mean_s:g} s {self.law}{spread}{slow}"

    def draws(self, seed: int, worker: int, factor: float = 1.0) -> Iterator[float]:
        """The times of one worker's steps in seconds, `factor` times as long."""
        dice = np.random.default_rng((seed, worker, 1))
        mean = self.mean_s * factor
        if self.law is Law.FIXED and not self.slow_share:
            while True:
                yield mean
        while True:
            yield from self._block(dice, mean).tolist()

    def _block(self, dice: np.random.Generator, mean: float) -> np.ndarray:
        match self.law:
            case Law.EXPONENTIAL:
                drawn = dice.exponential(mean, _BLOCK)
            case Law.LOGNORMAL:
                variance = math.log1p(self.cv**2)
                drawn = mean * dice.lognormal(-variance / 2, math.sqrt(variance), _BLOCK)
            case Law.FIXED:
                drawn = np.full(_BLOCK, mean)
        if self.slow_share:
            drawn[dice.random(_BLOCK) < self.slow_share] *= self.slow_factor
        return drawn


class WorkerKill(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The end of a worker at a virtual time, in seconds; without `back_s` it does not return.

    What it sent before still arrives. It returns `back_s` later as its next incarnation, which
    continues after its last push that the shards have applied. The shards wait for it until its
    lease has run out.
    """

    at_s: float
    worker: int
    back_s: float | None = None

    def __post_init__(self) -> None:
        argument_checks.number("cluster: kill: at_s", self.at_s, least=0, expected="0 or more")
        if self.back_s is not None:
            argument_checks.number(
                "cluster: kill: back_s", self.back_s, least=0, expected="0 or more"
            )


class LinkPartition(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A time, in virtual seconds, in which nothing leaves for or from a worker, or all of them.

    What is sent meanwhile leaves at its end; what was under way before it still arrives.
    """

    at_s: float
    for_s: float
    worker: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("at_s", self.at_s), ("for_s", self.for_s)):
            label = f"cluster: partitions: {name}"
            argument_checks.number(label, value, least=0, expected="0 or more")


class ClusterModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Workers, shards, their step times and links.

    A worker named in `stragglers`, as worker-3, takes that many times as long for every step.
    `link` is a text as in `downpour train --link`, or empty: then messages take no time. A worker
    named in `links` has that one in its place. `joins` has the seconds at which workers join that
    are not there from the start. `partitions` cut links for a time, shorter than `lease_s`, after
    which shards would let the workers go. A worker that is killed counts at the gate for `lease_s`.
    With `delays` the weights that a step sees are not those of its pull but of 0 to `delays` pulls
    earlier, each number equally likely, as Dai et al. 2018 delay updates.
    """

    workers: int = 8
    shards: int = 1
    times: StepTimes = StepTimes()
    link: str = ""
    stragglers: dict[str, float] = {}
    delays: int = 0
    links: dict[str, str] = {}
    joins: dict[str, float] = {}
    kill: tuple[WorkerKill, ...] = ()
    partitions: tuple[LinkPartition, ...] = ()
    lease_s: float = 10.0

    def __post_init__(self) -> None:
        argument_checks.whole("cluster: workers", self.workers, 1, MAX_WORKERS)
        argument_checks.whole("cluster: shards", self.shards, 1, 64)
        argument_checks.whole("cluster: delays", self.delays, 0, 1024)
        link_of(self.link or None)
        for part in ("stragglers", "links", "joins"):
            for name in getattr(self, part):
                self._check_name(part, name)
        for name, factor in self.stragglers.items():
            expected = "a factor above 0"
            argument_checks.number(f"cluster: stragglers: {name}", factor, expected=expected)
            if not factor > 0:
                raise argument_checks.wrong(f"cluster: stragglers: {name}", expected, factor)
        for name, link in self.links.items():
            try:
                link_of(link or None)
            except BadInput as error:
                raise error.within(f"cluster: links: {name}") from None
        for name, at_s in self.joins.items():
            argument_checks.number(f"cluster: joins: {name}", at_s, least=0, expected="0 or more")
        for kill in self.kill:
            argument_checks.whole("cluster: kill: worker", kill.worker, 0, self.workers - 1)
        argument_checks.number(
            "cluster: lease_s", self.lease_s, least=0.001, expected="0.001 or more"
        )
        for cut in self.partitions:
            if cut.worker is not None:
                argument_checks.whole(
                    "cluster: partitions: worker", cut.worker, 0, self.workers - 1
                )
            if cut.for_s >= self.lease_s:
                expected = f"less than lease_s, {self.lease_s:g}"
                raise argument_checks.wrong("cluster: partitions: for_s", expected, cut.for_s)

    def _check_name(self, part: str, name: str) -> None:
        if name not in {worker_name(number) for number in range(self.workers)}:
            raise BadInput(
                f"cluster: {part}",
                expected=f"worker-0 to worker-{self.workers - 1}",
                got=f"{name!r}",
            )

    @property
    def steady(self) -> bool:
        """True if all workers are there from start to end."""
        return not self.joins and not self.kill

    def share_of(self, worker: int) -> float:
        """The share of all steps that a worker takes if no worker waits."""
        speeds = [1 / self.stragglers.get(worker_name(each), 1.0) for each in range(self.workers)]
        return speeds[worker] / sum(speeds)

    def step_times(self, seed: int, worker: int) -> Iterator[float]:
        """The times of one worker's steps in seconds."""
        factor = self.stragglers.get(worker_name(worker), 1.0)
        return self.times.draws(seed, worker, factor)

    def ages(self, seed: int, worker: int) -> Iterator[int]:
        """The ages, in pulls, of the weights of one worker's steps."""
        dice = np.random.default_rng((seed, worker, 4))
        while True:
            yield from dice.integers(self.delays + 1, size=_BLOCK).tolist()

    def link_between(self, seed: int, worker: int, shard: int) -> "Link | None":
        """The link of a worker to a shard; None where messages take no time."""
        model = link_of(self.links.get(worker_name(worker), self.link) or None)
        cuts = [cut for cut in self.partitions if cut.worker in (None, worker)]
        if model is None and not cuts:
            return None
        return Link(model or LinkModel(), f"{seed} {worker} {shard}", cuts)


def worker_name(number: int) -> str:
    return f"worker-{number}"


class Link:
    """Both directions of one worker's connection to one shard, by the model of the transport.

    Messages sent at one instant travel together, so they share one delay. In `partitions` nothing
    leaves.
    """

    def __init__(
        self, model: LinkModel, seed: str, partitions: Sequence[LinkPartition] = ()
    ) -> None:
        self._cuts = sorted((cut.at_s, cut.at_s + cut.for_s) for cut in partitions)
        seeded = structs.replace(model, seed=0)
        seed = f"{model.seed} {seed}"
        self._up = LinkStream(Lane(seeded, f"{seed} outages", 0.0), f"{seed} up")
        self._down = LinkStream(Lane(seeded, f"{seed} outages", 0.0), f"{seed} down")

    def up(self, size: int, now: float) -> float:
        """When `size` bytes that the worker sends now reach the shard."""
        return self._up.enter(size, self._leaves(now))

    def down(self, size: int, now: float) -> float:
        """When `size` bytes that the shard sends now reach the worker."""
        return self._down.enter(size, self._leaves(now))

    def _leaves(self, now: float) -> float:
        """When a message that is sent now leaves: after the partitions that it falls into."""
        for begins, ends in self._cuts:
            if begins <= now < ends:
                now = ends
        return now
