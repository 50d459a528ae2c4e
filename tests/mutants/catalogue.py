"""Mutation testing of the simulator: a check that no defect can trigger proves nothing.

A mutant is a patch of the real code, in one of the files of this package. With the mutant planted,
the simulator must report a broken promise, and without it the same run must break none: then the
check of that promise works. `python -m tests.mutants` lists the mutants and the promise that each
of them breaks. For every promise there is at least one:

- exactly once: `a_repeated_push_is_applied`, `a_residual_is_dropped`
- one push: `a_new_incarnation_begins_after_the_smallest_push`
- durable: `an_answer_does_not_wait_for_the_backup`, `a_ledger_is_not_handed_over`,
  `a_dropped_push_is_not_recorded`
- order: `a_rejoin_restores_pushes_without_their_steps`
- bound: `the_gate_opens_a_step_early`
- versions: `a_pull_reports_an_older_version`
- serial: `a_repeated_push_advances_the_slots`, `a_dropped_push_is_applied`,
  `a_stale_push_counts_in_full`, `a_push_at_the_limit_is_dropped`,
  `a_buffer_keeps_what_it_has_applied`, `a_push_counts_for_every_table`,
  `a_table_that_is_left_out_keeps_an_older_version`, `one_table_of_a_push_is_applied_alone`,
  `a_move_forgets_how_often_each_table_was_updated`, `a_row_is_born_twice`, `a_pull_stores_rows`,
  `a_dense_table_is_applied_without_its_rows`, `one_half_of_a_split_push_counts_twice`,
  `a_move_loses_a_row`, `a_mean_leaves_out_pushes_without_the_row`,
  `a_row_and_its_slot_are_of_two_versions`, `first_values_differ_between_copies`,
  `a_late_report_is_merged`, `a_report_weighs_twice`, `a_merge_keeps_its_reports`,
  `a_merge_takes_the_momentum_of_another_version`
- untorn: `a_version_is_overwritten_while_it_is_sent`, `a_view_differs_from_what_was_sent`
- one cut: `a_cut_ignores_pushes_that_other_shards_have`
- a resharding is final: `a_hand_over_is_answered_before_the_backup_has_it`
- recovery: `a_turn_is_not_flushed`, `records_have_no_checksum`, `a_truncated_log_is_accepted`,
  `a_base_lacks_the_slots`, `a_recovered_shard_forgets_open_reports`
- same copy: `an_entry_is_skipped`, `slots_change_while_a_backup_copies_them`,
  `a_repeated_piece_counts_as_another`, `a_backup_receives_pieces_of_two_versions`,
  `a_change_is_not_replicated`
- settings: `a_late_change_undoes_a_newer_one`, `a_resharding_forgets_changed_settings`
- one primary: `a_new_primary_keeps_the_epoch_of_the_former`
- progress: `lost_messages_are_not_sent_again`, `a_raised_bound_opens_nothing`,
  `a_grace_never_ends`, `a_late_worker_is_waited_for`
- bounded: `answered_pulls_are_kept`
- no surprise: `a_rollback_is_not_reported`

The other mutants are bugs that the code once had. Each belongs to a scenario with its story, in
tests/deploy/simulation/scenarios/.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.simulation import scenarios
from deploy.simulation.fault_generator import swarm
from deploy.simulation.simulation import SimulationOutcome, play
from shards.errors import BadInput
from tests.mutants import (
    compression,
    logs,
    merging,
    pieces,
    replication,
    reports,
    resharding,
    rollbacks,
    rows,
    sessions,
    settings,
    shards,
    slots,
    tables,
)
from tests.mutants.patching import Mutant, Patch

_FILES = (
    *(shards, sessions, rollbacks, compression, logs, merging, replication, resharding, slots),
    *(tables, pieces, settings, rows, reports),
)
MUTANTS: dict[str, Mutant] = {
    name: mutant for file in _FILES for name, mutant in file.MUTANTS.items()
}
SCENARIOS = sorted((Path(__file__).parents[1] / "deploy/simulation/scenarios").glob("*.toml"))
SEEDS = 200
"""Seeds within which a mutant without a scenario must be detected."""


def find(name: str) -> Mutant:
    """The mutant of this name; raises BadInput for an unknown one."""
    if name not in MUTANTS:
        raise BadInput(f"mutant {name!r}: expected a name that `python -m tests.mutants` prints")
    return MUTANTS[name]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a mutant for the duration of the context."""
    patch = Patch()
    try:
        find(name).plant(patch)
        yield
    finally:
        patch.undo()


def caught(name: str, seeds: int = SEEDS) -> SimulationOutcome | None:
    """The first failing run with this mutant; None if no run fails.

    A mutant that has scenarios of its own is played in those, another one in `seeds` seeds of its
    kind of cluster.
    """
    own = [one for one in map(scenarios.load, SCENARIOS) if one.mutant == name]
    mutant = find(name)
    order = (mutant.seed, *range(seeds))
    runs = iter(own) if own else (swarm(seed, cluster=mutant.cluster) for seed in order)
    with planted(name):
        return next((end for end in map(play, runs) if end.violation), None)
