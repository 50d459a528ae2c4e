"""Grafana's dashboard: laid out as Grafana needs it, and each expression has series of the service.

Grafana itself is not run; Prometheus is, where `make tools` has installed it.
"""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import deploy
from deploy.run.progress_model import ShardReading
from deploy.service.states import JobState
from shards.shard_status import Histogram
from tests.support.eventually import eventually
from tests.support.job_readings import write_figures
from tests.support.ports import free_port
from tests.support.service_in_process import Running, Start, listening
from tests.support.target_tools import TARGETS, output_of, tool

DASHBOARD: dict[str, Any] = json.loads(
    (Path(deploy.__file__).parent / "prometheus" / "dashboard.json").read_text()
)
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
VARIABLES: dict[str, dict[str, Any]] = {
    variable["name"]: variable for variable in DASHBOARD["templating"]["list"]
}
TARGETS_OF_PANELS = [(panel, target) for panel in PANELS for target in panel["targets"]]
EXPRESSIONS = [target["expr"] for _, target in TARGETS_OF_PANELS]
WIDTH = 24  # columns of Grafana's grid
_ADDED = {"le"}
"""Labels that Prometheus' format adds to a histogram."""


def fill_in(expression: str) -> str:
    """An expression as Grafana sends it, for all jobs."""
    return expression.replace("$__rate_interval", "30s").replace("$job", ".*")


def names_and_labels(expression: str) -> tuple[set[str], set[str]]:
    """The figures that an expression reads, and the labels that it selects or groups by."""
    selectors = re.findall(r"\{([^}]*)\}", expression)
    labels = {label for text in selectors for label in re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", text)}
    for listed in re.findall(r"\b(?:by|without|on|ignoring) \(([^)]*)\)", expression):
        labels |= set(listed.split(", "))
    return set(re.findall(r"downpour_\w+", expression)), labels


@pytest.fixture
def busy(start: Start) -> Iterator[tuple[Running, str]]:
    """A service with a job that has every figure; and the job's id."""
    with start(driven=False) as running:
        store, job = running.service.store, running.submit("train")
        for state in (JobState.CHECKING, JobState.STARTING, JobState.RUNNING):
            store.move(store.get(job), state)
        counts = Histogram((0.001, 2.5), (3, 1, 1), 9.5)
        figures = (0, 5, None, None, None, 0)
        shard = ShardReading(*figures, apply_s=counts, queues=counts, parked=counts)
        write_figures(store.folder(job), shards=(shard,))
        head = {"steps": 900, "loss": 0.5, "staleness_p50": 2.0, "goodput": 0.9, "waiting": 1}
        store.show(job, head=head, snapshot="400")
        alert = {"alert": "at_bound", "on": True, "text": "", "alerts": ["at_bound"]}
        store.note(store.get(job), "alert", **alert)
        yield running, job


def test_every_figure_and_label_is_the_service_s(busy: tuple[Running, str]) -> None:
    """Expressions, legends and variables name figures and labels of /metrics, and no others.

    Every figure is in a panel.
    """
    text = busy[0].http.get("/metrics").text
    labels: dict[str, set[str]] = {}
    families: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
            families[sample.name] = family.name
    assert VARIABLES["job"]["query"]["query"] == "label_values(downpour_job_running, job)"
    assert "job" in labels["downpour_job_running"]
    shown = set()
    for _, target in TARGETS_OF_PANELS:
        figures, used = names_and_labels(target["expr"])
        used |= set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert figures, target
        assert figures <= labels.keys(), target
        assert all(used <= labels[figure] | _ADDED for figure in figures), target
        shown |= {families[figure] for figure in figures}
    assert shown == set(families.values())


def test_grafana_can_lay_it_out() -> None:
    """Panels have ids and titles of their own, and neither overlap nor leave the grid."""
    for field in ("id", "title"):
        assert len({panel[field] for panel in PANELS}) == len(PANELS)
    boxes = [panel["gridPos"] for panel in PANELS]
    for box in boxes:
        assert min(box["w"], box["h"]) > 0
        assert 0 <= box["x"] <= box["x"] + box["w"] <= WIDTH
    for one, other in combinations(boxes, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert DASHBOARD["uid"]
    assert "id" not in DASHBOARD  # Grafana's database numbers it
    assert isinstance(DASHBOARD["schemaVersion"], int)


def test_the_user_chooses_the_datasource() -> None:
    """Each panel and each query reads from a variable, so that any Prometheus serves."""
    assert VARIABLES["datasource"]["type"] == "datasource"
    assert VARIABLES["datasource"]["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert VARIABLES["job"]["datasource"] == chosen
    for panel, target in TARGETS_OF_PANELS:
        assert panel["datasource"] == target["datasource"] == chosen
    for panel in PANELS:
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(PANELS)))
    assert used - {"__rate_interval"} == VARIABLES.keys()


def test_promtool_accepts_the_expressions(tmp_path: Path) -> None:
    """Each is valid; a wrong one is not."""
    rules = [
        {"record": f"panel:{number}", "expr": fill_in(expression)}
        for number, expression in enumerate(EXPRESSIONS)
    ]
    file = tmp_path / "rules.yml"

    def check() -> str:
        file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
        return output_of(tool("promtool"), "check", "rules", str(file))

    assert f"{len(rules)} rules found" in check()
    rules[0]["expr"] = "sum by (job downpour_jobs)"
    with pytest.raises(AssertionError, match="parse error"):
        check()


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[str]:
    """The URL of a Prometheus that reads a service each second, else as that of Compose."""
    config = yaml.safe_load((TARGETS / "compose" / "prometheus.yml").read_text())
    del config["rule_files"]
    config["global"] = {"scrape_interval": "1s"}
    (scrape,) = config["scrape_configs"]
    for field in ("authorization", "tls_config"):
        del scrape[field]
    scrape |= {"scheme": "http", "static_configs": [{"targets": [target]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    address = f"127.0.0.1:{free_port()}"
    command = [tool("prometheus"), f"--config.file={folder / 'prometheus.yml'}"]
    command += [f"--storage.tsdb.path={folder / 'series'}", f"--web.listen-address={address}"]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait(60)


def test_prometheus_has_series_for_every_panel(busy: tuple[Running, str], tmp_path: Path) -> None:
    """It answers every expression, and keeps the job's id in the label `job`.

    Without `honor_labels` that label has the name of the scrape, and ours another name: alerts and
    panels would then name no job.
    """
    running, job = busy
    with (
        listening(running) as url,
        prometheus(tmp_path, urlsplit(url).netloc) as server,
        httpx.Client(base_url=server) as client,
    ):

        def ask(expression: str) -> list[dict[str, Any]]:
            try:
                answer = client.get("/api/v1/query", params={"query": fill_in(expression)})
            except httpx.TransportError:
                return []  # it has not begun to listen
            if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE:
                return []  # it listens, and still reads its data
            found: list[dict[str, Any]] = answer.json().get("data", {}).get("result", [])
            return found

        for expression in EXPRESSIONS:
            because = f"{expression}\n{(tmp_path / 'log').read_text()}"
            series = eventually(partial(ask, expression), because=because, within_s=60)
            if "$job" in expression:
                assert {one["metric"]["job"] for one in series} == {job}, expression
        (late,) = ask("downpour_job_steps_total - downpour_job_snapshot_steps")
        assert late["value"][1] == "500"
