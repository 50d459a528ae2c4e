"""The states of a job: a table of transitions, and the rules that choose among them.

This module is pure: it has no clock, no files and no database. Three rules keep jobs safe:

- A state changes by a transition of `TRANSITIONS` and by nothing else.
- Terminal states are final. What arrives later is an event, no transition.
- An attempt counts as ended only if its process is gone: silence is no evidence.
"""

import math
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from deploy.runner.job_folder import AttemptOutcome, End
from shards.plurals import format_count


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "QUEUED"
    CHECKING = "CHECKING"
    STARTING = "STARTING"
    RUNNING = "RUNNING"
    DEGRADED = "DEGRADED"
    PAUSING = "PAUSING"
    PAUSED = "PAUSED"
    RECOVERING = "RECOVERING"
    STOPPING = "STOPPING"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Verb(StrEnum):
    """An order that a user may give to a job."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    SNAPSHOT = "snapshot"
    RESHARD = "reshard"
    SET = "set"
    CLONE = "clone"


TERMINAL = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
TRAINING = frozenset({JobState.RUNNING, JobState.DEGRADED})
ATTEMPTED = frozenset(
    {JobState.CHECKING, JobState.STARTING, *TRAINING, JobState.PAUSING, JobState.STOPPING}
)
"""States in which an attempt is under way, or has just ended."""
HOLDING = ATTEMPTED | {JobState.RECOVERING}
"""States in which a job holds its slots."""

TRANSITIONS: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.CHECKING, JobState.PAUSED, JobState.CANCELLED}),
    JobState.CHECKING: frozenset(
        {JobState.STARTING, JobState.FAILED, JobState.RECOVERING, JobState.STOPPING}
    ),
    JobState.STARTING: frozenset({JobState.RUNNING, JobState.RECOVERING, JobState.STOPPING}),
    JobState.RUNNING: frozenset(
        {JobState.DEGRADED, JobState.PAUSING, JobState.RECOVERING, JobState.STOPPING}
    ),
    JobState.DEGRADED: frozenset(
        {JobState.RUNNING, JobState.PAUSING, JobState.RECOVERING, JobState.STOPPING}
    ),
    JobState.PAUSING: frozenset({JobState.PAUSED, JobState.STOPPING}),
    JobState.PAUSED: frozenset({JobState.QUEUED, JobState.CANCELLED}),
    JobState.RECOVERING: frozenset(
        {JobState.STARTING, JobState.PAUSED, JobState.FAILED, JobState.CANCELLED}
    ),
    JobState.STOPPING: TERMINAL,
    **dict.fromkeys(TERMINAL, frozenset[JobState]()),
}

_BETWEEN = frozenset({JobState.QUEUED, JobState.PAUSED, JobState.RECOVERING})
"""States in which a job has no attempt, and will have another one."""

_ON_EVENT = {
    (JobState.CHECKING, "starting"): JobState.STARTING,
    (JobState.STARTING, "running"): JobState.RUNNING,
    (JobState.RUNNING, "degraded"): JobState.DEGRADED,
    (JobState.DEGRADED, "restored"): JobState.RUNNING,
}

_ON_VERB = {
    Verb.CANCEL: {
        **dict.fromkeys(
            (JobState.QUEUED, JobState.PAUSED, JobState.RECOVERING), JobState.CANCELLED
        ),
        **dict.fromkeys(ATTEMPTED - {JobState.STOPPING}, JobState.STOPPING),
    },
    Verb.PAUSE: {
        **dict.fromkeys((JobState.QUEUED, JobState.RECOVERING), JobState.PAUSED),
        **dict.fromkeys(TRAINING, JobState.PAUSING),
    },
    Verb.RESUME: {JobState.PAUSED: JobState.QUEUED},
}

MAX_FRUITLESS = 5
"""Attempts in a row without a newer snapshot after which a job has failed."""
FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0


class Ending(NamedTuple):
    """The next state of a job after an attempt; `code` and `reason` say why."""

    to: JobState
    code: str = ""
    reason: str = ""


def after_event(state: JobState, kind: str) -> JobState | None:
    """The state that a runner's event leads to; None if it changes nothing."""
    return _ON_EVENT.get((state, kind))


def after_verb(state: JobState, verb: Verb) -> JobState | None:
    """The state that a user's verb leads to; None if the verb does not apply in this state."""
    return _ON_VERB.get(verb, {}).get(state)


def states_for(verb: Verb) -> list[JobState]:
    """The states in which a verb applies, in the order of the table."""
    if verb is Verb.CLONE:
        return list(JobState)
    if verb in {Verb.SNAPSHOT, Verb.RESHARD}:
        return [state for state in JobState if state in TRAINING]
    if verb is Verb.SET:
        return [state for state in JobState if state in TRAINING | _BETWEEN]
    return [state for state in JobState if state in _ON_VERB[verb]]


