"""The admin client: an operator's requests to a job's shards, which bypass the staleness gate.

It installs weights or a saved state, exports everything at one version, reads the weights and the
counters, and collects the records of applied updates. It blocks until all that it has asked is
answered.
"""

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeGuard

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from ps.closing_context import ClosingContext
from ps.cluster import Cluster, cluster_of
from ps.process_owner import BoundToProcess, OneUser, Opener
from ps.security.enrolment import operator_key
from ps.session import admin_plans
from ps.session.admin_plans import (
    Answer,
    Answers,
    Ask,
    Frames,
    Pause,
    Plan,
    Query,
    Question,
    Result,
    SettingsChange,
    Side,
)
from ps.session.events import Unreachable
from ps.transport.shard_sockets import Links
from shards import argument_checks, wire_format
from shards.errors import BadInput
from shards.ledger import Ledger
from shards.live_settings import check_factor
from shards.messages import (
    AskRecords,
    AskStatus,
    FromOperator,
    LiveSettings,
    Quiesce,
    Read,
    Records,
    Refusal,
    Remedy,
    Reply,
)
from shards.plurals import format_count
from shards.refusals import error_of
from shards.shard_state import WEIGHTS, SavedProgress, ShardState, array_name, empty_tables
from shards.shard_status import ShardStatus
from shards.update_records import RECORD

__all__ = ["AdminClient", "ShardState"]

UNCHANGED = "unchanged"

_RETRY_S = 2.0
_CHECK_S = 0.5


