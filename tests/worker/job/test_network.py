"""The settings of addresses and ports, and what follows from them."""

import json
from typing import Any

import pytest
from pyspark import SparkConf

from shards.errors import BadInput
from tests.support.cli_in_process import command
from worker.job.network import ClusterNetwork, DriverNetwork
from worker.job.options import ShardRuntime


def test_ranges_are_those_of_the_settings() -> None:
    """Each setting of a port is in exactly one range, and moves it."""
    network = ClusterNetwork(port=9000, shard_ports=10, driver_port=9100, port_tries=3)
    ranges = {ports.name: (ports.first, ports.last) for ports in network.ranges()}
    assert ranges["shards"] == (9000, 9009)
    assert ranges["spark driver"] == (9100, 9103)
    assert ranges["copies"] == (7500, 7599)
    settings = [ports.setting for ports in network.ranges()]
    named = [
        name
        for name in network.asdict()
        if name.endswith(("port", "ports", "page")) and name != "shard_ports"
    ]
    assert sorted(settings) == sorted(named)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"port": 7450}, "--copy-ports: expected ports apart from those of shards, 7450-7549"),
        ({"spark_master_page": 8265}, "expected ports apart from"),
        ({"port": 65_500}, "--port: expected ports up to 65535, got 65599"),
        ({"copy_ports": "7500-7502"}, "--copy-ports: expected at least 6 ports"),
        ({"ray_node_ports": "6380-6384"}, "--ray-node-ports: expected a range of 6 ports, got 5"),
        ({"ray_worker_ports": "9-8"}, "--ray-worker-ports: expected a range of ports"),
        ({"advertise": "0.0.0.0"}, "--advertise: expected HOST or HOST:PORT"),
        ({"driver_host": "h:1"}, "--driver-host: expected a host without a port"),
        ({"app_name": "a\nb"}, "--app-name: expected a name of printable"),
    ],
)
def test_wrong_ports(wrong: dict[str, Any], line: str) -> None:
    """Ports that overlap, or of which there are too few, are refused by the option's name."""
    with pytest.raises(BadInput) as caught:
        ClusterNetwork(**wrong)
    assert line in str(caught.value)


def test_ports_that_a_run_leaves_open() -> None:
    """A run without such options has any free ports, and leaves Spark's settings alone."""
    assert DriverNetwork().spark_conf() == {}
    assert (ShardRuntime().port, ShardRuntime().coordinator_port) == (0, 0)
    conf = DriverNetwork(driver_port=7600, driver_host="nat.example").spark_conf()
    assert conf == {
        "spark.driver.port": "7600",
        "spark.port.maxRetries": "16",
        "spark.driver.host": "nat.example",
    }
    assert SparkConf(loadDefaults=False).setAll([*conf.items()]).get("spark.driver.port") == "7600"
    with pytest.raises(BadInput, match=r"^copy_ports 7500-7505: expected durability replicated"):
        ShardRuntime(copy_ports="7500-7505")
    with pytest.raises(BadInput, match=r"^copy_ports: expected at least 12 ports"):
        ShardRuntime(copy_ports="7500-7510", durability="replicated", shards=2)
    with pytest.raises(BadInput, match=r"^advertise nat:9000: expected port, too"):
        ShardRuntime(advertise="nat:9000")
    shards = ShardRuntime(advertise="nat:9000", port=7400)
    assert (shards.shift_advertised(0), shards.shift_advertised(2)) == ("nat:9000", "nat:9002")


def test_the_command_prints_what_follows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The printed options of a run and of Ray have the printed ports."""
    _, out, _ = command(capsys, monkeypatch)("deploy", "network", "--port", 9000)
    printed = json.loads(out)
    ranges = {ports["setting"]: ports for ports in printed["ports"]}
    assert printed["settings"]["port"] == ranges["port"]["first"] == 9000
    assert printed["train"][:4] == ["--bind", "0.0.0.0", "--port", "9000"]
    assert "--copy-ports" in printed["train_replicated"]
    assert f"--port={ranges['ray_port']['first']}" in printed["ray_head"]
    assert not any("--port=" in word for word in printed["ray_node"])
    assert printed["spark"]["spark.driver.port"] == str(ranges["driver_port"]["first"])
