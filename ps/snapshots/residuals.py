"""The residual of compressed pushes in a client: saving it, and resuming with it.

The residual belongs to one push number (worker_state.py). A client saves it to a file, or writes it
for a snapshot of the shards, together with what its driver keeps (residual_writer.py). A restarted
worker restores it, unless the shards hold later pushes of this worker: those have sent a part of
it.
"""

from pathlib import Path

from ps.session.error_feedback import ErrorFeedback
from ps.session.session import Session
from ps.snapshots.worker_state import (
    NO_STATE,
    Arrays,
    OwnState,
    WorkerState,
    load_state,
    save_state,
)
from shards.errors import BadInput


def feedback_of(session: Session, label: str) -> ErrorFeedback:
    """The session's error feedback; raises BadInput naming `label` if pushes are not compressed."""
    if session.encoder.feedback is None:
        raise BadInput(label, expected="compressed pushes, which leave a residual", got="none")
    return session.encoder.feedback


def state_of(
    session: Session, step: int, clock: int, driver_state: OwnState = NO_STATE
) -> WorkerState:
    """The worker state of this session, at its driver's `step` and `clock`, with its own state."""
    pushes = {name: compression.push for name, compression in session.encoder.compression.items()}
    return WorkerState(
        worker=session.worker,
        incarnation=session.incarnation,
        floats={table.name: table.size for table in session.layout.tables},
        push={name: push for name, push in pushes.items() if push is not None},
        seq=session.seq,
        step=step,
        clock=clock,
        own=driver_state.values,
    )


def load(path: Path, session: Session) -> tuple[WorkerState, Arrays]:
    """Load the file of an earlier process; raises BadInput if damaged or another worker's."""
    feedback_of(session, "restore")
    state, arrays = load_state(path)
    state.check(state_of(session, 0, 0), f"worker state {path}")
    return state, arrays


def save(path: Path, session: Session, step: int, clock: int) -> None:
    """Write the residual to a file for `load`; every push must have been acknowledged.

    A later incarnation of the worker can restore it if the shards' last push is still this one;
    then no part of a gradient is lost. Raises BadInput where pushes are not compressed.
    """
    feedback = feedback_of(session, "save")
    save_state(path, state_of(session, step, clock), feedback.state())


def copy_state(
    session: Session, step: int, clock: int, driver_state: OwnState | None
) -> tuple[WorkerState, Arrays] | None:
    """This worker's present state, with its driver's; the arrays of the residual are copies.

    None if the driver has none now.
    """
    if driver_state is None:
        return None
    feedback = session.encoder.feedback
    residual = feedback.state() if feedback is not None else {}
    arrays = {name: array.copy() for name, array in residual.items()}
    return state_of(session, step, clock, driver_state), {**arrays, **driver_state.name_arrays()}


def restore(session: Session, state: WorkerState, arrays: Arrays) -> None:
    """Restore the residual into `session` before its first push.

    After a rollback, or from a snapshot, it may belong to a later push than the shards hold. Raises
    BadInput if it is another worker's, if later pushes have sent a part of it, or where pushes are
    not compressed: the worker can continue without it.
    """
    feedback = feedback_of(session, "restore")
    state.check(state_of(session, 0, 0), f"residual of {state.worker}")
    if state.seq < session.seq:
        raise BadInput(
            f"worker state of {session.worker}",
            expected=f"one after push {session.seq}, which is the last that was applied",
            got=f"one after push {state.seq}: continue without it",
        )
    feedback.restore({name: arrays[name] for name in feedback.state()})
