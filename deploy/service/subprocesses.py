"""Commands of `downpour` that the service runs in processes of their own.

Their code is large, and what they read may be: the service stays small.
"""

import subprocess
import sys
import threading

from deploy.service.problems import Problem
from shards.errors import BadInput, GiveUp

_COMMAND = (sys.executable, "-c", "from deploy.cli.app import main; main()")
_LONGEST_S = 600.0
_one_at_a_time = threading.Lock()
_requests = threading.BoundedSemaphore(4)  # other threads of the service answer other requests


def output_of(*words: str) -> bytes:
    """Run a command to its end, one at a time; returns its standard output.

    Raises BadInput or GiveUp with its last line, as the command itself ended, GiveUp for one that
    takes too long, and the problem 503 when several requests wait already.
    """
    if not _requests.acquire(blocking=False):
        raise Problem(503, "busy", f"{words[0]}: other requests wait for it; repeat this later")
    try:
        with _one_at_a_time:
            done = subprocess.run(
                [*_COMMAND, *words], capture_output=True, check=False, timeout=_LONGEST_S
            )
    except subprocess.TimeoutExpired:
        raise GiveUp(f"{' '.join(words[:2])}: no result for {_LONGEST_S:g} s") from None
    finally:
        _requests.release()
    if done.returncode:
        text = done.stderr.decode(errors="replace").strip().splitlines()
        line = text[-1].removeprefix("downpour: error: ") if text else f"status {done.returncode}"
        raise (BadInput if done.returncode == 2 else GiveUp)(line)
    return done.stdout
