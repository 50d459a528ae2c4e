"""Shards as Ray actors, in the Ray that this process is connected to: one copy each, or two.

    with ray_shards(specs) as hosts, ps.Console(hosts.cluster) as console:
        console.install(weights)
        ...

The actors (ray_actors.py) are this process's own: Ray ends them with it. One copy each is spread
over the nodes by Ray. Of replicated shards the two copies are put on two nodes, where there are as
many, and the coordinator on this process's own: it finds its record again when its actor dies, and
that node's death is the end of the job in any case. What died is followed as keeper.py has it.
"""

import secrets
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from time import monotonic

from ps import ray_actors
from ps.cluster import Cluster
from ps.coordinator_server import SILENCE_S
from ps.hosting import START_S, ShardDevice, bind_address, keys_for
from ps.job import describe
from ps.keeper import ReplicatedShards, keep
from ps.pipe import CoordinatorOrder, CopyOrder, Order
from ps.ray_actors import Actor, CoordinatorActor, CopyActor, ShardActor
from ps.record import RECORD
from ps.transport import Transport
from shards.errors import BadInput
from shards.spec import ShardSpec


class RayShards:
    """The actors of one job, and the cluster they form."""

    def __init__(self, cluster: Cluster, actors: Sequence[Actor]) -> None:
        self.cluster = cluster
        self._actors = actors

    def check(self) -> None:
        """Raise GiveUp naming a shard whose actor or server loop has died."""
        for actor in self._actors:
            actor.check()


@contextmanager
def ray_shards(
    specs: Sequence[ShardSpec],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    transport: Transport = Transport.AUTO,
    device: ShardDevice = ShardDevice.CPU,
    secure: bool | None = None,
) -> Iterator[RayShards]:
    """Start one actor a spec in the Ray that this process is connected to; end them on leaving.

    Each listens on `host`, which for 0.0.0.0 is every address of its node, and is told to workers
    as that node's own. Shard i's port is `port + i`; 0 picks free ones. With `device` gpu each asks
    Ray for a GPU of its own. Shards that other hosts can reach speak CURVE and let in only who
    holds `cluster.access`, unless `secure` says otherwise. Raises BadInput when a port cannot be
    bound, or Ray has too few GPUs, GiveUp when Ray has no room for the actors within a minute,
    WrongBuild when a node runs other code.
    """
    if device is ShardDevice.GPU and (has := ray_actors.gpus()) < len(specs):
        raise BadInput(
            f"shard device gpu: expected a Ray with {len(specs)} GPUs, one a shard, got one with"
            f" {has:g}"
        )
    access, admission = keys_for(specs, host, secure)
    actors = []
    try:
        for spec in specs:
            bind = bind_address(host, port, spec.shard)
            order = Order(spec, bind, transport, device, admission)
            gpus = int(device is ShardDevice.GPU)
            actors.append(Actor(f"shard {spec.shard}", ShardActor, order, gpus=gpus))
        until = monotonic() + START_S
        endpoints = [actor.endpoint(until) for actor in actors]
        yield RayShards(describe(specs, endpoints, access), actors)
    finally:
        for actor in actors:
            actor.ask_to_end()
        for actor in actors:
            actor.end()


@contextmanager
def replicated_ray_shards(
    specs: Sequence[ShardSpec],
    *,
    host: str = "127.0.0.1",
    silence_s: float = SILENCE_S,
    secure: bool | None = None,
) -> Iterator[ReplicatedShards]:
    """Start a coordinator and two copies a spec as actors; end them on leaving.

    The same as `ps.replicated_shards`, which see, in the Ray that this process is connected to.
    """
    record = f"downpour-{secrets.token_hex(16)}/{RECORD}"
    with keep(
        specs, _InRay(), host=host, silence_s=silence_s, record=record, secure=secure
    ) as hosts:
        yield hosts


class _InRay:
    """Starts actors, and knows where each is."""

    def __init__(self) -> None:
        self._copies: dict[int, Actor] = {}

    def coordinator(self, order: CoordinatorOrder) -> Actor:
        here = ray_actors.own_node()
        return Actor("coordinator", CoordinatorActor, order, node=here, elsewhere=False)

    def copy(self, order: CopyOrder, beside: Collection[int]) -> Actor:
        self._copies = {boot: actor for boot, actor in self._copies.items() if actor.alive}
        places = {boot: actor.node for boot, actor in self._copies.items() if actor.node}
        taken = {node for boot, node in places.items() if boot in beside}
        node = apart(ray_actors.nodes(), taken, Counter(places.values()))
        name = f"shard {order.spec.shard}"
        self._copies[order.boot] = actor = Actor(name, CopyActor, order, node=node)
        return actor


def apart(nodes: Sequence[str], taken: Collection[str], copies: Mapping[str, int]) -> str:
    """The node for one more copy: none that is `taken`, if there is another; then the emptiest."""
    return min(nodes, key=lambda node: (node in taken, copies.get(node, 0)))
