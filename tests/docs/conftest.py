"""A place to run what the pages show: a folder with a small demo in it, and clusters at hand.

The pages start Ray and Spark as a user does. Here the doors lead to the session's shared ones, so
that a page costs a second and not a minute; they still refuse arguments that the real ones lack.

The environment is not activated: the first `python3` on PATH has no packages, and Spark runs it for
functions of the page's own unless the page says otherwise before it starts its session.
"""

import inspect
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from cupy_kernels.ops.updates import cpu as update_loops
from tests.support.bare_python import bare_python
from tests.support.doc_pages import ROOT
from tests.support.small_demo import write_demo, write_parquet
from worker.caffe.registry import LAYERS


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of a user in a clone, with a Parquet file of images in it."""
    write_demo(tmp_path / "deploy" / "demo")
    shutil.copytree(ROOT / "deploy" / "examples", tmp_path / "deploy" / "examples")
    shutil.copytree(ROOT / "docs" / "tutorials", tmp_path / "docs" / "tutorials")
    write_parquet(tmp_path / "digits.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def clusters(
    spark: Any, ray_local: str, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any
) -> Iterator[None]:
    """A page that starts Ray or Spark gets the ones that run."""
    import ray
    from pyspark.sql import DataFrameReader, DataFrameWriter, SparkSession

    from deploy.clusters import ray_cluster
    from worker import spark as door
    from worker.spark import tasks

    # The JVM began in another working directory, and would look for a page's files there.
    for kind, method in ((DataFrameReader, "parquet"), (DataFrameWriter, "json")):
        monkeypatch.setattr(kind, method, _at_absolute_path(getattr(kind, method)))

    for home, name, value in (
        (ray, "init", None),
        (ray_cluster, "connect", ray_local),
    ):
        monkeypatch.setattr(home, name, _stand_in(getattr(home, name), value))
    borrow: Callable[..., AbstractContextManager[object]] = _stand_in(door.start_session, spark)

    def with_this_python(*args: Any, **kwargs: Any) -> AbstractContextManager[object]:
        spark.sparkContext.pythonExec = sys.executable  # as a session of a command's own has it
        return borrow(*args, **kwargs)

    monkeypatch.setattr(door, "start_session", with_this_python)
    bare = bare_python(tmp_path_factory.mktemp("unactivated") / "bin")
    monkeypatch.setattr(tasks, "ANY_PYTHON", str(bare))
    get = SparkSession.Builder.getOrCreate

    def with_the_pages_python(builder: Any) -> Any:
        session = get(builder)
        # PySpark calls this, too, in threads without a session: that starts none, and must not
        # take away the Python that a command or `tasks.mapped` has chosen.
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("pyspark."):
            session.sparkContext.pythonExec = os.environ.get("PYSPARK_PYTHON", str(bare))
        return session

    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", with_the_pages_python)
    monkeypatch.setattr(spark.sparkContext, "pythonExec", spark.sparkContext.pythonExec)
    with patch.dict(os.environ):  # a page may set JAVA_HOME and PYSPARK_PYTHON
        os.environ.pop("PYSPARK_PYTHON", None)
        yield


def _at_absolute_path(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, path: method(self, str(Path(path).absolute()))


def _stand_in(real: Callable[..., Any], value: object) -> Callable[..., Any]:
    signature = inspect.signature(real)

    def start(*args: Any, **kwargs: Any) -> AbstractContextManager[object]:
        signature.bind(*args, **kwargs)
        return nullcontext(value)

    return start


@pytest.fixture
def registries() -> Iterator[None]:
    """What a page adds to a registry is taken out again."""
    kept: list[tuple[dict[str, Any], dict[str, Any]]]
    kept = [(registry, dict(registry)) for registry in (LAYERS, update_loops.UPDATES)]
    yield
    for registry, content in kept:
        registry.clear()
        registry.update(content)
