"""The Helm chart: every file of values renders what Kubernetes, KubeRay and Prometheus accept."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.support import chart
from tests.support.chart import CHART, VALUES, Resource
from tests.support.spark_names import is_setting
from tests.support.target_tools import TARGETS, need_node_modules, output_of, tool

ROOT = Path(__file__).parents[3]
MINORS = ("1.35", "1.36", "1.37")
RAY_CLUSTER = TARGETS / "tools" / "raycluster.schema.json"
OPERATOR = {"ServiceMonitor", "PrometheusRule"}
RELEASED = sorted((Path(__file__).parent / "released_values").glob("*.yaml"))
"""All values of each release by its name, with what is optional enabled."""


@pytest.fixture(params=VALUES, ids=lambda values: values or "default")
def resources(request: pytest.FixtureRequest) -> list[Resource]:
    """The resources with each file of values in turn."""
    return chart.render(request.param)


def check(resource: Resource, minor: str) -> None:
    """Check one resource by the schema of its kind; an unknown kind is an error."""
    if resource["kind"] == "RayCluster":
        jsonschema.validate(resource, json.loads(RAY_CLUSTER.read_text()))
    elif resource["kind"] not in OPERATOR:
        kubernetes_validate.validate(resource, minor, strict=True)


@pytest.mark.parametrize("values", VALUES, ids=lambda values: values or "default")
def test_helm_finds_no_fault(values: str) -> None:
    """`helm lint --strict` accepts the chart with each file of values."""
    given = ["--values", str(CHART / values)] if values else []
    assert "0 chart(s) failed" in output_of(tool("helm"), "lint", "--strict", str(CHART), *given)


@pytest.mark.parametrize("minor", MINORS)
def test_resources_fit_their_schemas(resources: list[Resource], minor: str) -> None:
    """Every resource has fields that its schema knows, in three minors of Kubernetes.

    So have the pods and the Job that the resources carry as text or as fields of a RayCluster.
    """
    for resource in resources:
        check(resource, minor)
    check(chart.runner_job(resources), minor)
    for _, pod in chart.pods(resources):
        check(pod, minor)


@pytest.mark.parametrize("released", RELEASED, ids=lambda path: path.stem)
def test_values_of_each_release_still_render(released: Path) -> None:
    """An upgrade takes the values that an operator has, and changes none of them."""
    resources = chart.render(str(released))
    for resource in resources:
        check(resource, MINORS[-1])
    assert {"Ingress", "ServiceMonitor", "RayCluster"} <= {item["kind"] for item in resources}


def test_the_values_of_this_release_are_kept() -> None:
    """Those of the chart's version are among them, with every key that the chart has now."""
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["version"]
    kept = {path.stem: yaml.safe_load(path.read_text()) for path in RELEASED}[version]
    now = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {(top, *_keys(kept[top])) for top in kept} == {(top, *_keys(now[top])) for top in now}


def _keys(value: object) -> list[str]:
    return sorted(value) if isinstance(value, dict) else []


def test_the_schemas_refuse_unknown_fields_and_kinds() -> None:
    """A misspelt field of a pod, a RayCluster or a Job is an error, and so is an unknown kind."""
    resources = chart.render()
    ray: Any = json.loads(json.dumps(chart.find(resources, "RayCluster", "ray")))
    ray["spec"]["headGroupSpec"]["rayStartParam"] = {}
    with pytest.raises(jsonschema.ValidationError, match="rayStartParam"):
        check(ray, MINORS[0])
    job: Any = json.loads(json.dumps(chart.runner_job(resources)))
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError, match="restartPolice"):
        check(job, MINORS[0])
    with pytest.raises(kubernetes_validate.SchemaNotFoundError):
        check({"apiVersion": "v1", "kind": "Pot", "metadata": {"name": "x"}}, MINORS[0])


def test_prometheus_operator_accepts_its_resources() -> None:
    """The ServiceMonitor and the rules fit the schemas of the Prometheus operator."""
    modules = need_node_modules()
    rendered = chart.render("values/guarded.yaml")
    monitor: Any = json.loads(json.dumps(chart.find(rendered, "ServiceMonitor", "service")))
    assert monitor["spec"]["endpoints"][0]["honorLabels"]  # else `job` would be the scrape's name
    monitors = [chart.find(rendered, "PrometheusRule", "alerts"), monitor]
    script = str(TARGETS / "tools" / "check-operator.mjs")
    output_of(tool("node"), script, str(modules), text=json.dumps(monitors))
    del monitor["spec"]["selector"]
    with pytest.raises(AssertionError, match="selector"):
        output_of(tool("node"), script, str(modules), text=json.dumps(monitors))


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("color=blue", "color"),
        ("images.service=registry.example/service:latest", "service"),
        ("images.service=registry.example/service", "service"),
        ("ray.nodes.resources.limits=null", "limits"),
        ("spark.executor.gpus=99", "gpus"),
        ("ports.service=70000", "service"),
        ("service.tlsSecretName=", "tlsSecretName"),
    ],
)
def test_wrong_values_are_refused_by_name(setting: str, named: str) -> None:
    """An unknown key, an image without a tag, a missing limit: Helm names the value."""
    words = [tool("helm"), "template", str(CHART), "--set", setting]
    with pytest.raises(AssertionError, match=named):
        output_of(*words)


