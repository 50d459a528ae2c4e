"""Ports have one home, worker/job/network.py: manifests, units, Compose and EC2 have the same."""

import shlex
from itertools import pairwise
from typing import Any

import pytest
import yaml

from tests.support import chart
from tests.support.chart import VALUES
from tests.support.target_tools import TARGETS
from worker.job.network import ClusterNetwork

NETWORK = ClusterNetwork()
RANGES = {ports.name: (ports.first, ports.last) for ports in NETWORK.ranges()}
IN_VALUES = {
    "service": "service",
    "shards": "shards",
    "coordinator": "coordinator",
    "copies": "copies",
    "sparkDriver": "spark driver",
    "sparkBlockManager": "spark block managers",
    "rayHead": "ray head",
    "rayClient": "ray client",
    "rayDashboard": "ray dashboard",
    "rayNode": "ray node",
    "rayProcesses": "ray processes",
}
"""The chart's names of ports, each with its name among the settings."""
COMPONENTS = {
    "driver": {"runner"},
    "executors": {"executor"},
    "shards": {"ray-head", "ray-node"},
    "ray head": {"ray-head"},
    "ray nodes": {"ray-head", "ray-node"},
}
"""The pods of each listener or client of the settings."""
SPARK_PORTS = {
    "Master": ("spark master", "spark master page"),
    "Worker": ("spark worker", "spark worker page"),
}
COMPOSE: dict[str, Any] = yaml.safe_load((TARGETS / "compose" / "compose.yaml").read_text())
STANDALONE = {"operators", "spark master", "spark workers", "spark connect", "users"}


def bounds(value: Any) -> tuple[int, int]:
    """The first and the last port of a value of the chart, or of a rule of a policy."""
    if isinstance(value, int):
        return value, value
    first = value.get("first", value.get("port"))
    return first, value.get("last", value.get("endPort", first))


@pytest.mark.parametrize("values", VALUES, ids=lambda values: values or "default")
def test_the_charts_ports_are_the_settings(values: str) -> None:
    """No file of values has another port."""
    given = yaml.safe_load((chart.CHART / "values.yaml").read_text())
    if values:
        given["ports"] |= yaml.safe_load((chart.CHART / values).read_text()).get("ports", {})
    assert {name: bounds(value) for name, value in given["ports"].items()} == {
        name: RANGES[known] for name, known in IN_VALUES.items()
    }


def allowed(direction: str, peers: str) -> set[tuple[str, str, tuple[int, int]]]:
    """Listener, client and ports of each rule of the policies in one direction."""
    rows = set()
    for resource in chart.render():
        if resource["kind"] != "NetworkPolicy":
            continue
        labels = resource["spec"]["podSelector"]["matchLabels"]
        component = labels.get("app.kubernetes.io/component")
        for rule in resource["spec"].get(direction, []):
            for peer in rule[peers]:
                selected = peer.get("podSelector", {}).get("matchLabels", {})
                other = selected.get("app.kubernetes.io/component")
                if component and other:
                    pair = (component, other) if direction == "ingress" else (other, component)
                    rows |= {(*pair, bounds(port)) for port in rule["ports"]}
    return rows


def test_policies_open_the_settings_ports_and_no_others() -> None:
    """Between pods of the chart, exactly what the settings' ranges say may connect.

    Both sides have the rule: the listener's ingress and the client's egress.
    """
    expected = {
        (listener, client, (ports.first, ports.last))
        for ports in NETWORK.ranges()
        for name in ports.listener.split(", ")
        for listener in COMPONENTS.get(name, set())
        for client_name in set(ports.clients) - STANDALONE
        for client in COMPONENTS[client_name]
        if (listener, client) not in {("runner", "runner"), ("ray-head", "ray-head")}
    }
    assert allowed("ingress", "from") == expected
    assert allowed("egress", "to") == expected


def test_everything_else_is_denied() -> None:
    """A policy that selects all pods of the release allows name resolution, and nothing in."""
    deny = chart.find(chart.render(), "NetworkPolicy", "default-deny")["spec"]
    assert "app.kubernetes.io/component" not in deny["podSelector"]["matchLabels"]
    assert deny["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in deny
    ((rule,),) = [deny["egress"]]
    assert {port["port"] for port in rule["ports"]} == {53}


def test_pods_listen_at_the_settings_ports() -> None:
    """The RayCluster's parameters and spark-defaults.conf are what the settings make of them."""
    resources = chart.render()
    ray = chart.find(resources, "RayCluster", "ray")["spec"]
    for head, group in ((True, ray["headGroupSpec"]), (False, ray["workerGroupSpecs"][0])):
        given = {
            name: value
            for name, value in group["rayStartParams"].items()
            if name.endswith("port") and name != "dashboard-port"
        }
        arguments = dict(word[2:].split("=") for word in NETWORK.ray_arguments(head=head)[head:])
        arguments.pop("dashboard-port", None)  # the chart's head has no dashboard
        assert given == arguments
    conf = chart.spark_conf(resources)
    ours = {name: value for name, value in NETWORK.spark_conf().items() if name != "spark.ui.port"}
    assert {name: conf[name] for name in ours} == ours


def commands() -> list[tuple[str, list[str]]]:
    """The words of each command of a unit or of Compose, by its name."""
    rows = []
    for unit in sorted((TARGETS / "units").glob("*.service")):
        (line,) = [line for line in unit.read_text().splitlines() if line.startswith("ExecStart=")]
        rows.append((unit.stem, shlex.split(line.removeprefix("ExecStart="))))
    for name, service in COMPOSE["services"].items():
        command = service.get("command", [])
        words = shlex.split(command[2]) if command[:2] == ["sh", "-euc"] else command
        rows.append((f"compose {name}", words))
    return rows


@pytest.mark.parametrize(("name", "words"), commands(), ids=[name for name, _ in commands()])
def test_commands_listen_at_the_settings_ports(name: str, words: list[str]) -> None:
    """`ray start`, Spark's daemons and `downpour serve` get the ports of the settings."""
    follow = dict(pairwise(words))
    if "--block" in words:
        ports = [word for word in words if word.partition("=")[0].endswith("port")]
        expected = NETWORK.ray_arguments(head="--head" in words)
        assert sorted(ports) == sorted(word for word in expected if word != "--head")
        addresses = [word for word in words if word.startswith("--address=")]
        assert all(word.endswith(f":{NETWORK.ray_port}") for word in addresses)
    for kind, (port, page) in SPARK_PORTS.items():
        if f"org.apache.spark.deploy.{kind.lower()}.{kind}" in words:
            assert int(follow["--port"]) == RANGES[port][0]
            assert int(follow["--webui-port"]) == RANGES[page][0]
            if kind == "Worker":
                assert words[-1].endswith(f":{NETWORK.spark_master_port}")
    if "serve" in words:
        assert int(follow["--port"]) == NETWORK.service_port


def test_published_ports_are_on_loopback() -> None:
    """Compose publishes the service and Prometheus, to this machine alone."""
    published = [port for item in COMPOSE["services"].values() for port in item.get("ports", [])]
    service = NETWORK.service_port
    assert published == [f"127.0.0.1:{service}:{service}", "127.0.0.1:9090:9090"]