def after_end(
    state: JobState, outcome: AttemptOutcome | None, *, cancelled: bool, last_words: str = ""
) -> Ending:
    """The next state of a job in `state` after an attempt that ended with `outcome`, if with any.

    `cancelled`: a user has cancelled the job. From STOPPING the next state is terminal; for that,
    no process of the job may be left. `last_words` is the last error in the attempt's log, the only
    cause that is known of an attempt without an outcome.
    """
    end = outcome.end if outcome is not None else End.RETRY
    silent = "the runner ended without an outcome" + (f": {last_words}" if last_words else "")
    message = outcome.message if outcome is not None else silent
    code = outcome.code if outcome is not None else "infrastructure"
    if state is JobState.STOPPING:
        if end is End.SUCCEEDED:
            return Ending(JobState.SUCCEEDED, reason=message)
        if cancelled:
            return Ending(JobState.CANCELLED, reason="cancelled by a user")
        return Ending(JobState.FAILED, code, message)
    if end in {End.SUCCEEDED, End.FAILED}:
        to = (
            JobState.FAILED
            if state is JobState.CHECKING and end is End.FAILED
            else JobState.STOPPING
        )
        return Ending(to, code, message)
    if state is JobState.PAUSING:
        return Ending(JobState.PAUSED, reason=message)
    return Ending(JobState.RECOVERING, code or "stopped", message)


def next_state(verdict: Ending, fruitless: int) -> Ending:
    """The verdict, or FAILED for a job that has recovered too often without a newer snapshot."""
    if verdict.to is JobState.RECOVERING and fruitless >= MAX_FRUITLESS:
        reason = f"{fruitless} attempts without a newer snapshot; the last: {verdict.reason}"
        return Ending(JobState.FAILED, "thrashing", reason)
    return verdict


def retry_delay_s(fruitless: int, jitter: float, first_s: float = FIRST_RETRY_S) -> float:
    """Seconds before attempt `fruitless` + 1 in a row; `jitter` in [0, 1) spreads jobs out."""
    delay = min(LONGEST_RETRY_S, first_s * 2.0 ** min(30, max(0, fruitless - 1)))
    return delay * (0.75 + 0.5 * jitter)


class QueuedJob(NamedTuple):
    """A queued job, as the scheduler sees it."""

    id: str
    slots: int
    priority: int
    project: str = ""


class QueuePosition(msgspec.Struct, frozen=True, kw_only=True):
    """A job's `position` among the `length` jobs of the queue, counted from 1.

    `reason` says which limit keeps it there; empty if it is about to start.
    """

    position: int
    length: int
    reason: str

    def __str__(self) -> str:
        return f"{self.position} of {self.length} in the queue: {self.reason or 'it starts next'}"


class Quota(NamedTuple):
    """The remaining quota of a project: jobs, and workers of them together."""

    jobs: float = math.inf
    workers: float = math.inf


def schedule(
    queued: list[QueuedJob], free: int, quotas: Mapping[str, Quota] = MappingProxyType({})
) -> list[str]:
    """The ids of the jobs to start, of `queued` in order of age, when `free` slots are left.

    Higher priority first, then age. A job that does not fit is waited for: smaller jobs behind it
    may not starve it. A job that its project's quota keeps back holds up that project only.
    """
    return [job for job, obstacle in obstacles(queued, free, quotas).items() if not obstacle]


def obstacles(
    queued: list[QueuedJob], free: int, quotas: Mapping[str, Quota] = MappingProxyType({})
) -> dict[str, str]:
    """The obstacle to the start of each queued job, in words; empty for those that may start.

    The jobs are in the order of the queue. The rules are those of `schedule`.
    """
    causes: dict[str, str] = {}
    quotas, blocked, full = dict(quotas), set[str](), False
    for job in sorted(queued, key=lambda job: -job.priority):
        quota = quotas.get(job.project, Quota())
        if full:
            causes[job.id] = "an earlier job waits for slots"
        elif job.project in blocked:
            causes[job.id] = "an earlier job of the project waits for a limit of the project"
        elif cause := _exceeds(job, quota):
            blocked.add(job.project)
            causes[job.id] = cause
        elif job.slots > free:
            full = True
            causes[job.id] = (
                f"it needs {format_count(job.slots, 'slot')}, and the service has {free} free"
            )
        else:
            free -= job.slots
            quotas[job.project] = Quota(quota.jobs - 1, quota.workers - job.slots)
            causes[job.id] = ""
    return causes


def _exceeds(job: QueuedJob, quota: Quota) -> str:
    """The limit of its project that a job would exceed, in words; empty if it fits."""
    if quota.jobs < 1:
        return "the project's limit on running jobs is reached"
    if quota.workers < job.slots:
        workers = format_count(job.slots, "worker")
        return f"it has {workers}, and the project's limit leaves {max(0, quota.workers):g}"
    return ""
