"""Shards as Ray actors: the one file of this package that imports Ray.

An actor hosts a server loop in a thread of its own, so Ray's calls stay quick while ZeroMQ carries
the data. Ray places the actors (spread over the nodes) and tells when one dies; it never sees a
gradient.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from ps.admission import Admission
from ps.build import build_id
from ps.cluster import Cluster
from ps.hosting import START_S, ShardDevice, bind_address, check_build, keys_for, serve, told_as
from ps.job import describe
from ps.transport import Transport
from shards.errors import BadInput, DownpourError, GiveUp
from shards.spec import ShardSpec


class ShardActor:
    """One shard in one Ray actor. Its constructor takes values only."""

    def __init__(
        self, spec: bytes, bind: str, transport: str, device: str, admission: bytes
    ) -> None:
        told = msgspec.msgpack.decode(spec, type=ShardSpec)
        # Public keys alone: its own secret one is made here and never leaves.
        admits = msgspec.msgpack.decode(admission, type=Admission | None)
        server = serve(told, bind, Transport(transport), ShardDevice(device), admits)
        self._server = server.start()

    def endpoint(self) -> tuple[str, str]:
        """Where it listens, and the build it runs."""
        return told_as(self._server.endpoint, ray.util.get_node_ip_address()), build_id()

    def check(self) -> None:
        """Raise what ended the server loop, if anything did."""
        self._server.check()

    def stop(self) -> None:
        self._server.stop()


class RayShards:
    """The actors of one job, and the cluster they form."""

    def __init__(self, cluster: Cluster, actors: Sequence[Any]) -> None:
        self.cluster = cluster
        self._actors = actors

    def check(self, timeout_s: float = 10.0) -> None:
        """Raise GiveUp naming a shard whose actor or server loop has died."""
        for shard, actor in enumerate(self._actors):
            try:
                ray.get(actor.check.remote(), timeout=timeout_s)
            except GetTimeoutError:
                continue
            except RayActorError:
                raise GiveUp(f"shard {shard} has died: its Ray actor is gone") from None
            except RayError as error:
                raise GiveUp(f"shard {shard} has failed: {_cause(error)}") from None


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
    if device is ShardDevice.GPU and (has := ray.cluster_resources().get("GPU", 0)) < len(specs):
        raise BadInput(
            f"shard device gpu: expected a Ray with {len(specs)} GPUs, one a shard, got one with"
            f" {has:g}"
        )
    actor_class = ray.remote(ShardActor).options(
        num_cpus=0,
        num_gpus=int(device is ShardDevice.GPU),
        max_concurrency=2,
        max_restarts=0,
        scheduling_strategy="SPREAD",
    )
    access, admission = keys_for(specs, host, secure)
    actors = [
        actor_class.remote(
            msgspec.msgpack.encode(spec),
            bind_address(host, port, spec.shard),
            transport,
            device,
            msgspec.msgpack.encode(admission),
        )
        for spec in specs
    ]
    try:
        endpoints = [_endpoint(shard, actor) for shard, actor in enumerate(actors)]
        yield RayShards(describe(specs, endpoints, access), actors)
    finally:
        for actor in actors:
            _end(actor)


def _endpoint(shard: int, actor: Any) -> str:
    try:
        endpoint, build = ray.get(actor.endpoint.remote(), timeout=START_S)
    except GetTimeoutError:
        raise GiveUp(f"shard {shard} did not start within {START_S:g} s: has Ray room?") from None
    except RayError as error:
        if BadInput.__name__ in str(error):
            raise BadInput(_cause(error)) from None
        raise GiveUp(f"shard {shard} did not start: {_cause(error)}") from None
    check_build(f"shard {shard}", build)
    return str(endpoint)


def _end(actor: Any) -> None:
    try:
        ray.get(actor.stop.remote(), timeout=5)
    except (RayError, DownpourError, TimeoutError):
        pass  # It is to be gone, and killing it next makes sure.
    ray.kill(actor)


def _cause(error: RayError) -> str:
    """What happened: the last line of a remote traceback, without our own error's class."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1].strip() if lines else type(error).__name__
    name, _, text = last.partition(": ")
    return text if name.startswith(f"{DownpourError.__module__}.") else last
