"""The names of settings that the installed Spark reads, by the texts in its jars."""

import re
import zipfile
from functools import cache
from pathlib import Path

import pyspark

_JARS = Path(pyspark.__file__).parent / "jars"
_PARTS = ("core", "kubernetes", "yarn", "network-common", "common-utils", "sql-api", "catalyst")
_OF_USERS = ("spark.yarn.appMasterEnv.", "spark.executorEnv.")
"""Prefixes of settings that a user names."""
_RESOURCE = re.compile(
    r"spark\.(?:driver|executor|task|worker)\.resource\.\w+\.(amount|discoveryScript|vendor)"
)
"""Settings that Spark composes of four texts."""


@cache
def _read_classes() -> bytes:
    """All classes of Spark's own jars, one after another."""
    classes = []
    for part in _PARTS:
        (jar,) = _JARS.glob(f"spark-{part}_*.jar")
        with zipfile.ZipFile(jar) as archive:
            names = [name for name in archive.namelist() if name.endswith(".class")]
            classes += [archive.read(name) for name in names]
    return b"".join(classes)


def is_setting(name: str) -> bool:
    """Return whether Spark's classes have a name as one text, or as a prefix and its rest.

    Spark composes the names of resources and of accounts in that way.
    """
    classes = _read_classes()
    for prefix in _OF_USERS:
        if name.startswith(prefix):
            return prefix.encode() in classes
    if resource := _RESOURCE.fullmatch(name):
        return resource[1].encode() in classes
    parts = name.split(".")
    cuts = ((".".join(parts[:cut]), ".".join(parts[cut:])) for cut in range(3, len(parts)))
    return name.encode() in classes or any(
        head.encode() in classes and f".{rest}".encode() in classes for head, rest in cuts
    )
