"""Plays the model of the training service for long: random users, runners and crashes, by seed.

    python -m tests.fuzz.service_model [--runs 10000] [--seed 1] [--steps 30]

See tests/support/service_model.py. A broken promise is printed with the shortest run that was found
to break it, and the exit status is 1.
"""

import argparse
import sys
import time
import traceback

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.support.service_model import ServiceModel

CHUNK = 500
"""Runs of one seed; the next ones have the next seed."""


def play(runs: int, number: int, steps: int) -> None:
    """Play runs of one seed; raises what breaks."""
    chosen = settings(
        max_examples=runs, stateful_step_count=steps, deadline=None, database=None,
        derandomize=False, phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(seed(number)(ServiceModel), settings=chosen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=30)
    chosen = parser.parse_args()
    done, number = 0, chosen.seed
    while done < chosen.runs:
        runs, begun = min(CHUNK, chosen.runs - done), time.process_time()
        print(f"seed {number}: {runs} runs", flush=True)
        try:
            play(runs, number, chosen.steps)
        except Exception:  # noqa: BLE001  # whatever breaks is the finding
            traceback.print_exc()
            print(f"FAILED with seed {number}", flush=True)
            return 1
        done, number = done + runs, number + 1
        print(f"{done} runs, the last in {time.process_time() - begun:.0f} s of CPU", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
