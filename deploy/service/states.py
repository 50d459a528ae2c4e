"""The states of a job: a table of transitions, and the rules that choose among them.

This module is pure: it has no clock, no files and no database. Three rules keep jobs safe:

- A state changes by a transition of `TRANSITIONS` and by nothing else.
- Terminal states are final. What arrives later is an event, no transition.
- An attempt counts as ended only if its process is gone: silence is no evidence.
"""

from enum import StrEnum
from typing import NamedTuple

from deploy.runner.job_folder import AttemptOutcome, End


class State(StrEnum):
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
    """What a user may ask of a job."""

    CANCEL = "cancel"
    PAUSE = "pause"
    RESUME = "resume"
    SNAPSHOT = "snapshot"
    CLONE = "clone"


TERMINAL = frozenset({State.SUCCEEDED, State.FAILED, State.CANCELLED})
TRAINING = frozenset({State.RUNNING, State.DEGRADED})
ATTEMPTED = frozenset({State.CHECKING, State.STARTING, *TRAINING, State.PAUSING, State.STOPPING})
"""States in which an attempt is under way, or has just ended."""
HOLDING = ATTEMPTED | {State.RECOVERING}
"""States in which a job holds its slots."""

TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.CHECKING, State.PAUSED, State.CANCELLED}),
    State.CHECKING: frozenset({State.STARTING, State.FAILED, State.RECOVERING, State.STOPPING}),
    State.STARTING: frozenset({State.RUNNING, State.RECOVERING, State.STOPPING}),
    State.RUNNING: frozenset({State.DEGRADED, State.PAUSING, State.RECOVERING, State.STOPPING}),
    State.DEGRADED: frozenset({State.RUNNING, State.PAUSING, State.RECOVERING, State.STOPPING}),
    State.PAUSING: frozenset({State.PAUSED, State.STOPPING}),
    State.PAUSED: frozenset({State.QUEUED, State.CANCELLED}),
    State.RECOVERING: frozenset({State.STARTING, State.PAUSED, State.FAILED, State.CANCELLED}),
    State.STOPPING: TERMINAL,
    **dict.fromkeys(TERMINAL, frozenset[State]()),
}

_ON_EVENT = {
    (State.CHECKING, "starting"): State.STARTING,
    (State.STARTING, "running"): State.RUNNING,
    (State.RUNNING, "degraded"): State.DEGRADED,
    (State.DEGRADED, "restored"): State.RUNNING,
}

_ON_VERB = {
    Verb.CANCEL: {
        **dict.fromkeys((State.QUEUED, State.PAUSED, State.RECOVERING), State.CANCELLED),
        **dict.fromkeys(ATTEMPTED - {State.STOPPING}, State.STOPPING),
    },
    Verb.PAUSE: {
        **dict.fromkeys((State.QUEUED, State.RECOVERING), State.PAUSED),
        **dict.fromkeys(TRAINING, State.PAUSING),
    },
    Verb.RESUME: {State.PAUSED: State.QUEUED},
}

MOST_FRUITLESS = 5
"""Attempts in a row without a newer snapshot after which a job has failed."""
FIRST_RETRY_S, LONGEST_RETRY_S = 5.0, 300.0


class Ending(NamedTuple):
    """The next state of a job whose attempt is over; `code` and `reason` say why."""

    to: State
    code: str = ""
    reason: str = ""


def after_event(state: State, kind: str) -> State | None:
    """The state that a runner's event leads to; None if it changes nothing."""
    return _ON_EVENT.get((state, kind))


def after_verb(state: State, verb: Verb) -> State | None:
    """The state that a user's verb leads to; None if the verb does not apply in this state."""
    return _ON_VERB.get(verb, {}).get(state)


def states_for(verb: Verb) -> list[State]:
    """The states in which a verb applies, in the order of the table."""
    if verb is Verb.CLONE:
        return list(State)
    if verb is Verb.SNAPSHOT:
        return [state for state in State if state in TRAINING]
    return [state for state in State if state in _ON_VERB[verb]]


def after_end(state: State, outcome: AttemptOutcome | None, *, cancelled: bool) -> Ending:
    """The next state of a job in `state` whose attempt has ended with `outcome`, if with any.

    `cancelled`: a user has cancelled the job. From STOPPING the next state is terminal; for that,
    no process of the job may be left.
    """
    end = outcome.end if outcome is not None else End.RETRY
    message = outcome.message if outcome is not None else "the runner ended without an outcome"
    code = outcome.code if outcome is not None else "infrastructure"
    if state is State.STOPPING:
        if end is End.SUCCEEDED:
            return Ending(State.SUCCEEDED, reason=message)
        if cancelled:
            return Ending(State.CANCELLED, reason="cancelled by a user")
        return Ending(State.FAILED, code, message)
    if end in {End.SUCCEEDED, End.FAILED}:
        to = State.FAILED if state is State.CHECKING and end is End.FAILED else State.STOPPING
        return Ending(to, code, message)
    if state is State.PAUSING:
        return Ending(State.PAUSED, reason=message)
    return Ending(State.RECOVERING, code or "stopped", message)


def next_state(verdict: Ending, fruitless: int) -> Ending:
    """The verdict, or FAILED for a job that has recovered too often without a newer snapshot."""
    if verdict.to is State.RECOVERING and fruitless >= MOST_FRUITLESS:
        reason = f"{fruitless} attempts without a newer snapshot; the last: {verdict.reason}"
        return Ending(State.FAILED, "thrashing", reason)
    return verdict


def retry_delay_s(fruitless: int, jitter: float, first_s: float = FIRST_RETRY_S) -> float:
    """Seconds before attempt `fruitless` + 1 in a row; `jitter` in [0, 1) spreads jobs out."""
    delay = min(LONGEST_RETRY_S, first_s * 2.0 ** min(30, max(0, fruitless - 1)))
    return delay * (0.75 + 0.5 * jitter)


class Waiting(NamedTuple):
    """A queued job, as the scheduler sees it."""

    id: str
    slots: int
    priority: int


def schedule(queued: list[Waiting], free: int) -> list[str]:
    """The ids of the jobs to start, of `queued` in order of age, when `free` slots are left.

    Higher priority first, then age. A job that does not fit is waited for: smaller jobs behind it
    may not starve it.
    """
    chosen = []
    for job in sorted(queued, key=lambda job: -job.priority):
        if job.slots > free:
            break
        free -= job.slots
        chosen.append(job.id)
    return chosen
