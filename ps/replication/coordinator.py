"""The coordinator: decides which process is which copy of each shard. A pure state machine.

Theory (Vertical Paxos, Lamport, Malkhi and Zhou 2009, with one coordinator). Copies carry the data;
the coordinator holds only configurations, so its load is small. While it is away, training
continues; only failover waits. Its rules:

- A new configuration is *pending* until its primary accepts it. The coordinator's record is durable
  before any assignment is sent, so a restarted coordinator never contradicts an earlier one.
- Until then the copies of the last confirmed configuration stay promotable: its primary always,
  its backup if it was reported in sync. No other copy is ever promotable.
- A copy that has been silent for `silence_s` counts as dead. Time in which this coordinator did not
  listen, because it was suspended or wrote its record, is not silence: the beats of that time are
  read later, one copy after another. A restarted process has a new boot number, so a restart is a
  death even if no silence was noticed.
- A false suspicion costs a copy, never an acknowledged push: the suspect can commit nothing once
  its successor has accepted, and retires when it learns of the successor.
- A broken connection is as good a reason for suspicion as silence, and comes sooner:
  `report_death`.
- "In sync" is kept for the epoch in which it was reported: a late beat cannot undo it.

The driver passes beats and broken connections to the coordinator, and calls `tick` at least every
`silence_s / 3`. It gives the same time to all messages that it found waiting together. It carries
out a `Decision` in this order: make the record durable, then send the assignments.
"""

from collections.abc import Iterable
from math import inf

import msgspec

from shards.replication_messages import Assignment, Beat, Configuration


class ShardGroup(msgspec.Struct, frozen=True):
    """The configurations of one shard: the part of the record that must survive.

    `settled` is the last confirmed configuration, `in_sync` says whether its backup holds all
    committed pushes, and `pending` is the configuration that its primary has yet to accept.
    """

    settled: Configuration | None = None
    in_sync: bool = False
    pending: Configuration | None = None

    @property
    def newest(self) -> Configuration | None:
        return self.pending or self.settled

    @property
    def promotable(self) -> tuple[int, ...]:
        """The boot numbers of copies that hold every acknowledged push, the primary first."""
        if self.settled is None:
            return ()
        if self.in_sync and self.settled.backup is not None:
            return self.settled.primary, self.settled.backup
        return (self.settled.primary,)


class Decision(msgspec.Struct, frozen=True):
    """The work of the driver: save `record` unless it is None, then send the assignments."""

    record: dict[int, ShardGroup] | None
    assignments: list[tuple[int, Assignment]]


