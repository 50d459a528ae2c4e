"""LeNet as a job of a training service elsewhere, watched while parts of its cluster are killed."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.support.eventually import eventually

_WORKERS = 2
OPTIONS = ["--bind", "0.0.0.0", "--workers", str(_WORKERS), "--shards", "2"]
OPTIONS += ["--max-iter", str(10**6), "--snapshot-every", "5s"]
"""Of `downpour submit`: two workers, and more steps than anyone waits for."""
MORE_STEPS = 500
_WITHIN_S = 600.0
_ENDED = {"SUCCEEDED", "FAILED", "CANCELLED"}


class WatchedJob(NamedTuple):
    """A job, and how to reach it.

    `read` returns it as the service shows it, None while that does not answer; `set_steps` changes
    how many steps each worker takes; `read_summary` returns the text of its summary.json.
    """

    read: Callable[[], dict[str, Any] | None]
    set_steps: Callable[[int], object]
    read_summary: Callable[[], str]

    def read_steps(self) -> int:
        """The steps of all workers, as the service knows them; waits until it answers."""
        shown = eventually(self.read, because="the service answers")
        assert shown is not None
        return int(shown["head"].get("steps", 0))

    def await_steps(self, steps: int) -> None:
        """Wait until the job trains and has taken that many steps."""

        def trains() -> bool:
            shown = self.read()
            if shown is None:
                return False
            assert shown["state"] not in _ENDED, shown
            running = shown["state"] in {"RUNNING", "DEGRADED"}
            return running and shown["head"].get("steps", 0) >= steps

        eventually(trains, because=f"the job has taken {steps} steps", within_s=_WITHIN_S)

    def finish(self) -> None:
        """Let the job end soon; assert that its shards have applied every update once."""
        each = self.read_steps() // _WORKERS + MORE_STEPS
        self.set_steps(each)

        def read_ended() -> dict[str, Any] | None:
            shown = self.read()
            return shown if shown is not None and shown["state"] in _ENDED else None

        shown = eventually(read_ended, because="the job ends", within_s=_WITHIN_S)
        assert shown is not None
        assert shown["state"] == "SUCCEEDED", shown
        summary = json.loads(self.read_summary())
        updates, accuracy = summary["updates"], summary["test_accuracy"]
        print(
            f"{shown['attempt']} attempts, {updates} updates, accuracy {accuracy:.4f}", flush=True
        )
        assert updates == _WORKERS * each, summary
        assert accuracy > 0.97, summary
