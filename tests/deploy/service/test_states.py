"""The states of a job: the table, and a random walk of users, runners and crashes through it."""

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deploy.runner.job_folder import AttemptOutcome, End
from deploy.service.states import (
    ATTEMPTED,
    HOLDING,
    LONGEST_RETRY_S,
    MAX_FRUITLESS,
    TERMINAL,
    TRANSITIONS,
    Ending,
    JobState,
    QueuedJob,
    Quota,
    Verb,
    after_end,
    after_event,
    after_verb,
    next_state,
    obstacles,
    retry_delay_s,
    schedule,
    states_for,
)
from tests.support.state_diagram import PICTURE, picture

EVENTS = ("checking", "starting", "running", "degraded", "restored", "ended", "notice")


def outcome(end: End, code: str = "error") -> AttemptOutcome:
    return AttemptOutcome(attempt=1, nonce="n", end=end, ended=0.0, code=code, message="why")


def reached(start: JobState) -> set[JobState]:
    """All states that can follow from `start`."""
    found: set[JobState] = set()
    ahead = [start]
    while ahead:
        new = TRANSITIONS[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_terminal_states_are_final_and_every_other_one_can_end() -> None:
    """From each state that is not terminal, every terminal state can be reached."""
    assert set(TRANSITIONS) == set(JobState)
    for state in JobState:
        if state in TERMINAL:
            assert not TRANSITIONS[state]
        else:
            assert reached(state) >= TERMINAL, state


def edges() -> Iterable[tuple[JobState, JobState]]:
    """Every transition that an event, a verb or the end of an attempt asks for."""
    for state in JobState:
        for kind in EVENTS:
            if (to := after_event(state, kind)) is not None:
                yield state, to
        for verb in Verb:
            if (to := after_verb(state, verb)) is not None:
                yield state, to
        if state in ATTEMPTED:
            for found in (None, *(outcome(end) for end in End)):
                for cancelled in (False, True):
                    yield state, after_end(state, found, cancelled=cancelled).to


def test_no_other_transition_is_asked_for() -> None:
    """What the rules ask for is in the table."""
    assert [(a, b) for a, b in edges() if b not in TRANSITIONS[a]] == []


@pytest.mark.parametrize(
    ("state", "end", "cancelled", "to"),
    [
        (JobState.CHECKING, End.FAILED, False, JobState.FAILED),
        (JobState.RUNNING, End.FAILED, False, JobState.STOPPING),
        (JobState.RUNNING, End.RETRY, False, JobState.RECOVERING),
        (JobState.RUNNING, None, False, JobState.RECOVERING),
        (JobState.RUNNING, End.STOPPED, False, JobState.RECOVERING),
        (JobState.PAUSING, End.STOPPED, False, JobState.PAUSED),
        (JobState.PAUSING, None, False, JobState.PAUSED),
        (JobState.PAUSING, End.SUCCEEDED, False, JobState.STOPPING),
        (JobState.STOPPING, End.SUCCEEDED, True, JobState.SUCCEEDED),
        (JobState.STOPPING, None, True, JobState.CANCELLED),
        (JobState.STOPPING, End.FAILED, False, JobState.FAILED),
        (JobState.STOPPING, None, False, JobState.FAILED),
    ],
)
def test_the_end_of_an_attempt(
    state: JobState, end: End | None, cancelled: bool, to: JobState
) -> None:
    """The next state follows from the present one, the outcome, and whether a user cancelled."""
    found = outcome(end) if end is not None else None
    assert after_end(state, found, cancelled=cancelled).to is to


def test_a_job_that_makes_no_progress_fails() -> None:
    """Five attempts without a newer snapshot are enough; four are not, nor five of another end."""
    again = Ending(JobState.RECOVERING, "infrastructure", "lost")
    assert next_state(again, MAX_FRUITLESS - 1) == again
    verdict = next_state(again, MAX_FRUITLESS)
    assert (verdict.to, verdict.code) == (JobState.FAILED, "thrashing")
    paused = Ending(JobState.PAUSED)
    assert next_state(paused, MAX_FRUITLESS) == paused


@given(st.integers(0, 2000), st.floats(0, 1, exclude_max=True))
def test_retries_back_off_to_a_limit(fruitless: int, jitter: float) -> None:
    """The delay is positive, and never more than a quarter above its limit."""
    assert 0 < retry_delay_s(fruitless, jitter) <= 1.25 * LONGEST_RETRY_S


def test_retries_double() -> None:
    """The jitter aside, each delay is twice the one before."""
    assert [retry_delay_s(n, 0.5) for n in (1, 2, 3, 9)] == [5.0, 10.0, 20.0, 300.0]


def test_the_queue_is_by_priority_then_age_and_nothing_overtakes() -> None:
    """A large job at the head is waited for, although a smaller one would fit."""
    queue = [QueuedJob("old", 2, 0), QueuedJob("new", 2, 0), QueuedJob("urgent", 3, 5)]
    assert schedule(queue, 7) == ["urgent", "old", "new"]
    assert schedule(queue, 5) == ["urgent", "old"]
    assert schedule(queue, 2) == []


def test_the_queue_names_what_holds_each_job_back() -> None:
    """A limit of the project holds up its jobs only; a job that waits for slots, all behind it."""
    queue = [
        QueuedJob("a", 2, 0, "vision"),
        QueuedJob("b", 1, 0, "vision"),
        QueuedJob("c", 1, 0),
        QueuedJob("d", 4, 0),
        QueuedJob("e", 1, 0),
        QueuedJob("first", 1, 5),
    ]
    assert list(obstacles(queue, 4, {"vision": Quota(workers=1)}).items()) == [
        ("first", ""),
        ("a", "it has 2 workers, and the project's limit leaves 1"),
        ("b", "an earlier job of the project waits for a limit of the project"),
        ("c", ""),
        ("d", "it needs 4 slots, and the service has 2 free"),
        ("e", "an earlier job waits for slots"),
    ]
    reached = obstacles(queue[:1], 4, {"vision": Quota(jobs=0)})
    assert reached == {"a": "the project's limit on running jobs is reached"}


def test_an_end_without_an_outcome_has_the_last_error_as_its_reason() -> None:
    """The log is all that is known of it; an outcome is believed before it."""
    ending = after_end(JobState.RUNNING, None, cancelled=False, last_words="MemoryError")
    assert ending.reason == "the runner ended without an outcome: MemoryError"
    told = after_end(JobState.RUNNING, outcome(End.RETRY), cancelled=False, last_words="noise")
    assert told.reason == "why"


def test_verbs_name_their_states() -> None:
    """A refusal can say in which states a verb applies."""
    assert states_for(Verb.RESUME) == [JobState.PAUSED]
    assert states_for(Verb.SNAPSHOT) == [JobState.RUNNING, JobState.DEGRADED]
    assert states_for(Verb.RESHARD) == states_for(Verb.SNAPSHOT)
    assert set(states_for(Verb.SET)).isdisjoint(TERMINAL)
    assert set(states_for(Verb.CLONE)) == set(JobState)
    assert not set(states_for(Verb.CANCEL)) & (TERMINAL | {JobState.STOPPING})


class JobLife(RuleBasedStateMachine):
    """One job: a scheduler, a user, a runner that may end in any way at any time."""

    def __init__(self) -> None:
        super().__init__()
        self.state = JobState.QUEUED
        self.cancelled = False
        self.runner = False
        self.fruitless = 0
        self.ended_as: JobState | None = None

    def enter(self, to: JobState) -> None:
        assert to in TRANSITIONS[self.state], f"{self.state} to {to}"
        self.state = to
        if to in TERMINAL:
            self.ended_as = to

    @rule()
    def start(self) -> None:
        to = {JobState.QUEUED: JobState.CHECKING, JobState.RECOVERING: JobState.STARTING}.get(
            self.state
        )
        if to is not None:
            assert not self.runner, "no second runner"
            self.enter(to)
            self.runner = True

    @precondition(lambda self: self.runner)
    @rule(kind=st.sampled_from(EVENTS))
    def report(self, kind: str) -> None:
        to = after_event(self.state, kind)
        if to is not None:
            self.enter(to)

    @rule(verb=st.sampled_from(list(Verb)))
    def ask(self, verb: Verb) -> None:
        to = after_verb(self.state, verb)
        assert (to is None) == (self.state not in states_for(verb)) or verb in {
            Verb.CLONE,
            Verb.SNAPSHOT,
            Verb.RESHARD,
            Verb.SET,
        }
        if to is not None:
            self.cancelled |= verb is Verb.CANCEL
            self.enter(to)

    @precondition(lambda self: self.runner)
    @rule(end=st.sampled_from([None, *End]), newer=st.booleans())
    def end(self, end: End | None, newer: bool) -> None:
        """The runner is gone, with or without an outcome, and nothing of it is left."""
        self.runner = False
        self.fruitless = 1 if newer else self.fruitless + 1
        found = outcome(end) if end is not None else None
        verdict = after_end(self.state, found, cancelled=self.cancelled)
        if verdict.to is JobState.STOPPING:
            self.enter(JobState.STOPPING)
            verdict = after_end(self.state, found, cancelled=self.cancelled)
        verdict = next_state(verdict, self.fruitless)
        if verdict.to is JobState.FAILED and self.state not in {
            JobState.CHECKING,
            JobState.STOPPING,
        }:
            self.enter(JobState.RECOVERING)
        self.enter(verdict.to)

    @invariant()
    def a_runner_has_a_state_that_holds_slots(self) -> None:
        assert not self.runner or self.state in ATTEMPTED
        assert self.state in HOLDING or not self.runner

    @invariant()
    def terminal_is_final(self) -> None:
        assert self.ended_as in (None, self.state)

    @invariant()
    def a_cancelled_job_does_not_train_again(self) -> None:
        assert not self.cancelled or self.state in TERMINAL | {JobState.STOPPING}


TestJobLife = JobLife.TestCase


def test_the_diagram_is_current() -> None:
    """The picture in the documentation shows this table; its module draws it again."""
    assert PICTURE.read_text() == picture()
