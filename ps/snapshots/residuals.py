"""The residual of compressed pushes in a client: saving it, and resuming with it.

The residual belongs to one push number (worker_state.py). A client saves it to a file, or has it
added to a snapshot of the shards (residual_writer.py). A restarted worker restores the residual,
and repeats the pushes that its shards have lost. This file makes the messages for them; the client
sends the messages.
"""

from collections.abc import Sequence
from math import isfinite
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ps.session import reshard_client
from ps.session.error_feedback import ErrorFeedback
from ps.session.events import Send
from ps.session.session import Session
from ps.snapshots.worker_state import Arrays, Repeated, WorkerState, load_state
from shards.errors import BadInput


def feedback_of(session: Session, what: str) -> ErrorFeedback:
    """The session's error feedback; raises BadInput naming `what` if pushes are not compressed."""
    if session.cargo.feedback is None:
        raise BadInput(f"{what}: expected compressed pushes, which leave a residual; got none")
    return session.cargo.feedback


def state_of(
    session: Session, step: int, clock: int, base: int, pushes: Sequence[Repeated] = ()
) -> WorkerState:
    """The worker state of this session, at its driver's `step` and `clock`."""
    push = session.cargo.compression.push
    assert push is not None, "a residual implies compressed pushes"
    return WorkerState(
        worker=session.worker,
        incarnation=session.incarnation,
        table=session.table.name,
        floats=session.table.size,
        push=push,
        seq=session.seq,
        step=step,
        clock=clock,
        base=base,
        pushes=tuple(pushes),
    )


def loaded(path: Path, session: Session) -> tuple[WorkerState, Arrays]:
    """Load the file of an earlier process; raises BadInput if damaged or another worker's."""
    feedback_of(session, "restore")
    state, arrays = load_state(path)
    check(state, session, f"worker state {path}")
    return state, arrays


def check(state: WorkerState, session: Session, what: str) -> None:
    """Raise BadInput naming `what` unless `state` is of this session's worker."""
    state.check(state_of(session, 0, 0, 0), what)


def kept(
    session: Session,
    step: int,
    clock: int,
    base: int,
    pushes: Sequence[reshard_client.CarriedPush] = (),
    *,
    windowed: bool = False,
) -> tuple[WorkerState, Arrays]:
    """This worker's state for a snapshot of the shards at push `base`; the arrays are copies.

    `windowed`: its clock rises by 1 for each push, else by the push's steps.
    """
    feedback = feedback_of(session, "keep")
    arrays = {name: array.copy() for name, array in feedback.state().items()}
    repeated = [_repeated(push, windowed) for push in pushes]
    arrays |= {one.name: push.gradient for one, push in zip(repeated, pushes, strict=True)}
    return state_of(session, step, clock, base, repeated), arrays


def restored(session: Session, state: WorkerState, arrays: Arrays) -> list[Repeated]:
    """Restore the residual into `session`; returns the pushes to repeat, in order.

    Raises BadInput if the shards are not at a push from which the state can resume.
    """
    if session.seq not in state.follows:
        after = f"push {state.seq}" if state.base == state.seq else f"{state.follows}"
        raise BadInput(
            f"worker state of {session.worker}: expected one after push {session.seq}, which is the"
            f" last that was applied, got one after {after}: continue without it"
        )
    feedback = feedback_of(session, "restore")
    feedback.restore({name: arrays[name] for name in feedback.state()})
    return [push for push in state.pushes if push.seq > session.seq]


def made_again(
    push: Repeated,
    gradient: NDArray[np.float32],
    session: Session,
    *,
    clock: int,
    step: int,
    now: float,
) -> tuple[int, list[Send]]:
    """Repeat a push of an earlier process to shards that have lost it; returns what to send.

    `clock` and `step` are those once it is applied.
    """
    read = reshard_client.versions(push.read_versions, session.map.shards)
    return session.push(
        gradient,
        [min(pair) for pair in zip(read, session.versions, strict=True)],
        clock=clock,
        step=step,
        steps=push.steps,
        samples=push.samples,
        loss=push.loss,
        rtt_s=0.0,
        wait_s=0.0,
        now=now,
        plain=True,
    )


def _repeated(push: reshard_client.CarriedPush, windowed: bool) -> Repeated:
    """The record of a push in a worker's state."""
    message = push.message
    return Repeated(
        seq=message.seq,
        steps=message.steps,
        ticks=1 if windowed else message.steps,
        samples=message.samples,
        loss=message.loss if isfinite(message.loss) else 0.0,  # JSON has no infinity
        read_versions=push.read_versions,
    )
