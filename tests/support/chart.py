"""The Helm chart as it renders, and the pods in what it renders, wherever they are."""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import yaml

from tests.support.target_tools import TARGETS, output_of, tool

CHART = TARGETS / "helm"
VALUES = (
    "",
    *(f"values/{path.name}" for path in sorted((CHART / "values").glob("*.yaml"))),
)
"""The files of values by their paths in the chart; empty for the defaults."""

Resource = dict[str, Any]


@cache
def render_text(values: str = "", *settings: str) -> str:
    """The manifests with a file of values, and with `settings` as for --set."""
    words = [tool("helm"), "template", "downpour", str(CHART), "--namespace", "downpour"]
    words += ["--values", str(CHART / values)] if values else []
    words += [word for setting in settings for word in ("--set", setting)]
    return output_of(*words)


@cache
def render(values: str = "", *settings: str) -> list[Resource]:
    """The resources with a file of values."""
    return [resource for resource in yaml.safe_load_all(render_text(values, *settings)) if resource]


def find(resources: list[Resource], kind: str, name: str) -> Resource:
    """The one resource of a kind and a name."""
    (resource,) = [
        item
        for item in resources
        if item["kind"] == kind and item["metadata"]["name"] == f"downpour-{name}"
    ]
    return resource


def runner_job(resources: list[Resource]) -> Resource:
    """The template of a runner's Job, as the service reads it."""
    job: Resource = json.loads(find(resources, "ConfigMap", "runner")["data"]["job.json"])
    return job


def executor_pod(resources: list[Resource]) -> Resource:
    """The template of an executor's pod, as Spark reads it."""
    text = find(resources, "ConfigMap", "spark")["data"]["executor-pod.yaml"]
    pod: Resource = yaml.safe_load(text)
    return pod


def spark_conf(resources: list[Resource]) -> dict[str, str]:
    """The settings of spark-defaults.conf."""
    text = find(resources, "ConfigMap", "spark")["data"]["spark-defaults.conf"]
    return dict(line.split(" ", 1) for line in text.splitlines() if line)


def pods(resources: list[Resource]) -> Iterator[tuple[str, Resource]]:
    """Every pod by its component, with the labels and the spec that a pod has."""
    ray = find(resources, "RayCluster", "ray")["spec"]
    templates = [
        find(resources, "StatefulSet", "service")["spec"]["template"],
        runner_job(resources)["spec"]["template"],
        executor_pod(resources),
        ray["headGroupSpec"]["template"],
        *(group["template"] for group in ray["workerGroupSpecs"]),
    ]
    for template in templates:
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": template["metadata"] | {"name": "pod"},
            "spec": template["spec"],
        }
        yield template["metadata"]["labels"]["app.kubernetes.io/component"], pod


def containers(pod: Resource) -> list[Resource]:
    """The containers of a pod, those for its start included."""
    listed: list[Resource] = pod["spec"].get("initContainers", []) + pod["spec"]["containers"]
    return listed
