"""Runs shards as Ray actors in the connected Ray cluster, with one copy each or two.

    with ray_shards(specs) as hosts, ps.AdminClient(hosts.cluster) as admin:
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
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from ps import paths
from ps.cluster import Cluster
from ps.durability import Durability
from ps.job_spec import make_cluster
from ps.launch import ray_actors
from ps.launch.child_protocol import CoordinatorLaunch, CopyLaunch, ShardLaunch
from ps.launch.launcher import ShardDevice, bind_address, check_place, check_rollback, keys_for
from ps.launch.ray_actors import Actor, CoordinatorActor, CopyActor, ShardActor
from ps.launch.replica_supervisor import ReplicatedShards, supervise
from ps.launch.restart import RestartingProcess
from ps.launch.single_copies import SingleCopies, saves_of, serving
from ps.replication.coordinator_server import SILENCE_S
from ps.replication.coordinator_store import RECORD
from ps.snapshots.log_storage import LogFolder
from ps.transport.local_sockets import Transport, transport_named
from shards import arguments
from shards.errors import BadInput
from shards.spec import ShardSpec


class RayShards(SingleCopies[Actor]):
    """The actors of one job, and the cluster they form."""

    def __init__(
        self,
        cluster: Cluster,
        actors: Sequence[Actor | RestartingProcess[Actor]],
        *,
        apart: bool,
        rolls_back: bool,
    ) -> None:
        """`apart`: whether each node keeps its shards' WALs in a folder of its own."""
        super().__init__(cluster, actors, rolls_back=rolls_back)
        self._apart = apart

    @property
    def pids(self) -> tuple[int | None, ...]:
        """Each shard's process id on its node; it changes when the actor is restarted.

        None for an actor that has not reported it yet.
        """
        return tuple(actor.pid for actor in self._present())

    def delete_logs(self) -> None:
        """Delete the WALs in the nodes' own folders when the shards end."""
        for actor in self._present():
            actor.forgets = self._apart


@contextmanager
def ray_shards(
    specs: Sequence[ShardSpec],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    transport: Transport | str = Transport.AUTO,
    device: ShardDevice | str = ShardDevice.CPU,
    secure: bool | None = None,
    durability: Durability | str = Durability.MEMORY,
    logs: str | Path | None = None,
    logs_apart: bool = False,
    rollback_s: float = 0.0,
) -> Iterator[RayShards]:
    """Start one actor a spec in the Ray that this process is connected to; end them on leaving.

    Each shard listens on `host`; 0.0.0.0 is every address of its node, and workers are then given
    the node's own address. Shard i's port is `port + i`; 0 picks free ones. With `device` gpu each
    shard asks Ray for a GPU of its own. Shards that other hosts can reach use CURVE and admit only
    holders of `cluster.access`, unless `secure` says otherwise.

    With a `durability` that keeps a WAL (docs/explanation/durability.md), each shard has a folder
    below `logs`, created here, which its node must see: the node is this machine, or has mounted
    the same files. With `logs_apart`, each node has a folder of its own at that path. If a folder
    holds a WAL of a job with exactly these specs, the shard resumes from its end. A shard that dies
    is restarted on the same node, at the same endpoint (restart.py). The same holds for `memory`
    with a `rollback_s`: each shard then saves its state every `rollback_s` seconds among its node's
    temporary files, and a restart loses the updates since the last autosave.

    Raises BadInput when a port cannot be bound, a node does not see `logs`, a WAL is damaged or
    another job's, some shards' WALs hold weights and others' none, `rollback_s` does not apply, or
    Ray has too few GPUs, GiveUp when Ray has no room for the actors within minutes, WrongBuild when
    a node runs other code.
    """
    check_place(specs, host, port, secure)
    arguments.flag("logs_apart", logs_apart)
    durability = arguments.choice("durability", durability, Durability)
    transport = transport_named(transport)
    device = arguments.choice("device", device, ShardDevice)
    root = None if logs is None else paths.path("logs", logs)
    check_rollback(rollback_s, durability)
    if durability is Durability.REPLICATED:
        raise BadInput("durability replicated: expected `replicated_ray_shards`, got `ray_shards`")
    if device is ShardDevice.GPU and (has := ray_actors.gpus()) < len(specs):
        raise BadInput(
            f"shard device gpu: expected a Ray with {len(specs)} GPUs, one a shard, got one with"
            f" {has:g}"
        )
    access, admission = keys_for(specs, host, secure)
    folders = [durability.folder_for(root, spec.shard) for spec in specs]
    seen = durability.keeps_log and not logs_apart
    common = transport, device, admission, durability
    for folder in folders:
        if folder is not None and seen:
            LogFolder(Path(folder)).make()
    with saves_of(specs, rollback_s) as saves:
        orders = [
            ShardLaunch(
                spec,
                bind_address(host, port, spec.shard),
                *common,
                folder,
                seen,
                saves=saved,
                rollback_s=rollback_s,
            )
            for spec, folder, saved in zip(specs, folders, saves, strict=True)
        ]
        with serving(orders, _start) as (endpoints, actors):
            cluster, rolls_back = make_cluster(specs, endpoints, access), rollback_s > 0
            yield RayShards(cluster, actors, apart=logs_apart, rolls_back=rolls_back)


