"""What compressed pushes leave behind, in the hands of a client: saved, kept, and gone on with.

The residual belongs to one push number (worker_state.py). A client saves it to a file, has it kept
for a snapshot of the shards (residual_writer.py), and a later life of the worker takes it up: it
restores the residual, and makes the pushes again that its shards have forgotten. What is to be sent
for them is made here; sending is the client's.
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
    """What keeps the residual; raises BadInput for `what`, where pushes are not compressed."""
    if session.cargo.feedback is None:
        raise BadInput(f"{what}: expected compressed pushes, which leave a residual; got none")
    return session.cargo.feedback


def state_of(
    session: Session, step: int, clock: int, base: int, pushes: Sequence[Repeated] = ()
) -> WorkerState:
    """Whose residual this session's is, where its driver stands at `step` and `clock`."""
    push = session.cargo.compression.push
    assert push is not None, "there is a residual"
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
    """The file of a former life; raises BadInput where it is damaged, or another worker's."""
    feedback_of(session, "restore")
    state, arrays = load_state(path)
    check(state, session, f"worker state {path}")
    return state, arrays


def check(state: WorkerState, session: Session, what: str) -> None:
    """Raises BadInput naming `what` where `state` is no state of this session's worker."""
    state.check(state_of(session, 0, 0, 0), what)


def kept(
    session: Session,
    step: int,
    clock: int,
    base: int,
    pushes: Sequence[reshard_client.CarriedPush] = (),
) -> tuple[WorkerState, Arrays]:
    """What a snapshot of the shards at push `base` wants of this worker; the arrays are copies."""
    feedback = feedback_of(session, "keep")
    arrays = {name: array.copy() for name, array in feedback.state().items()}
    told = [_told(push) for push in pushes]
    arrays |= {one.name: push.gradient for one, push in zip(told, pushes, strict=True)}
    return state_of(session, step, clock, base, told), arrays


def restored(session: Session, state: WorkerState, arrays: Arrays) -> list[Repeated]:
    """Have `session` go on with this residual; the pushes that it is to make again, in order.

    Raises BadInput where the shards do not have the pushes that it follows.
    """
    if session.seq not in state.follows:
        after = f"push {state.seq}" if state.base == state.seq else f"{state.follows}"
        raise BadInput(
            f"worker state of {session.worker}: expected one after push {session.seq}, which is the"
            f" last that was applied, got one after {after}: go on without it"
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
    """A push that an earlier life made, to shards that have forgotten it: what is to be sent.

    `clock` and `step` hold once it is applied.
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


def _told(push: reshard_client.CarriedPush) -> Repeated:
    """A push as a worker's state tells of it."""
    message = push.message
    return Repeated(
        seq=message.seq,
        steps=message.steps,
        samples=message.samples,
        loss=message.loss if isfinite(message.loss) else 0.0,  # JSON has no infinity
        read_versions=push.read_versions,
    )
