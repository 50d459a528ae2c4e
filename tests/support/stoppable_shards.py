"""Shards in threads that a test stops, and starts again if they keep logs."""

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from ps import Durability
from ps.job_spec import make_cluster
from ps.launch.child_main import make_shard
from ps.launch.child_protocol import ShardLaunch
from ps.launch.launch_plan import ShardDevice
from ps.server.server import ShardServer
from ps.transport.transports import Transport
from shards.errors import GiveUp
from shards.messages import LiveSettings
from shards.spec import ShardSpec


class Servers:
    """Shards that can die, and be started again if they keep logs."""

    degraded_reason = ""
    restart_enabled = True

    def __init__(self, specs: Sequence[ShardSpec], logs: Path | None) -> None:
        self._specs, self._logs = specs, logs
        self._servers = [self._serve(spec, "tcp://127.0.0.1:*") for spec in specs]
        self._dead: set[int] = set()
        self.forgets = self.forgot = False
        self.lost: list[str] = []
        self.cluster = make_cluster(specs, [server.endpoint for server in self._servers])

    def _serve(self, spec: ShardSpec, bind: str) -> ShardServer:
        order = ShardLaunch(spec, bind, Transport.TCP, ShardDevice.CPU)
        if self._logs is not None:
            logs = str(self._logs / f"shard-{spec.shard}")
            order = replace(order, durability=Durability.PROCESS, log_folder=logs)
        return make_shard(order).start()

    def die(self, shard: int) -> None:
        """Stop a shard; one with a log starts again at once."""
        self._servers[shard].stop()
        if self._logs is None:
            self._dead.add(shard)
        else:
            endpoint = self._servers[shard].endpoint
            self._servers[shard] = self._serve(self._specs[shard], endpoint)

    def trouble(self, shard: int, text: str) -> None:
        """Have a shard report that something fails in its background."""
        self._servers[shard].shard.metrics.trouble = text

    def lose_settings(self, shard: int) -> None:
        """Have a shard train with the settings of its start, as after a rollback."""
        one = self._servers[shard].shard
        one.part.follow(LiveSettings(one.spec.bound, one.spec.rate_factor))

    def check(self) -> None:
        for shard in self._dead:
            raise GiveUp(f"shard {shard} has died")

    def lost_updates(self) -> list[str]:
        lost, self.lost = self.lost, []
        return lost

    def delete_logs(self) -> None:
        """Have `stop` record that the logs were deleted."""
        self.forgets = True

    def stop(self) -> None:
        self.forgot = self.forgets
        for shard, server in enumerate(self._servers):
            if shard not in self._dead:
                server.stop()
