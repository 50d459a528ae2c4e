"""Where the processes of a run listen, and which addresses and names others are given.

This is the only home of these settings. A run reads its own part: `ShardNetwork` where shards are
started, `DriverNetwork` where Ray and Spark are. `ClusterNetwork` has all of them for a cluster,
with fixed ports as a firewall needs them, and those of the cluster's own daemons: `downpour deploy
network` prints it, and manifests, units and policies are made from it.
"""

from itertools import pairwise

import msgspec

from ps.launch.launch_plan import check_copy_ports, parse_port_range
from ps.transport.addresses import LAST_PORT
from ps.transport.advertised_address import parse_advertised
from shards import argument_checks
from shards.errors import BadInput
from worker.job.option_fields import Options, option
from worker.spark import settings as spark_settings

ANYWHERE = "0.0.0.0"
LONGEST_START_S = 86400.0
_NODE_PORTS = 6


def _port(label: str, value: object) -> int:
    return argument_checks.whole(label, value, 0, LAST_PORT)


def _own_port(label: str, value: object) -> int:
    return argument_checks.whole(label, value, 1, LAST_PORT)


def _ports(label: str, value: object) -> str:
    first, last = parse_port_range(label, value)
    return f"{first}-{last}"


def _advertised(label: str, value: object) -> str:
    parse_advertised(label, value)
    return str(value)


def _host(label: str, value: object) -> str:
    host, port = parse_advertised(label, value)
    if port is not None:
        raise BadInput(label, expected="a host without a port", got=f"{value!r}")
    return host


_DRIVER, _SHARDS, _EXECUTORS = "driver", "shards", "executors"
_MASTER, _HEAD, _NODES, _OPERATORS = "spark master", "ray head", "ray nodes", "operators"
_PORTS = (
    ("shards", "port", _SHARDS, (_EXECUTORS, _DRIVER)),
    ("coordinator", "coordinator_port", _DRIVER, (_EXECUTORS, _DRIVER, _SHARDS)),
    ("copies", "copy_ports", _SHARDS, (_EXECUTORS, _DRIVER, _SHARDS)),
    ("spark driver", "driver_port", _DRIVER, (_EXECUTORS, _MASTER)),
    ("spark driver page", "driver_page", _DRIVER, (_OPERATORS,)),
    ("spark block managers", "block_manager_port", "driver, executors", (_EXECUTORS, _DRIVER)),
    ("spark master", "spark_master_port", _MASTER, (_DRIVER, "spark workers", _EXECUTORS)),
    ("spark master page", "spark_master_page", _MASTER, (_OPERATORS,)),
    ("spark worker", "spark_worker_port", "spark workers", (_MASTER, _EXECUTORS)),
    ("spark worker page", "spark_worker_page", "spark workers", (_OPERATORS,)),
    ("spark connect", "spark_connect_port", "spark connect", (_DRIVER,)),
    ("ray head", "ray_port", _HEAD, (_DRIVER, _NODES)),
    ("ray client", "ray_client_port", _HEAD, (_DRIVER,)),
    ("ray dashboard", "ray_dashboard_port", _HEAD, (_OPERATORS,)),
    ("ray node", "ray_node_ports", _NODES, (_DRIVER, _HEAD, _NODES)),
    ("ray processes", "ray_worker_ports", _NODES, (_DRIVER, _HEAD, _NODES)),
    ("service", "service_port", "service", ("users",)),
)
"""Each range of ports: its name, its setting, its listener and its clients."""
_RETRIED = ("driver_port", "driver_page", "block_manager_port")
"""The settings of ports of which Spark tries the next one if one is taken."""


class PortRange(msgspec.Struct, frozen=True):
    """Ports that must be open: a `listener` listens on them, and `clients` connect to them.

    `setting` is the name of the setting that moves them.
    """

    name: str
    setting: str
    first: int
    last: int
    listener: str
    clients: tuple[str, ...]
    protocol: str = "tcp"


