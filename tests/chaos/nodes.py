"""Kill every process of a Ray node at once, and look at what the shards that were on it do.

    python -m tests.chaos.nodes

A head and, twice, one more node of this machine, each at a loopback address of its own. First
shards with two copies, both on the head until the other node joins, which a backup then goes to.
Training goes on with the copies on the head when that node is killed, and new ones come up there.
Then shards that keep logs: one is killed alone and goes on where its log is; its whole node
is, and the job ends and says so. What the weights hold proves which pushes were applied.

It tells how long each took, and ends with status 1 if a promise was not kept.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import ray

import ps
from deploy.clusters.ray_cluster import connect
from ps import Durability
from ps.job_spec import shard_specs
from ps.launch.ray_actors import Actor
from ps.launch.ray_launcher import ray_replicas, ray_shards
from ps.launch.replica_supervisor import ReplicatedShards
from ps.launch.single_copies import SingleCopies
from shards.errors import GiveUp
from shards.schedules import Fixed
from tests.support.clusters import ray_head, ray_node
from tests.support.eventually import eventually
from tests.support.replicated_job import (
    PRIMARY,
    TABLE,
    Worker,
    check_applied_once,
    specs_of,
)

_TOKEN = "0123456789abcdef" * 4
_HERE, _THERE, _ELSEWHERE = "127.0.0.3", "127.0.0.4", "127.0.0.5"
_PATIENCE_S = 240.0
_TRIES = 5


def main() -> int:
    """Do it in a process whose Ray has known the cluster's token from the beginning."""
    if len(sys.argv) == 2:
        play(Path(sys.argv[1]))
        return 0
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short, for sockets
        token = Path(folder) / "token"
        token.write_text(_TOKEN)
        command = [sys.executable, "-m", "tests.chaos.nodes", folder]
        return subprocess.run(command, env=os.environ | guarded(token), check=False).returncode


def guarded(token: Path) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}


def play(folder: Path) -> None:
    environ = guarded(folder / "token")
    with ExitStack() as stack:
        head = stack.enter_context(ray_head(folder / "r", environ))
        stack.enter_context(connect(head, 2))
        say(f"node {_HERE}, which the driver is on; load {os.getloadavg()[0]:.1f}")
        copies_die_with_their_node(
            lambda: stack.enter_context(ray_node(folder / "first.log", head, _THERE, environ))
        )
        second = stack.enter_context(ray_node(folder / "second.log", head, _ELSEWHERE, environ))
        await_nodes(2)
        for number in range(_TRIES):
            if logs_die_with_their_node(second, folder / f"logs-{number}"):
                break
        else:
            raise AssertionError(f"Ray put all shards on one node, {_TRIES} times")


def copies_die_with_their_node(join: Callable[[], psutil.Process]) -> None:
    """A shard's two copies are on two nodes once there are two, and the primary goes on meanwhile;
    with one node gone there are two copies again.
    """
    with ray_replicas(specs_of()) as hosts, ps.AdminClient(hosts.cluster) as console:
        console.install(TABLE.empty())
        say(f"copies at {' and '.join(places(hosts))}")
        assert places(hosts) == [_HERE, _HERE]
        primary = hosts.pids[PRIMARY]
        workers = [Worker(hosts.cluster, name) for name in ("a", "b")]
        for worker in workers:
            worker.await_progress()
        other = join()
        await_nodes(2)
        joined_at = time.monotonic()
        say(f"{_THERE} has joined")
        eventually(
            lambda: hosts.redundant and places(hosts) == [_HERE, _THERE],
            because="both nodes have a copy",
            within_s=_PATIENCE_S,
        )
        say(f"{since(joined_at)}: copies at {' and '.join(places(hosts))}")
        assert hosts.pids[PRIMARY] == primary
        for worker in workers:
            worker.await_progress()
        killed_at = kill(other)
        say(f"killed {_THERE}, {sum(worker.acknowledged for worker in workers)} acknowledged")
        for worker in workers:
            worker.await_progress()
        say(f"{since(killed_at)}: all workers are acknowledged again")
        eventually(lambda: _THERE not in living(), because="the node is gone", within_s=_PATIENCE_S)
        say(f"{since(killed_at)}: Ray counts the node as gone")
        eventually(lambda: hosts.redundant, because="a second copy", within_s=_PATIENCE_S)
        say(f"{since(killed_at)}: two copies again, of those at {' and '.join(places(hosts))}")
        assert set(places(hosts)) == {_HERE}, "a spare may be among them"
        hosts.check()
        check_applied_once(hosts.cluster, workers)
        say("every acknowledged push was applied once")


