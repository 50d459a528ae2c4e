"""Launches a job's shards at the chosen placement; defines what all launched shards offer.

Ray actors (ray_launcher.py) are spread over a cluster; plain processes (processes.py) run on this
machine and need nothing but the base install. Both leave nothing behind. Ray is imported only when
it is chosen.
"""

from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Protocol

from ps.cluster import Cluster
from ps.durability import Durability
from ps.launch.launch_plan import LaunchPlan


class Placement(StrEnum):
    """Where shards run: in Ray actors, or in processes of this machine."""

    RAY = "ray"
    PROCESSES = "processes"


class LaunchedShards(Protocol):
    """A job's running shards, and the cluster that they form.

    `restart_enabled` may be set: whether to restart a shard even if that loses acknowledged
    updates. While it is off, a death that loses some is final.
    """

    restart_enabled: bool

    @property
    def cluster(self) -> Cluster:
        """The description of the cluster, for workers and operators."""
        ...

    @property
    def degraded_reason(self) -> str:
        """Why the job might not survive a death that it should survive, in words; else empty."""
        ...

    def check(self) -> None:
        """Raise GiveUp naming a shard that has died or failed."""
        ...

    def lost_updates(self) -> list[str]:
        """The updates that deaths have cost since the last call, in words."""
        ...

    def delete_logs(self) -> None:
        """Delete the WALs on the shards' own machines when the shards end; they are not needed."""
        ...


def start_shards(placement: Placement, plan: LaunchPlan) -> AbstractContextManager[LaunchedShards]:
    """Start the shards of `plan`, replicated if it says so; end them on leaving.

    See `ray_shards`, `process_shards`, `process_replicas` for what is raised.
    """
    match placement:
        case Placement.RAY:
            from ps.launch.ray_launcher import start_replicated, start_single
        case Placement.PROCESSES:
            from ps.launch.processes import start_replicated, start_single
    return (
        start_replicated(plan) if plan.durability is Durability.REPLICATED else start_single(plan)
    )
