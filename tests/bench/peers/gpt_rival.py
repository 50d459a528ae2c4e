"""The race of small GPTs that `bench_diloco_rivals` runs: its setting, and a contender's report.

PyTorch is imported by a contender alone.

A contender is a program, `python -m tests.bench.peers.NAME '{"seconds": ...}'`, which prints a line
of seconds, tokens and loss now and then, and ends by itself.
"""

import sys
import time
from typing import Any

import msgspec

TESTED = 100


class Race(msgspec.Struct, frozen=True):
    """Three learners at speeds 1:2:6 for `seconds`, the fastest at a step in `pace_s`.

    Learners exchange every `period` steps. One is killed after `kill_s`, and is started again
    `down_s` later.
    """

    seconds: float
    pace_s: float
    kill_s: float
    down_s: float = 5.0
    period: int = 12
    small: bool = False


def setting() -> Race:
    """The race that the command line describes."""
    return msgspec.json.decode(sys.argv[1].encode(), type=Race)


def load(race: Race) -> tuple[Any, Any, Any]:
    """The model, the rows to train on and those to test."""
    from deploy.examples.gpt_torch import DOCS, make_model, read_rows

    rows, tested = read_rows(DOCS)
    return make_model(small=race.small), rows, tested[:TESTED]


def report(began: float, tokens: int, model: Any, tested: Any) -> None:
    """Print the loss that the model has now; the time of the test is the learner's own."""
    import torch

    from deploy.examples.gpt_torch import loss_of

    with torch.no_grad():
        loss = loss_of(model, tested).item()
    print(f"{time.monotonic() - began:.1f} {tokens} {loss:.4f}", flush=True)