class Coordinator:
    """The state, with the transitions `receive_beat`, `report_death` and `tick`.

    Times are monotonic seconds.
    """

    def __init__(
        self, shards: int, *, silence_s: float = 0.3, record: dict[int, ShardGroup] | None = None
    ) -> None:
        self.silence_s = silence_s
        self.groups = {shard: ShardGroup() for shard in range(shards)} | (record or {})
        self._seen: dict[int, float] = {}
        self._shard_of: dict[int, int] = {}
        self._accepted: dict[int, int] = {}
        self._saved = dict(self.groups)
        self._listened_at: float | None = None

    def receive_beat(self, beat: Beat, now: float) -> Decision:
        """Take a beat; its sender is always sent the newest configuration of its shard."""
        self._forgive_pause(now)
        self._seen[beat.boot] = now
        self._shard_of[beat.boot] = beat.shard
        self._accepted[beat.boot] = max(beat.epoch, self._accepted.get(beat.boot, 0))
        before = self.groups[beat.shard]
        self._confirm(beat)
        self._mend(beat.shard, now)
        recipients = {beat.boot}
        if self.groups[beat.shard] != before:
            recipients.update(self._members(beat.shard))
        return self._decision(beat.shard, recipients)

    def report_death(self, boot: int, now: float) -> Decision:
        """Count a process as dead at once, as after a long silence, until its next beat."""
        shard = self._shard_of.get(boot)
        if shard is None:
            return Decision(None, [])
        self._forgive_pause(now)
        self._seen[boot] = -inf
        before = self.groups[shard]
        self._mend(shard, now)
        recipients = self._members(shard) if self.groups[shard] != before else set()
        return self._decision(shard, recipients)

    def tick(self, now: float) -> Decision:
        """Replace the copies that have been silent for too long."""
        changed = []
        self._forgive_pause(now)
        for shard, before in list(self.groups.items()):
            self._mend(shard, now)
            if self.groups[shard] != before:
                changed.append(shard)
        assignments = [
            notice for shard in changed for notice in self._notices(shard, self._members(shard))
        ]
        return Decision(self._take_unsaved(), assignments)

    def under_replicated(self, now: float) -> list[int]:
        """The shards without a backup and without a spare process that could become one."""
        return [
            shard
            for shard, group in self.groups.items()
            if (group.newest is None or group.newest.backup is None)
            and self._spare(shard, now) is None
        ]

    def _forgive_pause(self, now: float) -> None:
        """Do not count a pause of this coordinator as silence of the copies."""
        if self._listened_at is None:
            for shard in self.groups:
                for boot in self._members(shard):
                    self._seen.setdefault(boot, now)  # known from the record, not heard from yet
            self._listened_at = now
        pause_s = now - self._listened_at
        if pause_s > self.silence_s / 2:
            self._seen = {boot: seen + pause_s for boot, seen in self._seen.items()}
        self._listened_at = now

    # --- rules ------------------------------------------------------------------------------------

    def _confirm(self, beat: Beat) -> None:
        """Confirm the configuration that its primary has accepted; note a backup in sync."""
        group = self.groups[beat.shard]
        newest = group.newest
        if newest is None or (beat.boot, beat.epoch) != (newest.primary, newest.epoch):
            return
        if group.pending is not None:
            self.groups[beat.shard] = ShardGroup(settled=group.pending)
        elif beat.in_sync:
            self.groups[beat.shard] = msgspec.structs.replace(group, in_sync=True)

    def _mend(self, shard: int, now: float) -> None:
        """Propose the next configuration where the newest one has lost or can gain a copy."""
        group = self.groups[shard]
        newest = group.newest
        if newest is None or (group.settled is None and not self._alive(newest.primary, now)):
            # No push was acknowledged yet, so any process may become the primary.
            spare = self._spare(shard, now)
            if spare is not None:
                self._propose(shard, spare, None)
            return
        if not self._alive(newest.primary, now):
            successors = [boot for boot in group.promotable if self._alive(boot, now)]
            if successors and successors[0] != newest.primary:
                self._propose(shard, successors[0], None)
            return
        if newest.backup is not None and not self._alive(newest.backup, now):
            self._propose(shard, newest.primary, None)
        elif newest.backup is None and group.pending is None:
            spare = self._spare(shard, now)
            if spare is not None:
                self._propose(shard, newest.primary, spare)

    def _propose(self, shard: int, primary: int, backup: int | None) -> None:
        group = self.groups[shard]
        epoch = group.newest.epoch + 1 if group.newest else 1
        pending = Configuration(shard, epoch, primary, backup)
        self.groups[shard] = msgspec.structs.replace(group, pending=pending)

    # --- processes --------------------------------------------------------------------------------

    def _alive(self, boot: int, now: float) -> bool:
        return now - self._seen.get(boot, now) < self.silence_s

    def _spare(self, shard: int, now: float) -> int | None:
        """A living process of this shard that has never been its primary or backup."""
        group = self.groups[shard]
        members = {*self._of(group.settled), *self._of(group.pending)}
        spares = [
            boot
            for boot, of in self._shard_of.items()
            if of == shard
            and boot not in members
            and not self._accepted[boot]
            and self._alive(boot, now)
        ]
        return min(spares, default=None)

    @staticmethod
    def _of(configuration: Configuration | None) -> tuple[int, ...]:
        if configuration is None:
            return ()
        pair = configuration.primary, configuration.backup
        return tuple(boot for boot in pair if boot is not None)

    def _members(self, shard: int) -> set[int]:
        group = self.groups[shard]
        return {*self._of(group.settled), *self._of(group.pending)}

    # --- output -----------------------------------------------------------------------------------

    def _decision(self, shard: int, recipients: Iterable[int]) -> Decision:
        return Decision(self._take_unsaved(), self._notices(shard, recipients))

    def _notices(self, shard: int, recipients: Iterable[int]) -> list[tuple[int, Assignment]]:
        """The pending configuration for its members, the settled one for the other recipients."""
        group = self.groups[shard]
        notices = []
        for boot in sorted(recipients):
            pending = group.pending is not None and group.pending.holds(boot)
            configuration = group.pending if pending else group.settled
            if configuration is not None:
                notices.append((boot, Assignment(configuration, confirmed=not pending)))
        return notices

    def _take_unsaved(self) -> dict[int, ShardGroup] | None:
        if self.groups == self._saved:
            return None
        self._saved = dict(self.groups)
        return dict(self.groups)