def _start(order: ShardLaunch, former: Actor | None) -> Actor:
    """Start a shard's actor anywhere, or on the node of the `former` one, which has its files."""
    gpus = int(order.device is ShardDevice.GPU)
    name = f"shard {order.spec.shard}"
    node = former.node if former is not None else None
    return Actor(name, ShardActor, order, gpus=gpus, node=node, elsewhere=False)


@contextmanager
def replicated_ray_shards(
    specs: Sequence[ShardSpec],
    *,
    host: str = "127.0.0.1",
    silence_s: float = SILENCE_S,
    secure: bool | None = None,
) -> Iterator[ReplicatedShards]:
    """Start a coordinator and two copies a spec as actors; end them on leaving.

    The same as `ps.replicated_shards`, in the Ray cluster that this process is connected to.
    """
    record = f"downpour-{secrets.token_hex(16)}/{RECORD}"
    with supervise(
        specs, _InRay(), host=host, silence_s=silence_s, record=record, secure=secure
    ) as hosts:
        yield hosts


class _InRay:
    """Starts actors, and knows the node of each."""

    def __init__(self) -> None:
        self._copies: dict[int, Actor] = {}

    def coordinator(self, order: CoordinatorLaunch) -> Actor:
        here = ray_actors.own_node()
        return Actor("coordinator", CoordinatorActor, order, node=here, elsewhere=False)

    def copy(self, order: CopyLaunch, near: Collection[int]) -> Actor:
        self._copies = {boot: actor for boot, actor in self._copies.items() if actor.alive}
        places = {boot: actor.node for boot, actor in self._copies.items() if actor.node}
        taken = {node for boot, node in places.items() if boot in near}
        node = apart(ray_actors.nodes(), taken, Counter(places.values()))
        name = f"shard {order.spec.shard}"
        self._copies[order.boot] = actor = Actor(name, CopyActor, order, node=node)
        return actor

    def together(self, boot: int, other: int) -> bool:
        node = self._node(boot)
        return node is not None and node == self._node(other)

    def elsewhere(self, boot: int) -> bool:
        return any(node != self._node(boot) for node in ray_actors.nodes())

    def _node(self, boot: int) -> str | None:
        return self._copies[boot].node if boot in self._copies else None


def apart(nodes: Sequence[str], taken: Collection[str], copies: Mapping[str, int]) -> str:
    """The node for one more copy: preferably not `taken`, and with the fewest copies."""
    return min(nodes, key=lambda node: (node in taken, copies.get(node, 0)))
