"""EC2: Ray's, cloud-init's and CloudFormation's files fit their schemas, and ports the settings."""

import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from tests.support.aws_server import aws_environ, aws_server
from tests.support.target_tools import ROOT, TARGETS, TOOLS, output_of, tool
from worker.job.network import ClusterNetwork

EC2 = TARGETS / "ec2"
NETWORK = ClusterNetwork()
GROUPS = {
    "driver": {"Driver"},
    "executors": {"SparkWorker"},
    "shards": {"RayHead", "RayNode"},
    "ray head": {"RayHead"},
    "ray nodes": {"RayHead", "RayNode"},
    "spark master": {"SparkMaster"},
    "spark workers": {"SparkWorker"},
}
"""The security groups of each listener or client of the settings."""
ALONE = {"Driver", "RayHead", "SparkMaster"}
"""Groups of one instance, which needs no rule to reach itself."""


class _Template(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML ships no types
    """Reads a template of CloudFormation: `!Ref X` is {"Ref": "X"}."""


def _call(loader: _Template, suffix: str, node: yaml.Node) -> dict[str, Any]:
    assert isinstance(node, yaml.ScalarNode)
    return {suffix: loader.construct_scalar(node)}


_Template.add_multi_constructor("!", _call)
STACK: dict[str, Any] = yaml.load((EC2 / "stack.yaml").read_text(), _Template)  # it is a SafeLoader
RAY: dict[str, Any] = yaml.safe_load((EC2 / "ray-cluster.yaml").read_text())


def rules() -> set[tuple[str, str, int, int]]:
    """Each rule between groups: listener, client, first and last port."""
    rows = set()
    for resource in STACK["Resources"].values():
        if resource["Type"] == "AWS::EC2::SecurityGroupIngress":
            fields = resource["Properties"]
            names = [
                fields[name]["Ref"].removesuffix("Group")
                for name in ("GroupId", "SourceSecurityGroupId")
            ]
            rows.add((names[0], names[1], fields["FromPort"], fields["ToPort"]))
    return rows


def test_groups_open_the_settings_ports_and_no_others() -> None:
    """Between groups: what the settings' ranges say, and SSH from Ray's head to its nodes."""
    expected = {
        (listener, client, ports.first, ports.last)
        for ports in NETWORK.ranges()
        for name in ports.listener.split(", ")
        for listener in GROUPS.get(name, set())
        for client_name in ports.clients
        for client in GROUPS.get(client_name, set())
        if not (listener == client and listener in ALONE)
    }
    assert rules() - {("RayNode", "RayHead", 22, 22)} == expected


def test_others_reach_the_service_and_ssh_alone() -> None:
    """From outside, operators' addresses may reach two ports; nothing is open to all."""
    assert "0.0.0.0/0" not in (EC2 / "stack.yaml").read_text()
    for name, resource in STACK["Resources"].items():
        if resource["Type"] == "AWS::EC2::SecurityGroup":
            rows = resource["Properties"]["SecurityGroupIngress"]
            assert {row["CidrIp"]["Ref"] for row in rows} == {"OperatorCidr"}
            open_ports = {22, NETWORK.service_port} if name == "DriverGroup" else {22}
            assert {row["FromPort"] for row in rows} == open_ports


def test_references_of_the_stack_exist() -> None:
    """Each name that the template refers to is a parameter or a resource of it."""
    known = STACK["Parameters"].keys() | STACK["Resources"].keys()
    text = (EC2 / "stack.yaml").read_text()
    used = set(re.findall(r"!Ref (\w+)|!GetAtt (\w+)\.|\$\{(\w+)[.}]", text))
    assert {name for names in used for name in names if name} <= known
    assert STACK["Resources"]["SnapshotBucket"]["DeletionPolicy"] == "Retain"


def test_rays_schema_accepts_the_cluster() -> None:
    """`ray up` would accept the file: its own schema does, and refuses an unknown key."""
    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    jsonschema.validate(RAY, schema)
    with pytest.raises(jsonschema.ValidationError, match="max_wokers"):
        jsonschema.validate(RAY | {"max_wokers": 3}, schema)


def test_ray_listens_at_the_settings_ports() -> None:
    """Head and nodes start Ray with the ports of the settings."""
    for head, key in ((True, "head_start_ray_commands"), (False, "worker_start_ray_commands")):
        words = " ".join(RAY[key]).split()
        ports = [word for word in words if word.partition("=")[0].endswith("port")]
        expected = NETWORK.ray_arguments(head=head)
        assert sorted(ports) == sorted(word for word in expected if word != "--head")


def test_shards_are_on_demand_and_only_workers_on_spot() -> None:
    """No Ray node is a spot instance; the options for spot are those of Spark's workers."""
    assert "Spot" not in json.dumps(RAY["available_node_types"])
    assert json.loads((EC2 / "spot-workers.json").read_text())["MarketType"] == "spot"


@pytest.mark.parametrize("role", ["master", "worker"])
def test_cloud_init_accepts_the_user_data(role: str) -> None:
    """cloud-init's schema accepts it; it holds no key, and starts a unit that exists."""
    schema = TOOLS / "cloud-init" / "schema.json"
    if not schema.is_file():
        tool("the schema of cloud-init")  # there is no such program, so this skips or fails
    path = EC2 / f"cloud-init-spark-{role}.yaml"
    text = path.read_text()
    assert text.startswith("#cloud-config\n")
    output_of(tool("check-jsonschema"), "--schemafile", str(schema), str(path))
    assert not re.search(r"(?i)secret(?!.*bucket).*[=:] *\S{16}|AKIA", text)
    (unit,) = set(re.findall(r"downpour-spark-\w+\.service", text))
    assert (TARGETS / "units" / unit).is_file()


def test_aws_accepts_the_calls_of_the_page(tmp_path: Path) -> None:
    """moto makes the stack, with the template's rules, and spot workers with the node's profile.

    The teardown ends the instances, and leaves no group, but the bucket, as its policy says.
    """
    with aws_server(tmp_path / "moto.log") as address:
        python = Path(tool("moto_server")).with_name("python")
        program = ROOT / "tests" / "support" / "aws_calls.py"
        done = output_of(str(python), str(program), str(EC2), environ=aws_environ(address))
    results = json.loads(done)
    assert results["status"] == "CREATE_COMPLETE"
    assert {tuple(rule) for rule in results["rules"]} == rules()
    assert results["lifecycles"] == ["spot"] * 8
    assert set(results["profiles"]) == {"downpour-node"}
    assert set(results["states"]) == {"terminated"}
    assert results["groups_left"] == 0
    assert results["buckets_left"] == ["my-snapshots"]