class ShardNetwork(Options):
    """Where shards, their copies and the coordinator listen.

    They listen on the host `bind`, from `port` upwards (0: any free port). Clients are given
    `advertise`, or what each shard's host chooses (ps/transport/advertised_address.py).
    """

    bind: str = option(
        "The IPv4 address that shards listen on.", default="127.0.0.1", check=argument_checks.name
    )
    port: int = option(
        "The first shard's port; each further one is 1 higher.",
        default=0, shown="any", check=_port,
    )  # fmt: skip
    advertise: str | None = option(
        "The address of the shards for other hosts, HOST or HOST:PORT, behind NAT or in containers;"
        " for several hosts set DOWNPOUR_ADVERTISE on each.",
        default=None, shown="the host's own", check=_advertised,
    )  # fmt: skip
    coordinator_port: int = option(
        "The port of the coordinator of replicated shards.",
        default=0, shown="any", check=_port,
    )  # fmt: skip
    copy_ports: str | None = option(
        "The ports of the copies of replicated shards, such as 7500-7599: 6 for each shard.",
        default=None, shown="any", check=_ports,
    )  # fmt: skip

    def check(self) -> None:
        super().check()
        if ":" in self.bind or not self.bind.strip():
            raise BadInput(
                self.label_option("bind"), expected="an IPv4 address", got=f"{self.bind!r}"
            )
        has_port = self.advertise is not None and ":" in self.advertise
        if has_port and not self.port:
            raise BadInput(
                f"{self.label_option('advertise')} {self.advertise}",
                expected=f"{self.label_option('port')}, too, which that port leads to",
                got="none",
            )

    def shift_advertised(self, ports: int) -> str | None:
        """`advertise` for shards that listen on ports this much higher."""
        if self.advertise is None or not ports:
            return self.advertise
        host, port = parse_advertised("advertise", self.advertise)
        return host if port is None else f"{host}:{port + ports}"


class DriverNetwork(Options):
    """The names and addresses by which a run's driver takes part in Ray and Spark."""

    app_name: str = option(
        "The name of the application in Spark.", default="downpour", check=argument_checks.name
    )
    namespace: str = option("The namespace in Ray.", default="downpour", check=argument_checks.name)
    driver_host: str | None = option(
        "The address of Spark's driver for executors.",
        default=None, shown="the one that reaches the master", check=_host,
    )  # fmt: skip
    driver_bind: str | None = option(
        "The address that Spark's driver listens on.",
        default=None, shown="that of --driver-host", check=argument_checks.name,
    )  # fmt: skip
    driver_port: int = option(
        "The port of Spark's driver.", default=0, shown="any", check=_port
    )  # fmt: skip
    block_manager_port: int = option(
        "The port of Spark's block managers, in the driver and in executors.",
        default=0, shown="any", check=_port,
    )  # fmt: skip
    driver_page: int = option(
        "The port of the page of Spark's driver.", default=0, shown="4040", check=_port
    )  # fmt: skip
    port_tries: int = option(
        "How many further ports Spark tries where one is taken.", default=16, least=0, most=4096
    )  # fmt: skip
    start_s: float = option(
        "Seconds in which Spark must register the application, and then run a first task.",
        default=spark_settings.START_S, least=1, most=LONGEST_START_S,
    )  # fmt: skip

    def spark_conf(self) -> dict[str, str]:
        """Spark's settings for these ports and addresses; empty for those that are left to it."""
        ports = {
            "spark.driver.port": self.driver_port,
            "spark.ui.port": self.driver_page,
            "spark.blockManager.port": self.block_manager_port,
        }
        conf = {name: str(port) for name, port in ports.items() if port}
        if conf:
            conf["spark.port.maxRetries"] = str(self.port_tries)
        if self.driver_host is not None:
            conf["spark.driver.host"] = self.driver_host
        if self.driver_bind is not None:
            conf["spark.driver.bindAddress"] = self.driver_bind
        return conf