def logs_die_with_their_node(other: psutil.Process, logs: Path) -> bool:
    """A shard's actor is followed on its node; when that is gone, the job says so and ends.

    False where there is nothing to see: Ray has put all shards on the head. It spreads them, but a
    node that has joined a moment ago may be left out.
    """
    specs = shard_specs(
        TABLE, shards=2, schedule=Fixed(base_rate=1.0), bound=None, workers=2, lease_s=60.0
    )
    with (
        ray_shards(specs, durability=Durability.LOGGED, logs=logs, logs_apart=True) as hosts,
        ps.AdminClient(hosts.cluster) as console,
    ):
        console.install(TABLE.empty())
        on = nodes_of(hosts)
        say(f"shards with logs: {', '.join(f'shard {n} at {at}' for n, at in enumerate(on))}")
        if _ELSEWHERE not in on:
            return False
        there = on.index(_ELSEWHERE)
        workers = [Worker(hosts.cluster, name) for name in ("a", "b")]
        for worker in workers:
            worker.await_progress()
        pid = hosts.pids[there]
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        for worker in workers:
            worker.await_progress()
        again = nodes_of(hosts)[there]
        say(f"{since(killed_at)}: shard {there} was killed; all workers are acknowledged again")
        say(f"its actor is at {again}")
        assert again == _ELSEWHERE
        killed_at = kill(other)
        failure = ended(hosts)
        say(f"{since(killed_at)} after {_ELSEWHERE} was killed: {failure}")
        expected = f"shard {there} cannot continue: node {_ELSEWHERE} of Ray is gone"
        assert failure == expected, failure
        return True


def kill(first: psutil.Process) -> float:
    """End all processes of a node by signal 9; returns when."""
    family = [first, *first.children(recursive=True)]
    killed_at = time.monotonic()
    for process in family:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return killed_at


def ended(hosts: SingleCopies) -> str:
    """What is reported of the shards' end."""

    def said() -> str:
        try:
            hosts.check()
        except GiveUp as error:
            return str(error)
        return ""

    return eventually(said, because="the end is reported", within_s=_PATIENCE_S)


def nodes_of(hosts: SingleCopies) -> list[str]:
    """The node of each shard, by its address."""
    actors = [shard.child for shard in hosts._shards]
    return [where(actor.node) for actor in actors if isinstance(actor, Actor)]


def places(hosts: ReplicatedShards) -> list[str]:
    """The nodes of a job's living copies, by their addresses."""
    lives = [life for _, life in hosts._copies.values() if life.alive]
    return sorted(where(life.node) for life in lives if isinstance(life, Actor))


def where(node: str | None) -> str:
    """The address of a node, by its id."""
    return str({one["NodeID"]: one["NodeManagerAddress"] for one in ray.nodes()}[node])


def await_nodes(count: int) -> None:
    """Return when Ray can place something on so many: it lists one a moment before it can."""
    eventually(
        lambda: ray.cluster_resources().get("CPU") == 2.0 * count,
        because=f"{count} nodes",
        within_s=_PATIENCE_S,
    )


def living() -> set[str]:
    """The addresses of the nodes that Ray counts as alive."""
    return {one["NodeManagerAddress"] for one in ray.nodes() if one["Alive"]}


def since(then: float) -> str:
    return f"{time.monotonic() - then:.2f} s"


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
