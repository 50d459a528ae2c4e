"""Runs shards as Ray actors in the connected Ray cluster, with one copy each or two.

    with ray_shards(specs) as hosts, AdminClient(hosts.cluster) as admin:
        admin.install(weights)
        ...

The actors (ray_actors.py) belong to this process: Ray ends them with it. Ray spreads single copies
over the nodes. The two copies of a replicated shard are put on two nodes, as soon as there are two.
The coordinator is put on this process's own node: there a restarted coordinator finds the record,
and if that node dies the job ends in any case. replica_supervisor.py replaces actors that die.

A shard with a WAL or autosaves stores them on the node where Ray has put it first, and is bound to
that node: when its actor dies, another one there resumes from them at the same port (restart.py).
If the node is gone, so is the WAL, and the job ends.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Unpack

from ps.durability import Durability
from ps.launch import ray_actors
from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch, RefusalLaunch, ShardLaunch
from ps.launch.launch_plan import START_S, LaunchOptions, LaunchPlan, ShardDevice, plan_of
from ps.launch.process_handle import ProcessHandle
from ps.launch.ray_actors import Actor
from ps.launch.replica_supervisor import ReplicatedShards, supervise
from ps.launch.single_copies import SingleCopies, single_copies
from ps.replication.coordinator_store import RECORD
from shards.errors import BadInput, DownpourError
from shards.spec import ShardSpec


def ray_shards(
    specs: Sequence[ShardSpec], **options: Unpack[LaunchOptions]
) -> AbstractContextManager[SingleCopies]:
    """Start one actor per spec in the connected Ray cluster; end them on leaving.

    The options are those of `LaunchPlan`. With `device` gpu each shard asks Ray for a GPU of its
    own. Each shard's node must see `logs`, which is created here: the node is this machine, or has
    mounted the same files. With `logs_apart`, each node has a folder of its own at that path. A
    shard that dies is restarted on the same node, at the same endpoint, and makes its autosaves
    among that node's temporary files.

    Raises what `process_shards` does, and BadInput when a node does not see `logs` or Ray has too
    few GPUs, GiveUp when Ray has no room for the actors within minutes.
    """
    plan = plan_of(specs, options)
    if plan.durability is Durability.REPLICATED:
        raise BadInput(
            "durability replicated", expected="`replicated_ray_shards`", got="`ray_shards`"
        )
    return start_single(plan)


def ray_replicas(
    specs: Sequence[ShardSpec], **options: Unpack[LaunchOptions]
) -> AbstractContextManager[ReplicatedShards]:
    """Start a coordinator and two copies per spec as actors; end them on leaving.

    The same as `process_replicas`, in the Ray cluster that this process is connected to.
    """
    return start_replicated(plan_of(specs, {**options, "durability": Durability.REPLICATED}))


def start_single(plan: LaunchPlan) -> AbstractContextManager[SingleCopies]:
    """`ray_shards` of a plan."""
    plan.durability.folder_for(plan.logs, 0)  # refused whether or not there is a Ray
    ray_actors.check_connected()
    shards = len(plan.specs)
    if plan.device is ShardDevice.GPU and (has := ray_actors.gpus()) < shards:
        raise BadInput(
            "shard device gpu",
            expected=f"a Ray with {shards} GPUs, one per shard",
            got=f"one with {has:g}",
        )
    return single_copies(plan, _start_shard, _refuse_in_actor, on_this_machine=False)


def start_replicated(plan: LaunchPlan) -> AbstractContextManager[ReplicatedShards]:
    """`replicated_ray_shards` of a plan."""
    ray_actors.check_connected()
    return supervise(plan, _InRay(), f"downpour-{secrets.token_hex(16)}/{RECORD}")


def _start_shard(order: ShardLaunch, former: ProcessHandle | None) -> Actor:
    """Start a shard's actor: anywhere, or on the node of its `former` one, which has its files."""
    gpus = int(order.device is ShardDevice.GPU)
    node = former.node if isinstance(former, Actor) else None
    return Actor(order, gpus=gpus, node=node, soft=False)


def _refuse_in_actor(order: RefusalLaunch, last: ProcessHandle) -> Callable[[], None]:
    """Answer in place of a dead shard from an actor on its node, where its port and key are."""
    assert isinstance(last, Actor)
    last.close()  # an actor that reported a failure still holds its port
    actor = Actor(order, node=last.node, soft=False)
    try:
        actor.endpoint(time.monotonic() + START_S)
    except DownpourError:
        actor.close()
        raise

    def end() -> None:
        actor.ask_to_end()
        actor.end()

    return end


class _InRay:
    """Starts actors, and knows the node of each."""

    def __init__(self) -> None:
        self._copies: dict[int, Actor] = {}

    def coordinator(self, order: CoordinatorLaunch) -> Actor:
        return Actor(order, node=ray_actors.own_node(), soft=False)

    def copy(self, order: CopyLaunch, apart_from: Collection[int]) -> Actor:
        self._copies = {boot: actor for boot, actor in self._copies.items() if actor.alive}
        node_of = {boot: actor.node for boot, actor in self._copies.items() if actor.node}
        occupied = {node for boot, node in node_of.items() if boot in apart_from}
        node = node_for_copy(ray_actors.nodes(), occupied, Counter(node_of.values()))
        self._copies[order.boot] = actor = Actor(order, node=node)
        return actor

    def same_machine(self, boot: int, other: int) -> bool:
        node = self._node(boot)
        return node is not None and node == self._node(other)

    def has_other_machine(self, boot: int) -> bool:
        return any(node != self._node(boot) for node in ray_actors.nodes())

    def _node(self, boot: int) -> str | None:
        return self._copies[boot].node if boot in self._copies else None


def node_for_copy(
    nodes: Sequence[str], occupied: Collection[str], copies: Mapping[str, int]
) -> str:
    """The node for one more copy: preferably not `taken`, and with the fewest copies."""
    return min(nodes, key=lambda node: (node in occupied, copies.get(node, 0)))
