"""Replicated shards in real processes that are killed and suspended: no acknowledged push is lost.

The weights prove that each push was applied exactly once (pushing.py).
"""

import os
import signal
from collections.abc import Collection, Iterator

import psutil
import pytest

import ps
from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch
from ps.launch.launch_plan import LaunchPlan
from ps.launch.process_handle import ProcessHandle
from ps.launch.processes import process_replicas
from ps.launch.replica_supervisor import ReplicatedShards, supervise
from shards.errors import BadInput, GiveUp
from tests.support.eventually import eventually
from tests.support.replicated_job import (
    BACKUP,
    COORDINATOR,
    PRIMARY,
    SILENCE_S,
    TABLE,
    Worker,
    check_applied_once,
    specs_of,
    whole_again,
)


@pytest.fixture(scope="module")
def hosts() -> Iterator[ReplicatedShards]:
    """One shard with zeros installed, ready to lose a copy."""
    with (
        process_replicas(specs_of(), silence_s=SILENCE_S) as hosts,
        ps.AdminClient(hosts.cluster) as console,
    ):
        console.install(TABLE.empty())
        yield hosts


@pytest.mark.timeout(400)
def test_each_process_in_turn(hosts: ReplicatedShards) -> None:
    """Primary, backup and coordinator are killed; a suspended primary resumes too late.

    Meanwhile two workers push. An empty process replaces each dead copy, catches up, and survives
    the next death; a coordinator with the same record replaces the dead one.
    """
    workers = [Worker(hosts.cluster, name) for name in ("a", "b")]
    seen = set(hosts.pids.values())
    for victim, how in (
        (PRIMARY, signal.SIGKILL),
        (BACKUP, signal.SIGKILL),
        (COORDINATOR, signal.SIGKILL),
        (PRIMARY, signal.SIGSTOP),
    ):
        for worker in workers:
            worker.await_progress()
        pid = hosts.pids[victim]
        os.kill(pid, how)
        for worker in workers:
            worker.await_progress()
        whole_again(hosts, victim, pid)
        seen |= set(hosts.pids.values())
        if how is signal.SIGSTOP:
            os.kill(pid, signal.SIGCONT)
            eventually(lambda pid=pid: not psutil.pid_exists(pid), because=f"process {pid} is gone")  # type: ignore[misc]
    assert len(seen) >= 7, "three processes, and one for each that was killed or stopped"
    check_applied_once(hosts.cluster, workers)


@pytest.mark.timeout(400)
def test_the_loss_of_both_copies_is_told(hosts: ReplicatedShards) -> None:
    """`check` and clients report that the shard is lost; no empty process takes its place."""
    pids = [hosts.pids[part] for part in (PRIMARY, BACKUP)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: not set(pids) & set(hosts.pids.values()), because="every process is replaced"
    )
    with pytest.raises(GiveUp, match=r"^shard 0 has no copy left that holds its pushes: "):
        hosts.check()
    with (
        pytest.raises(GiveUp, match=r"^shard 0 has no copy left .*; the job has ended: continue f"),
        ps.AdminClient(hosts.cluster, patience_s=float("inf")) as console,
    ):
        console.read()


@pytest.mark.parametrize("silence_s", [0.0, 0.1, 60.0, float("nan"), float("inf")])
def test_arguments_that_make_no_sense(silence_s: float) -> None:
    """A silence that says nothing, or too late, is named before anything starts."""
    expected = r"(at least 0\.2 s, .* and less than the lease of a worker, 60 s|more than 0 s.*)"
    with pytest.raises(BadInput, match=rf"^silence_s: expected {expected}, got {silence_s:g}$"):
        process_replicas(specs_of(), silence_s=silence_s).__enter__()


class Starts:
    """Starts nothing, and records its orders."""

    def __init__(self) -> None:
        self.orders: list[CoordinatorLaunch] = []

    def coordinator(self, order: CoordinatorLaunch) -> ProcessHandle:
        self.orders.append(order)
        raise GiveUp("no room")

    def copy(self, order: CopyLaunch, near: Collection[int]) -> ProcessHandle:
        raise AssertionError("before its coordinator")

    def same_machine(self, boot: int, other: int) -> bool:
        raise AssertionError("there are no copies")

    def has_other_machine(self, boot: int) -> bool:
        raise AssertionError("there are no copies")


@pytest.mark.parametrize(
    ("host", "secure", "guarded"),
    [
        ("127.0.0.1", None, False),
        ("127.0.0.1", True, True),
        ("0.0.0.0", None, True),
        ("10.0.0.1", None, True),
        ("10.0.0.1", False, False),
    ],
)
def test_keys_wherever_others_can_reach(host: str, secure: bool | None, guarded: bool) -> None:
    """Orders carry the admitted keys from the start, unless anybody may enter; none is a secret."""
    starts = Starts()
    plan = LaunchPlan(specs=specs_of(), host=host, silence_s=1.0, secure=secure)
    kept = supervise(plan, starts, "r")
    with pytest.raises(GiveUp, match="no room"):
        kept.__enter__()
    (order,) = starts.orders
    assert order.bind == f"tcp://{host}:*"
    assert (order.admission is not None) is guarded
