"""A job moves to other shards, more or fewer, while its workers train.

The shards come to a standstill at one cut (shards/quiesce.py); their state is cut anew and given
to the new ones; then the old ones send every worker on. A worker says hello to the new shards,
which know its last applied push, and repeats what was not acknowledged: nothing is lost and nothing
applied twice. Until the old ones have been told, whatever goes wrong leaves them to go on. What is
asked of whom, and when, is admin_plans.py's.
"""

from ps.admin_client import AdminClient, carry_out
from ps.session import admin_plans
from shards import arguments


def reshard(old: AdminClient, new: AdminClient) -> None:
    """Move the state of `old`'s shards to `new`'s, which are fresh, and the workers with it.

    Both are of one job and table; the new map's epoch is higher. Workers wait meanwhile: for as
    long as the state takes to travel twice. Keep the old shards until the job ends: a worker that
    starts late may ask there. Raises what either console raises; then the job goes on where it was,
    unless it is `operations.UnconfirmedHandOver`: then no old shard has answered that it sends its
    workers on.
    """
    for what, console in (("old", old), ("new", new)):
        arguments.instance(what, console, AdminClient, "a Console")
    successors = new.cluster.for_workers().encode()
    carry_out(admin_plans.reshard(old.side, new.side, successors), old, new)
