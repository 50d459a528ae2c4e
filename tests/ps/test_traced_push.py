"""The way of a push from the user's call to the weights and back, as a reader would follow it."""

import sys
import threading
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

import ps

ROOT = Path(ps.__file__).parents[1]
PACKAGES = tuple(f"{ROOT / name}/" for name in ("ps", "shards", "cupy_kernels"))
CALLS, FILES = 120, 32
PUSHES = 20


def trace_pushes(pushes: int) -> list[list[str]]:
    """The files of the functions that each push calls, in the worker's and the shard's thread.

    Each is traced from `step.push` over the end of the step to the acknowledgement, over TCP.
    """
    files: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGES):
            files.append(frame.f_code.co_filename)

    weights, traces = np.zeros(1000, np.float32), []
    threading.setprofile(note)  # of the shard's thread, which begins here
    try:
        with ps.local(weights, transport="tcp") as job, job.worker("w0") as me:
            threading.setprofile(None)
            for _ in range(pushes):
                with me.step() as step:
                    gradient = np.ones_like(step.pull())
                    files.clear()
                    sys.setprofile(note)
                    step.push(gradient)
                step.ack.result()
                sys.setprofile(None)
                traces.append(files.copy())
    finally:
        threading.setprofile(None)
        sys.setprofile(None)
    return traces


def test_a_push_is_short_to_follow() -> None:
    """From `step.push` to the weights and the acknowledgement it takes few calls in few files.

    The least of several pushes counts: now and then the shard also looks after its connections.
    A layer that only forwards costs a reader as much as one that works: fold it before you raise
    the limits.
    """
    pytest.importorskip("numba")  # a compiled loop is one call
    traces = trace_pushes(PUSHES)
    assert 0 < min(map(len, traces)) <= CALLS
    assert 0 < min(len(set(files)) for files in traces) <= FILES
