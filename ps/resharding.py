"""Moves a job to other shards, more or fewer, while its workers train.

The old shards quiesce at one cut (shards/quiesce.py); their state is repartitioned and given to the
new shards; then the old shards hand every worker over. A worker says hello to the new shards, which
know its last applied push, and repeats what was not acknowledged: no push is lost or applied twice.
After any failure before the hand-over the old shards resume. The questions and their order are in
admin_plans.py.
"""

from ps.admin_client import AdminClient, carry_out
from ps.session import admin_plans
from shards import argument_checks


def reshard(old: AdminClient, new: AdminClient) -> None:
    """Move the state of `old`'s shards to `new`'s, which are fresh, and the workers with it.

    Both belong to one job and table; the new map's epoch is higher. Workers wait while the state
    travels twice. Keep the old shards until the job ends: a worker that starts late may connect to
    them. Raises what either admin client raises; then the job stays on the old shards, unless the
    error is `UnconfirmedHandOver`: then shard 0 has not confirmed that it hands its
    workers over.
    """
    for label, client in (("old", old), ("new", new)):
        argument_checks.instance(label, client, AdminClient, "an AdminClient")
    successors = new.cluster.for_workers().encode()
    carry_out(admin_plans.reshard(old.side, new.side, successors), old, new)
