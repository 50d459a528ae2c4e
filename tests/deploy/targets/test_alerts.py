"""The alerts for Prometheus: promtool accepts them, and each fires on its series alone."""

import re
from pathlib import Path

import yaml

from tests.support.target_tools import output_of, tool

ROOT = Path(__file__).parents[3]
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
CASES = ROOT / "tests" / "data" / "alerts_test.yml"


def test_each_alert_fires_on_its_series() -> None:
    """Every alert has a case in which it fires and one in which it does not."""
    printed = output_of(tool("promtool"), "test", "rules", str(CASES))
    assert "SUCCESS" in printed
    assert "FAILED" not in printed
    alerts = {rule["alert"] for rule in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
    cases = [
        case
        for test in yaml.safe_load(CASES.read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    for fires in (True, False):
        assert {case["alertname"] for case in cases if ("exp_alerts" in case) is fires} == alerts


def test_alerts_use_figures_of_the_service() -> None:
    """Each figure in an expression is one that the service reports, by its name there."""
    figures = set(re.findall(r"downpour_\w+", ALERTS.read_text()))
    reported = set(
        re.findall(r'"(downpour_\w+)"', (ROOT / "deploy/service/metrics.py").read_text())
    )
    assert {figure.removesuffix("_total") for figure in figures} <= reported