def test_manifests_are_the_rendered_chart() -> None:
    """deploy/targets/manifests/downpour.yaml is the chart with its defaults, for use without Helm.

    `make manifests` writes it.
    """
    written = (TARGETS / "manifests" / "downpour.yaml").read_text()
    assert written == chart.render_text()


def test_alerts_are_those_of_the_service() -> None:
    """The chart's rules are deploy/prometheus/alerts.yml, which Helm cannot read from there."""
    original = ROOT / "deploy" / "prometheus" / "alerts.yml"
    assert (CHART / "files" / "alerts.yml").read_text() == original.read_text()
    rules = chart.find(chart.render("values/guarded.yaml"), "PrometheusRule", "alerts")
    assert rules["spec"] == yaml.safe_load(original.read_text())


def test_the_dashboard_is_one_that_grafana_s_sidecar_finds() -> None:
    """With its value the chart has deploy/prometheus/dashboard.json, labelled; without, nothing."""
    original = (ROOT / "deploy" / "prometheus" / "dashboard.json").read_text()
    assert (CHART / "files" / "dashboard.json").read_text() == original
    for rendered in (
        chart.render("values/guarded.yaml"),
        chart.render("", "monitoring.dashboard.enabled=true"),
    ):
        board = chart.find(rendered, "ConfigMap", "dashboard")
        assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert json.loads(board["data"]["downpour.json"]) == json.loads(original)
    assert "downpour-dashboard" not in chart.render_text()


def test_pods_are_restricted(resources: list[Resource]) -> None:
    """Every pod keeps the restricted standard: no root by number, no capability, a fixed root."""
    for component, pod in chart.pods(resources):
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys(), component
        assert not any("hostPath" in volume for volume in spec["volumes"]), component
        assert spec["securityContext"]["runAsUser"] == 10001, component
        for container in chart.containers(pod):
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "runAsNonRoot": True,
                "runAsUser": 10001,
                "capabilities": {"drop": ["ALL"]},
                "seccompProfile": {"type": "RuntimeDefault"},
            }, component


def test_containers_have_requests_and_limits(resources: list[Resource]) -> None:
    """Every container states what it needs and its limits, and runs an image with a tag."""
    for component, pod in chart.pods(resources):
        for container in chart.containers(pod):
            for part in ("requests", "limits"):
                assert {"cpu", "memory"} <= container["resources"][part].keys(), component
            tag = container["image"].partition("@")[0].rpartition("/")[2].partition(":")[2]
            assert tag not in {"", "latest"}, component


def test_mounts_have_volumes_and_shared_memory_is_sized(resources: list[Resource]) -> None:
    """Every mount names a volume of its pod, and each volume is mounted.

    Pods that exchange arrays in shared memory have a /dev/shm of a stated size; without one it has
    64 MB, or whatever the node chose.
    """
    for component, pod in chart.pods(resources):
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        mounts = [
            mount for container in chart.containers(pod) for mount in container["volumeMounts"]
        ]
        assert {mount["name"] for mount in mounts} == volumes.keys(), component
        shared = [volumes[m["name"]] for m in mounts if m["mountPath"] == "/dev/shm"]
        if component != "service":
            assert [volume["emptyDir"]["medium"] for volume in shared] == ["Memory"], component
            assert shared[0]["emptyDir"]["sizeLimit"], component


def test_secrets_are_named_and_never_held(resources: list[Resource]) -> None:
    """The chart has no Secret, and no variable for a secret holds one: each refers to a Secret."""
    assert not any(resource["kind"] == "Secret" for resource in resources)
    for component, pod in chart.pods(resources):
        for container in chart.containers(pod):
            for variable in container.get("env", []):
                if variable["name"] in {"RAY_AUTH_TOKEN", "DOWNPOUR_DATABASE"}:
                    assert "secretKeyRef" in variable["valueFrom"], component


def test_roles_grant_named_verbs_on_named_resources(resources: list[Resource]) -> None:
    """No role has a wildcard, none covers the whole cluster, and only two accounts have one."""
    assert not any(resource["kind"].startswith("ClusterRole") for resource in resources)
    roles = [resource for resource in resources if resource["kind"] == "Role"]
    bindings = [resource for resource in resources if resource["kind"] == "RoleBinding"]
    assert {role["metadata"]["name"] for role in roles} == {"downpour-service", "downpour-runner"}
    assert {binding["roleRef"]["name"] for binding in bindings} == {
        role["metadata"]["name"] for role in roles
    }
    for rule in (rule for role in roles for rule in role["rules"]):
        assert "*" not in rule["verbs"] + rule["resources"] + rule["apiGroups"]
        assert "secrets" not in rule["resources"]
    for component, pod in chart.pods(resources):
        mounted = component in {"service", "runner"}
        assert pod["spec"]["automountServiceAccountToken"] is mounted, component


def test_spark_defaults_are_settings_that_this_spark_knows(resources: list[Resource]) -> None:
    """Each name in spark-defaults.conf is a string in a class of the installed Spark."""
    names = set(chart.spark_conf(resources))
    assert {"spark.authenticate", "spark.network.crypto.enabled"} <= names
    assert {name for name in names if not is_setting(name)} == set()
    assert not is_setting("spark.kubernetes.executor.podTemplateFill")
