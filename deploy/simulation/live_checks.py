"""Checks that a shard trains with the settings that operators chose, and never with older ones.

A shard follows a change from the moment when it has answered the operator: every update that it
applies later, and every pull that it answers, has these settings or newer ones, across deaths,
failovers and resharding. Each change is recorded before the operator sends it, so a shard with
settings that nobody asked for is detected, too. The bound of each pull is checked by the settings
in force, and not by the gate (invariants.py); the rates are those in the records of the updates,
which the reference model applies.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from deploy.simulation.invariants import Promise, Violation
from shards.messages import LiveSettings
from shards.shard import Shard


class FollowedSettings:
    """The settings that one shard has answered to follow, with its version at that moment."""

    def __init__(self, first: LiveSettings, proposed: Sequence[LiveSettings]) -> None:
        """`first` are those that the job began with; `proposed` grows with what operators ask."""
        self._first, self._proposed = first, proposed
        self._revision = 0
        self._bound = first.bound  # the one that the last answer to an operator names
        self._answered: list[tuple[int, int]] = []  # version and revision

    def note_answer(self, shard: Shard, settings: LiveSettings) -> None:
        """Note that the shard has answered an operator that it follows these settings."""
        self._answered.append((shard.version, settings.revision))
        self._bound = settings.bound
        self._revision = max(self._revision, settings.revision)

    def forget(self, shard: Shard) -> None:
        """Expect nothing of what was answered before: the shard has lost it."""
        self._answered.clear()
        self._revision, self._bound = shard.part.settings.revision, shard.part.settings.bound

    def hand_over(self, to: "FollowedSettings") -> None:
        """Expect of a successor what is expected of this shard."""
        to._revision, to._bound = max(self._revision, to._revision), self._bound

    def check(self, shard: Shard) -> None:
        """Check the settings with which a shard answers a worker."""
        settings = shard.part.settings
        if settings.revision < self._revision:
            raise Violation(
                Promise.SETTINGS,
                f"shard {shard.spec.shard} trains with revision {settings.revision} of the settings"
                f" after it has answered to follow {self._revision}",
            )
        if settings != self._first and settings not in self._proposed:
            raise Violation(
                Promise.SETTINGS,
                f"shard {shard.spec.shard} trains with {settings}, which nobody has asked for",
            )

    def check_rates(self, rows: NDArray[np.void], where: str) -> None:
        """Check that every update after an answer has the rate of these settings or later ones."""
        known = [self._first, *self._proposed]
        for version, revision in self._answered:
            allowed = [
                candidate.rate_factor for candidate in known if candidate.revision >= revision
            ]
            # A push without a part for this shard has no rate.
            later = rows[(rows["apply_version"] > version) & (rows["rate"] > 0)]
            if not set(later["rate"].tolist()) <= set(allowed):
                raise Violation(
                    Promise.SETTINGS,
                    f"{where} has applied updates after version {version} at rates"
                    f" {sorted(set(later['rate'].tolist()))}, expected {allowed}",
                )

    def loosest_bound(self, shard: Shard) -> int | None:
        """The loosest staleness bound that may be in force before the next answer; None is none.

        A shard takes several messages in one turn, and a copy holds answers back until its backup
        has them. So a lowered bound may be in the shard's settings before its answer, and the pulls
        that the shard served before the change are answered first.
        """
        bounds = self._bound, shard.part.settings.bound
        return None if None in bounds else max(bound for bound in bounds if bound is not None)

    @property
    def most(self) -> int | None:
        """The largest bound that was ever asked for; None if no bound was."""
        bounds = [settings.bound for settings in (self._first, *self._proposed)]
        return None if None in bounds else max(bound for bound in bounds if bound is not None)
