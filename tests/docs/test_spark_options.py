"""Spark's settings on the pages exist in the installed Spark, those of YARN and Kubernetes too."""

import re

import pytest

from tests.support.doc_pages import PAGES, fences, read
from tests.support.spark_names import is_setting

SETTING = re.compile(r"\bspark\.[a-z][A-Za-z]+(?:\.[A-Za-z_]+)+")
CODE = ("spark.sparkContext", "spark.read.", "spark.ml.")


@pytest.mark.parametrize("page", ["docs/how-to/spark-submit.md", "docs/how-to/clusters.md"])
def test_settings_exist(page: str) -> None:
    """Each name in a command or a settings file of a page is one that this Spark reads."""
    assert page in PAGES
    shown = "\n".join(fence.text for fence in fences(read(page)) if fence.language != "python")
    names = {name for name in SETTING.findall(shown) if not name.startswith(CODE)}
    assert len(names) > 3
    assert {name for name in names if not is_setting(name)} == set()


def test_a_wrong_setting_is_found() -> None:
    """A misspelt name is not known, and a real one is."""
    assert is_setting("spark.dynamicAllocation.shuffleTracking.enabled")
    assert not is_setting("spark.dynamicAllocation.shuffleTrakcing.enabled")
    assert not is_setting("spark.yarn.appMasterEnvs.PYSPARK_PYTHON")