class ClusterNetwork(ShardNetwork, DriverNetwork):
    """All addresses, ports and names of a cluster on which runs train."""

    bind: str = option(
        "The IPv4 address that shards listen on.", default=ANYWHERE, check=argument_checks.name
    )
    port: int = option("The first shard's port.", default=7400, check=_own_port)
    shard_ports: int = option(
        "Ports for shards, those of later reshards included.", default=100, least=1, most=4096
    )  # fmt: skip
    coordinator_port: int = option(
        "The port of the coordinator of replicated shards.", default=7390, check=_own_port
    )
    copy_ports: str | None = option(
        "The ports of the copies of replicated shards: 6 for each shard.",
        default="7500-7599", check=_ports,
    )  # fmt: skip
    driver_port: int = option("The port of Spark's driver.", default=7600, check=_own_port)
    block_manager_port: int = option(
        "The port of Spark's block managers, in the driver and in executors.",
        default=7700, check=_own_port,
    )  # fmt: skip
    driver_page: int = option(
        "The port of the page of Spark's driver.", default=4040, check=_own_port
    )
    spark_connect_port: int = option(
        "The port of a Spark Connect server.", default=15002, check=_own_port
    )
    spark_master_port: int = option(
        "The port of a standalone master.", default=7077, check=_own_port
    )
    spark_master_page: int = option("The port of its page.", default=8080, check=_own_port)
    spark_worker_port: int = option(
        "The port of a standalone worker.", default=7078, check=_own_port
    )
    spark_worker_page: int = option("The port of its page.", default=8081, check=_own_port)
    ray_port: int = option("The port of Ray's head.", default=6379, check=_own_port)
    ray_client_port: int = option("The head's port for ray://.", default=10001, check=_own_port)
    ray_dashboard_port: int = option("The head's dashboard.", default=8265, check=_own_port)
    ray_node_ports: str = option(
        "Six ports of each Ray node: node manager, object manager, agents, metrics.",
        default="6380-6385", check=_ports,
    )  # fmt: skip
    ray_worker_ports: str = option(
        "The ports of the processes of a Ray node.", default="10010-10209", check=_ports
    )
    service_port: int = option("The port of the training service.", default=8600, check=_own_port)

    def check(self) -> None:
        super().check()
        first, last = self._range_of("copy_ports")
        check_copy_ports(self.label_option("copy_ports"), last + 1 - first, 1)
        if len(self._node_ports()) != _NODE_PORTS:
            raise BadInput(
                self.label_option("ray_node_ports"),
                expected=f"a range of {_NODE_PORTS} ports",
                got=len(self._node_ports()),
            )
        self._check_apart()

    def _check_apart(self) -> None:
        """Raise BadInput if two ranges overlap, or one ends beyond the last port."""
        ranges = sorted(self.ranges(), key=lambda ports: ports.first)
        for ports in ranges:
            if ports.last > LAST_PORT:
                expected = f"ports up to {LAST_PORT}"
                raise BadInput(self.label_option(ports.setting), expected=expected, got=ports.last)
        for lower, upper in pairwise(ranges):
            if upper.first <= lower.last:
                raise BadInput(
                    self.label_option(upper.setting),
                    expected=f"ports apart from those of {lower.name}, {lower.first}-{lower.last}",
                    got=upper.first,
                )

    @classmethod
    def label_option(cls, name: str) -> str:
        return f"--{name.replace('_', '-')}"

    def ranges(self) -> tuple[PortRange, ...]:
        """The ports that must be open, each range once."""
        return tuple(
            PortRange(name, setting, *self._range_of(setting), listener, clients)
            for name, setting, listener, clients in _PORTS
        )

    def _range_of(self, setting: str) -> tuple[int, int]:
        value = getattr(self, setting)
        if isinstance(value, str):
            return parse_port_range(self.label_option(setting), value)
        tried = {"port": self.shard_ports - 1} | dict.fromkeys(_RETRIED, self.port_tries)
        return value, value + tried.get(setting, 0)

    def train_options(self, *, replicated: bool = False) -> list[str]:
        """The options with which `downpour train` uses these ports."""
        names = ["coordinator_port", "copy_ports"] if replicated else ["port"]
        names = ["bind", "advertise", *names, "driver_host", "driver_bind", "driver_port"]
        names += ["driver_page", "block_manager_port", "port_tries"]
        values = {name: getattr(self, name) for name in names}
        return [
            word
            for name, value in values.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]

    def ray_arguments(self, *, head: bool) -> list[str]:
        """The arguments of `ray start` for these ports, of the head or of another node."""
        manager, objects, listen, grpc, environments, metrics = self._node_ports()
        first, last = self._range_of("ray_worker_ports")
        ports = {
            "node-manager-port": manager,
            "object-manager-port": objects,
            "dashboard-agent-listen-port": listen,
            "dashboard-agent-grpc-port": grpc,
            "runtime-env-agent-port": environments,
            "metrics-export-port": metrics,
            "min-worker-port": first,
            "max-worker-port": last,
        }
        if head:
            ports |= {
                "port": self.ray_port,
                "ray-client-server-port": self.ray_client_port,
                "dashboard-port": self.ray_dashboard_port,
            }
        return [
            *(["--head"] if head else []),
            *(f"--{name}={port}" for name, port in ports.items()),
        ]

    def _node_ports(self) -> range:
        first, last = self._range_of("ray_node_ports")
        return range(first, last + 1)

    def describe(self) -> dict[str, object]:
        """All settings, ranges and the arguments that follow from them, as JSON values."""
        return {
            "settings": self.asdict(),
            "ports": [msgspec.to_builtins(ports) for ports in self.ranges()],
            "train": self.train_options(),
            "train_replicated": self.train_options(replicated=True),
            "spark": self.spark_conf(),
            "ray_head": self.ray_arguments(head=True),
            "ray_node": self.ray_arguments(head=False),
        }
