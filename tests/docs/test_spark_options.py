"""Spark's settings on the pages exist in the installed Spark, those of YARN and Kubernetes too."""

import re
import zipfile
from functools import cache
from pathlib import Path

import pyspark
import pytest

from tests.support.doc_pages import PAGES, fences, read

JARS = Path(pyspark.__file__).parent / "jars"
PARTS = ("core", "kubernetes", "yarn", "network-common", "common-utils", "sql-api", "catalyst")
SETTING = re.compile(r"\bspark\.[a-z][A-Za-z]+(?:\.[A-Za-z_]+)+")
OF_USERS = ("spark.yarn.appMasterEnv.", "spark.executorEnv.")
"""Prefixes of settings that a user names."""
RESOURCE = re.compile(
    r"spark\.(driver|executor|task|worker)\.resource\.\w+\.(amount|discoveryScript|vendor)"
)
"""Settings that Spark composes of four texts."""
CODE = ("spark.sparkContext", "spark.read.", "spark.ml.")


@cache
def spark_texts() -> bytes:
    """All classes of Spark's own jars, one after another."""
    texts = []
    for part in PARTS:
        (jar,) = JARS.glob(f"spark-{part}_*.jar")
        with zipfile.ZipFile(jar) as archive:
            names = [name for name in archive.namelist() if name.endswith(".class")]
            texts += [archive.read(name) for name in names]
    return b"".join(texts)


def is_known(name: str) -> bool:
    """Return whether Spark's classes have a name as one text, or as a prefix and its rest."""
    for prefix in OF_USERS:
        if name.startswith(prefix):
            return prefix.encode() in spark_texts()
    if RESOURCE.fullmatch(name):
        return True
    parts = name.split(".")
    cuts = ((".".join(parts[:cut]), ".".join(parts[cut:])) for cut in range(3, len(parts)))
    return name.encode() in spark_texts() or any(
        head.encode() in spark_texts() and f".{rest}".encode() in spark_texts()
        for head, rest in cuts
    )


@pytest.mark.parametrize("page", ["docs/how-to/spark-submit.md", "docs/how-to/clusters.md"])
def test_settings_exist(page: str) -> None:
    """Each name in a command or a settings file of a page is one that this Spark reads."""
    assert page in PAGES
    shown = "\n".join(fence.text for fence in fences(read(page)) if fence.language != "python")
    names = {name for name in SETTING.findall(shown) if not name.startswith(CODE)}
    assert len(names) > 3
    assert {name for name in names if not is_known(name)} == set()


def test_a_wrong_setting_is_found() -> None:
    """A misspelt name is not known, and a real one is."""
    assert is_known("spark.dynamicAllocation.shuffleTracking.enabled")
    assert not is_known("spark.dynamicAllocation.shuffleTrakcing.enabled")
    assert not is_known("spark.yarn.appMasterEnvs.PYSPARK_PYTHON")
