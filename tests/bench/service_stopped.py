"""Stop the runner of a real job for a while with SIGSTOP: nothing may be concluded from it.

    python -m tests.bench.service_stopped [--seconds 600]

The exit status is 1 unless the alert `silent` came, the state stayed, no second runner was started,
and the job trained on after SIGCONT.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench.report import save
from tests.bench.service_kills import Trial
from tests.support import tiny_job

_LIVE = {"RUNNING", "DEGRADED"}
_PATIENCE_S = 300.0


def run(folder: Path, seconds: float) -> dict[str, Any]:
    """Play the trial; returns its figures."""
    solver = tiny_job.write_job(folder)
    trial = Trial(folder, seed=1)
    try:
        more = {"max_iter": 10**7, "snapshot_every": "5s", "snapshot_keep": 3}
        trial.submit(solver, shards_in="processes", **more)
        (job,) = trial.jobs
        assert trial.until(lambda states: states == ["RUNNING"]), trial.states()
        (runner,) = trial.processes(job, "deploy.runner")
        found = _watched(trial, job, runner, seconds)
        steps = _steps(trial, job)
        trains = _until(lambda: _steps(trial, job) > steps)
        over = _until(lambda: "silent" not in trial.client.get(f"/jobs/{job}")["alerts"])
        last = trial.client.get(f"/jobs/{job}")
        return {
            **found, "stopped_s": seconds, "doubled": trial.doubled, "trains_afterwards": trains,
            "alert_over": over, "attempt": last["attempt"], "state_afterwards": last["state"],
        }  # fmt: skip
    finally:
        trial.end()


def _watched(trial: Trial, job: str, runner: int, seconds: float) -> dict[str, Any]:
    """Stop the runner for this time; returns the alert and the states that were seen."""
    states: set[str] = set()
    alerted_s: float | None = None
    begun = time.monotonic()
    os.kill(runner, signal.SIGSTOP)
    try:
        while (passed := time.monotonic() - begun) < seconds:
            row = trial.client.get(f"/jobs/{job}")
            states.add(row["state"])
            if "silent" in row["alerts"] and alerted_s is None:
                alerted_s = passed
            trial.count_runners()
            time.sleep(0.5)
    finally:
        os.kill(runner, signal.SIGCONT)
    return {"alert_after_s": alerted_s, "states": sorted(states)}


def _steps(trial: Trial, job: str) -> int:
    return int(trial.client.get(f"/jobs/{job}")["head"].get("steps", 0))


def _until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + _PATIENCE_S
    while not (found := holds()) and time.monotonic() < end:
        time.sleep(0.5)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    with tempfile.TemporaryDirectory() as folder:
        found = run(Path(folder), parser.parse_args().seconds)
    save("service_stopped", found)
    print(found)
    good = (
        found["alert_after_s"] is not None
        and set(found["states"]) <= _LIVE
        and not found["doubled"]
        and found["trains_afterwards"]
        and found["alert_over"]
        and found["attempt"] == 1
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