class AdminClient(BoundToProcess, ClosingContext):
    """Connections of an operator to every shard of a job; `patience_s` bounds the wait for each
    answer. A large state travels in many answers (shards/state_pieces.py). Not for use by two
    threads.

    `cluster` may be the path of a cluster file. While an answer is awaited, `check` is called
    regularly; it may raise the reason why none will come.
    """

    _is_a, _instead = "an admin client", "make one of the file of job.save there"

    def __init__(
        self,
        cluster: Cluster | str | Path,
        *,
        patience_s: float = 30.0,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        patience_s = argument_checks.seconds("patience_s", patience_s, endless=True)
        self.cluster = cluster = cluster_of(cluster)
        self._check = argument_checks.function("check", check, "a function without arguments")
        self._opener, self._user = Opener(), OneUser("admin client")
        self._links = Links(cluster.endpoints, keys=operator_key(cluster), cluster=cluster)
        self._links.await_connections(min(_RETRY_S, patience_s))
        self._patience_s = patience_s
        self._description = cluster.description
        self._owner = secrets.randbits(62)  # two operators must not have the same
        self._request = 0
        self._closed = False
        self._put_off: dict[int, str] = {}  # the reason why a shard does not answer yet, if given
        self._collected = [0] * len(cluster.endpoints)
        self._newest = [0] * len(cluster.endpoints)  # the newest version with a collected record

    def install(self, arena: NDArray[np.float32]) -> None:
        """Give every shard its part of fresh weights, finite float32 of shape (layout.size,)."""
        layout = self.cluster.layout
        subject = f"install in table{'s' * (len(layout.names) > 1)} {', '.join(layout.names)}"
        arena = argument_checks.array(subject, arena, layout.size)
        if not np.isfinite(arena).all():
            raise BadInput(
                subject,
                expected="finite weights",
                got=f"NaN or infinity at {int(np.argmin(np.isfinite(arena)))}",
            )
        for shard, keys in enumerate(self.cluster.map.ranges):
            arrays = {
                array_name(section.table, WEIGHTS): arena[
                    section.start : section.start + len(section.keys)
                ]
                for section in layout.sections(keys)
            } | empty_tables(layout)
            self.restore(shard, ShardState(SavedProgress(0, 0, 0, Ledger()), arrays))

    def restore(self, shard: int, state: ShardState, *, keep_workers: bool = False) -> None:
        """Give one shard a state that `export` returned.

        With `keep_workers` the workers of that state stay registered: they are still alive.
        """
        shard = argument_checks.whole("shard", shard, 0, self.cluster.map.shards - 1)
        keep_workers = argument_checks.flag("keep_workers", keep_workers)
        argument_checks.instance("state", state, ShardState, "a ShardState, as `export` returns")
        carry_out(admin_plans.restore(self.side, shard, state, keep_workers=keep_workers), self)

    def export(self, *, then_resume: bool = False) -> list[ShardState]:
        """Every shard's state, each at one version; all shards are asked at the same time.

        With `then_resume` each quiesced shard resumes as soon as it has exported.
        """
        then_resume = argument_checks.flag("then_resume", then_resume)
        resume = Quiesce(0, self.cluster.job, 0.0, self._owner)
        behind: Question | None = (
            (lambda request: structs.replace(resume, request=request)) if then_resume else None
        )
        return carry_out(admin_plans.export(self.side, behind=behind), self)

    def quiesce(self, seconds: float) -> dict[str, int]:
        """Bring all shards to the same pushes of every worker, and hold them there for `seconds`.

        Returns each worker's last push. What the shards `export` then is one consistent cut of the
        whole job. Further pushes wait, while pulls are answered; the shards resume after `seconds`,
        or at `resume`. While another operator quiesces them, this one waits. Raises Unreachable
        when the shards have not come together within `patience_s`, Retry when another operator
        still quiesces them then, and Resynchronise when they have handed the job over.
        """
        seconds = argument_checks.seconds("seconds", seconds, zero=True)
        return carry_out(admin_plans.quiesce(self.side, seconds), self)

    def resume(self) -> None:
        """End this client's quiesce; that of another client stays in force."""
        carry_out(admin_plans.resume(self.side), self)

    def set(
        self, *, staleness: float | str | None = UNCHANGED, rate_factor: float | None = None
    ) -> LiveSettings:
        """Change settings of the job while it trains, and return those that are now in force.

        `staleness` is the bound in steps (None or inf: none); `rate_factor` multiplies the rates of
        the job's schedules, which continue from there. What is not given stays. Every update after
        this has returned uses the new rate, and every pull the new bound. Raises BadInput for
        settings that the job cannot follow, such as a bound below what its strategy needs; GiveUp
        where another operator has changed the settings at the same time; Retry where one quiesces
        the shards for longer than `patience_s`.
        """
        sets_bound = staleness != UNCHANGED
        bound = argument_checks.staleness_bound("staleness", staleness) if sets_bound else None
        if rate_factor is not None:
            rate_factor = check_factor("rate_factor", rate_factor)
        change = SettingsChange(sets_bound, bound, rate_factor)
        return carry_out(admin_plans.change_settings(self.side, change), self)

    def spread(self, settings: LiveSettings) -> None:
        """Give settings that `set` has returned to the shards that lack them.

        A shard lacks them if the operator that changed them has died before it had asked all.
        """
        carry_out(admin_plans.spread_settings(self.side, settings), self)

    def hand_over(self, successors: Cluster, cut: Mapping[str, int]) -> None:
        """Send the workers of shards that are quiesced at `cut` to their successors.

        Raises GiveUp or Retry when the quiesce has expired: then nothing has changed.
        """
        encoded = cluster_of(successors).for_workers().encode()
        argument_checks.instance("cut", cut, Mapping, "what `quiesce` returns")  # type: ignore[type-abstract]
        cuts = [cut] * self.cluster.map.shards
        settings = max((status.settings for status in self.status()), key=lambda one: one.revision)
        carry_out(admin_plans.hand_over(self.side, encoded, cuts, settings), self)

    @property
    def side(self) -> Side:
        """This job's shards, in the form that admin_plans.py uses."""
        cluster = self.cluster
        identity = cluster.job, cluster.layout, cluster.map
        return Side(*identity, self._owner, self._patience_s, self._description)

    def read(self) -> NDArray[np.float32]:
        """The current weights as a new arena, float32 of shape (layout.size,)."""
        arena = self.cluster.layout.empty()
        for shard in range(self.cluster.map.shards):
            _, frames = self._ask(shard, lambda request: Read(request, self.cluster.job))
            self.cluster.map.fill(arena, shard, frames)
        return arena

    def status(self) -> list[ShardStatus]:
        """Each shard's counters since it was installed, and each worker's state at it."""
        answers = self._ask_all(lambda request: AskStatus(request, self.cluster.job))
        return [wire_format.decode_state(frames[0], ShardStatus) for _, frames in answers]

    def records(self) -> list[NDArray[np.void]]:
        """For each shard the records (dtype RECORD) of updates applied since the last call."""
        fresh = []
        for shard in range(self.cluster.map.shards):
            reply, frames = self._ask(
                shard,
                lambda request, shard=shard: AskRecords(  # type: ignore[misc]
                    request,
                    self.cluster.job,
                    self._collected[shard],
                ),
            )
            assert isinstance(reply, Records)
            rows = np.frombuffer(frames[0], RECORD)
            self._collected[shard] = reply.first + len(rows)
            fresh.append(rows if self.cluster.coordinator is None else self._unseen(shard, rows))
        return fresh

    def _unseen(self, shard: int, rows: NDArray[np.void]) -> NDArray[np.void]:
        """The rows not collected yet; a copy that took over has its own numbering of records."""
        unseen = rows[rows["apply_version"] > self._newest[shard]]
        self._newest[shard] = int(unseen["apply_version"].max(initial=self._newest[shard]))
        return unseen

    def close(self) -> None:
        """Drop the connections."""
        self._closed = True
        if self._opener.is_this_process:
            self._links.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        shards = format_count(self.cluster.map.shards, "shard")
        where = self.cluster.where(0)
        return f"<admin client of job {self.cluster.name}: {state}, {shards} at {where}>"

    def _ask(self, shard: int, question: Question) -> Answer:
        return self._ask_each((Query(shard, question),))[0]

    def _ask_all(self, question: Question) -> list[Answer]:
        return self._ask_each([Query(n, question) for n in range(self.cluster.map.shards)])

    def _ask_each(self, queries: Sequence[Query]) -> list[Answer]:
        """Repeat each question until it is answered; every question may be repeated safely."""
        self._opener.check("the admin client", "make another with ps.AdminClient(job.cluster)")
        if self._closed:
            raise BadInput("admin client: it is closed; make another")
        with self._user:
            return self._ask_until_answered(queries)

    def _ask_until_answered(self, queries: Sequence[Query]) -> list[Answer]:
        asked: dict[int, Query] = {}
        for query in queries:
            self._request += 2  # the number before it is for `query.behind`
            asked[self._request] = query
        answers: dict[int, Answer] = {}
        self._put_off.clear()
        give_up_at, wait_s = time.monotonic() + self._patience_s, _RETRY_S
        while missing := {n: query for n, query in asked.items() if n not in answers}:
            now = time.monotonic()
            if now >= give_up_at:
                query = next(iter(missing.values()))
                raise Unreachable(
                    f"shard {query.shard} at {self._links.where(query.shard)} has not answered"
                    f" {type(query.question(0)).__name__.lower()} for {self._patience_s:g} s"
                    f"{self._put_off.get(query.shard, '')}",
                    query.shard,
                )
            for number, query in missing.items():
                # Built for each attempt: the question may depend on the copy that is asked.
                together: list[tuple[FromOperator, Frames]]
                together = [(query.question(number), query.frames)]
                if query.behind is not None:
                    together.append((query.behind(number - 1), ()))
                self._links.send_together(query.shard, together)
            before = len(answers)
            self._collect(answers, asked, min(now + wait_s, give_up_at))
            wait_s *= 2  # on a slow link the first copy may still be on its way
            if len(answers) > before:
                give_up_at = time.monotonic() + self._patience_s
        return [answers[number] for number in asked]

    def _collect(
        self, answers: dict[int, Answer], asked: Mapping[int, Query], until: float
    ) -> None:
        """Add the answers that arrive before `until`, or until all have, by request number.

        Returns early when another copy has become a shard's primary, which has not been asked.
        """
        while len(answers) < len(asked) and (now := time.monotonic()) < until:
            for origin, reply, frames in self._links.receive(min(until - now, _CHECK_S)):
                if self._elsewhere(reply):
                    self._put_off[origin] = f": {reply.text}"
                    continue
                if isinstance(reply, Refusal) and reply.request in (0, *asked):
                    raise error_of(reply)  # 0: the shard could not even read the question
                if reply.request in asked and asked[reply.request].shard == origin:
                    answers.setdefault(reply.request, (reply, frames))
            if len(answers) < len(asked):
                self._check()
            moved, _ = self._links.changes()
            for shard in moved:
                self._collected[shard] = 0
            if moved:
                return

    def _elsewhere(self, reply: Reply) -> TypeGuard[Refusal]:
        """Return whether a copy refuses because it is no primary: the links will soon follow the
        primary.
        """
        refused = isinstance(reply, Refusal) and reply.remedy is Remedy.RETRY
        return refused and self.cluster.coordinator is not None


def carry_out(plan: Plan[Result], *clients: AdminClient) -> Result:
    """Run a plan: ask each of its questions through the admin client of its side."""
    by_side = {client.side: client for client in clients}
    try:
        step = next(plan)
        while True:
            try:
                answers = _carry_out_step(step, by_side)
            except BaseException as error:  # noqa: BLE001  # the plan tidies up and raises it again
                step = plan.throw(error)
            else:
                step = plan.send(answers)
    except StopIteration as end:
        result: Result = end.value
        return result


def _carry_out_step(step: Ask | Pause, by_side: Mapping[Side, AdminClient]) -> Answers:
    if isinstance(step, Pause):
        time.sleep(step.seconds)
        return Answers(time.monotonic(), ())
    answers = by_side[step.of]._ask_each(step.queries)
    return Answers(time.monotonic(), answers)
