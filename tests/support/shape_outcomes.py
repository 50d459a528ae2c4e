"""Outcomes of shapes with the trials that a test needs, in a folder as a run leaves them."""

from collections.abc import Sequence
from pathlib import Path

from deploy.experiments.shapes.base import Check, Preset, ShapeOutcome, keep
from deploy.experiments.trials import TrialResult


def keep_outcome(
    folder: Path,
    number: int,
    trials: Sequence[TrialResult],
    checks: Sequence[Check] = (),
    *,
    control: bool = False,
    registration: int = 1,
) -> None:
    """Write the outcome of a shape at the preset `ci`."""
    outcome = ShapeOutcome(
        number=number,
        title="t",
        source="s",
        preset=Preset.CI,
        control=control,
        checks=[*checks],
        trials=[*trials],
        registration=registration,
    )
    keep(outcome, folder)
