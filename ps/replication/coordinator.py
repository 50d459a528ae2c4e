"""The coordinator: decides which process is which copy of each shard. A pure state machine.

Theory (Vertical Paxos, Lamport, Malkhi and Zhou 2009, with one coordinator). Copies carry the data;
the coordinator holds only configurations, so it is asked rarely, and while it is away training goes
on and only failover waits. Its rules:

- A new configuration is *pending* until its primary accepts it, and the coordinator's record is
  durable before anyone is told: whatever it has said survives it.
- Until then the holders of the last confirmed configuration stay promotable: its primary always,
  its backup if that was reported in sync. Nobody else ever is.
- A copy that has been silent for `silence_s` is taken for dead. Only silence that this coordinator
  listened to counts: what is said while it is stopped, or writes its record, it hears later, from
  one copy after another. A restarted process has a new boot number, so a restart is a death even
  when nobody missed it.
- A false suspicion costs a copy, never an acknowledged push: the suspect can commit nothing once
  its successor has accepted, and retires when it hears of it.
- A connection that broke is a reason for suspicion as good as silence, and comes sooner: `bury`.
- "In sync" is kept for the epoch in which it was said: a beat that comes late cannot undo it.

A driver hands it beats, tells whose connection broke, calls `tick` at least every `silence_s / 3`,
gives one time to all that it found waiting together, and does what a `Decision` says in this order:
write the record where it survives, then send the assignments.
"""

from collections.abc import Iterable
from math import inf

import msgspec

from shards.replication_messages import Assignment, Beat, Configuration


class ShardGroup(msgspec.Struct, frozen=True):
    """What is decided about one shard: the part of the record that must survive.

    `settled` is the last confirmed configuration, `in_sync` whether its backup holds everything
    that is committed; `pending` is the one that its primary has yet to accept.
    """

    settled: Configuration | None = None
    in_sync: bool = False
    pending: Configuration | None = None

    @property
    def newest(self) -> Configuration | None:
        return self.pending or self.settled

    @property
    def promotable(self) -> tuple[int, ...]:
        """Who holds every acknowledged push, the primary first."""
        if self.settled is None:
            return ()
        if self.in_sync and self.settled.backup is not None:
            return self.settled.primary, self.settled.backup
        return (self.settled.primary,)


class Decision(msgspec.Struct, frozen=True):
    """What a driver is to do: save `record` unless it is None, then send each boot its word."""

    record: dict[int, ShardGroup] | None
    assignments: list[tuple[int, Assignment]]
    lonely: list[int]
    """Shards without a backup, and nobody to become one: a process would be welcome."""


class Coordinator:
    """The state, and its transitions `hear`, `bury`, `tick`. Times are monotonic seconds."""

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
        """Take a beat; its sender is always told the newest configuration of its shard."""
        self._forgive_pause(now)
        self._seen[beat.boot] = now
        self._shard_of[beat.boot] = beat.shard
        self._accepted[beat.boot] = max(beat.epoch, self._accepted.get(beat.boot, 0))
        before = self.groups[beat.shard]
        self._confirm(beat)
        self._mend(beat.shard, now)
        told = {beat.boot}
        if self.groups[beat.shard] != before:
            told.update(self._members(beat.shard))
        return self._decision(beat.shard, told)

    def report_death(self, boot: int, now: float) -> Decision:
        """Take a process for dead at once, as after a long silence, until it is heard again."""
        shard = self._shard_of.get(boot)
        if shard is None:
            return Decision(None, [], [])
        self._forgive_pause(now)
        self._seen[boot] = -inf
        before = self.groups[shard]
        self._mend(shard, now)
        told = self._members(shard) if self.groups[shard] != before else set()
        return self._decision(shard, told)

    def tick(self, now: float) -> Decision:
        """Look who has been silent for too long."""
        changed = []
        self._forgive_pause(now)
        for shard, before in list(self.groups.items()):
            self._mend(shard, now)
            if self.groups[shard] != before:
                changed.append(shard)
        assignments = [
            word for shard in changed for word in self._notices(shard, self._members(shard))
        ]
        return Decision(self._unsaved(), assignments, self._lonely(now))

    def _forgive_pause(self, now: float) -> None:
        """Silence counts only while this coordinator was there to hear."""
        if self._listened_at is None:
            for shard in self.groups:
                for boot in self._members(shard):
                    self._seen.setdefault(boot, now)  # known from the record, and not heard yet
            self._listened_at = now
        pause_s = now - self._listened_at
        if pause_s > self.silence_s / 2:
            self._seen = {boot: seen + pause_s for boot, seen in self._seen.items()}
        self._listened_at = now

    # --- rules ------------------------------------------------------------------------------------

    def _confirm(self, beat: Beat) -> None:
        """Confirm what its primary has accepted; note a backup that is in sync."""
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
            # Nothing is held yet: anybody may begin.
            spare = self._spare(shard, now)
            if spare is not None:
                self._propose(shard, spare, None)
            return
        if not self._alive(newest.primary, now):
            heirs = [boot for boot in group.promotable if self._alive(boot, now)]
            if heirs and heirs[0] != newest.primary:
                self._propose(shard, heirs[0], None)
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

    # --- who there is -----------------------------------------------------------------------------

    def _alive(self, boot: int, now: float) -> bool:
        return now - self._seen.get(boot, now) < self.silence_s

    def _spare(self, shard: int, now: float) -> int | None:
        """A living process of this shard that has never had a part in it."""
        group = self.groups[shard]
        taken = {*self._of(group.settled), *self._of(group.pending)}
        spares = [
            boot
            for boot, of in self._shard_of.items()
            if of == shard
            and boot not in taken
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

    def _lonely(self, now: float) -> list[int]:
        return [
            shard
            for shard, group in self.groups.items()
            if (group.newest is None or group.newest.backup is None)
            and self._spare(shard, now) is None
        ]

    # --- words ------------------------------------------------------------------------------------

    def _decision(self, shard: int, told: Iterable[int]) -> Decision:
        return Decision(self._unsaved(), self._notices(shard, told), [])

    def _notices(self, shard: int, told: Iterable[int]) -> list[tuple[int, Assignment]]:
        """Who has a part in what is pending is told that; the others what is settled."""
        group = self.groups[shard]
        words = []
        for boot in sorted(told):
            pending = group.pending is not None and group.pending.holds(boot)
            configuration = group.pending if pending else group.settled
            if configuration is not None:
                words.append((boot, Assignment(configuration, confirmed=not pending)))
        return words

    def _unsaved(self) -> dict[int, ShardGroup] | None:
        if self.groups == self._saved:
            return None
        self._saved = dict(self.groups)
        return dict(self.groups)
