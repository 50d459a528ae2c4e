"""The options that `worker.run` and `worker.train` share: what watches a run and what ends it.

A run that Ctrl-C ends has weights, but they are not those that its caller asked for. A script that
continued would save them over better ones. So `run` and `train` raise `Interrupted`, which holds
them, unless the caller chose `on_interrupt="return"`.
"""

from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Protocol, TypeVar

from ps import path_checks
from ps.launch.launch_plan import check_log_folder
from worker.callbacks.base import Callback, check_callbacks
from worker.job.option_fields import Parsed, option
from worker.job.options import MAX_COUNT, TrainOptions
from worker.job.outcome import Outcome


class OnInterrupt(StrEnum):
    """The effect of Ctrl-C on a run, after a snapshot where `snapshots` says where."""

    RAISE = "raise"
    RETURN = "return"


class RunArguments(TrainOptions):
    """The keyword arguments that `run` and `train` share."""

    workers: int | None = option(
        "Workers; None: the partitions of the DataFrame.", default=None, least=1, most=MAX_COUNT
    )
    resume: str | Path | None = option(
        "What to continue from.", default=None, check=path_checks.place
    )
    snapshots: str | Path | None = option(
        "Where snapshots go.", default=None, check=path_checks.place
    )
    logs: str | Path | None = option(
        "Where shards keep logs.", default=None, check=path_checks.place
    )
    callbacks: Sequence[Callback] = option(
        "What watches the run, in order.", default=(), check=check_callbacks
    )
    progress: bool = option(
        "Show how far the run is, on a terminal or in a notebook.", default=True
    )
    on_interrupt: Parsed[OnInterrupt, str] = option(
        "What Ctrl-C does: raise worker.Interrupted, or return the weights of that moment.",
        default=OnInterrupt.RAISE,
    )

    def check(self) -> None:
        super().check()
        check_log_folder(self.logs, self.durability, self.label_option("logs"))


class Result(Protocol):
    """The result of `run` or `train`."""

    @property
    def outcome(self) -> Outcome:
        """The outcome of the job."""
        ...


AnyResult = TypeVar("AnyResult", bound=Result)


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a run early; `result` is what the run returns with the weights so far."""

    def __init__(self, result: Result) -> None:
        outcome = result.outcome
        steps = sum(status.steps for status in outcome.statuses[:1])
        hint = f"; resume from {outcome.snapshot}" if outcome.snapshot is not None else ""
        super().__init__(
            f"Ctrl-C after {steps} steps of all workers: the weights so far are in the exception's"
            f" `result`{hint}"
        )
        self.result = result


def unless_interrupted(result: AnyResult, on_interrupt: OnInterrupt) -> AnyResult:
    """The result of a run; raises Interrupted if Ctrl-C has ended it, unless it is to return."""
    if result.outcome.interrupted and on_interrupt is OnInterrupt.RAISE:
        raise Interrupted(result)
    return result
