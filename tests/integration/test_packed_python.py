"""A Python of `downpour pack` on a host that has no other: no checkout, no system's, no network.

It is the short form of `make check C=cluster`, which has three hosts, Ray and a standalone master.
"""

import filecmp
import hashlib
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.clusters.archive import pack
from deploy.clusters.archive_check import check_archive
from deploy.clusters.bill_of_materials import BILL
from tests.support import tiny_job
from tests.support.bills import check_bill, list_parts
from tests.support.fresh_clone import ROOT
from tests.support.hosts import Host, bare_hosts, missing_for_bare_hosts
from tests.support.packed import pack_once, unpack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PYTHON = "/opt/downpour/bin/python"

TRAIN_HERE = """
import sys
import numpy as np
import ps

with ps.start({"w": np.zeros(3, np.float32)}, on="threads") as job:
    with job.worker("w0") as me:
        with me.step() as step:
            step.push({"w": step.pull()["w"] + 1})
        with me.step() as step:
            assert step.pull()["w"].tolist() != [0, 0, 0]
print(*sys.path, sep="\\n")
"""


@pytest.fixture(scope="module")
def archive() -> Path:
    return pack_once("with-cli", "cli")


@pytest.fixture(scope="module")
def host(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    if reason := missing_for_bare_hosts():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("host")
    unpack(archive, folder / "downpour")
    job = folder / "job"
    job.mkdir()
    tiny_job.write_job(job, max_iter=40)
    files = {"/opt/downpour": folder / "downpour", "/opt/downpour.tar.gz": archive, "/opt/job": job}
    with bare_hosts(folder, ["alone"], files) as (alone,):
        yield alone


def test_it_describes_itself(archive: Path) -> None:
    """No link leaves the archive, and no note of the builder's installer is in it."""
    contents = check_archive(archive).manifest
    assert contents is not None
    assert {"numpy", "pandas", "pyarrow", "typer"} <= contents.packages.keys()
    with tarfile.open(archive) as members:
        names = members.getnames()
    assert "spark_submit.py" in names
    assert "demo/lenet_solver.prototxt" in names
    assert not [name for name in names if name.endswith(("/direct_url.json", "/INSTALLER"))]


def test_its_bill_of_materials_has_all_that_is_there(archive: Path) -> None:
    """The bill lists every distribution with its version, and every file with its SHA-256.

    The format is CycloneDX's. Only compiled modules and the bill itself are not in it.
    """
    contents = check_archive(archive).manifest
    assert contents is not None
    digests = {}
    with tarfile.open(archive) as members:
        for member in members:
            file = members.extractfile(member) if member.isfile() else None
            if file is not None and not member.name.endswith(".pyc"):
                content = file.read()
                digests[member.name] = hashlib.sha256(content).hexdigest()
                if member.name == BILL:
                    text = content.decode()
    check_bill(text)
    bill = json.loads(text)
    packages = [part for part in bill["components"] if part.get("purl", "").startswith("pkg:pypi/")]
    assert {part["name"]: part["version"] for part in packages} == contents.packages
    listed = [part for part in list_parts(bill) if "hashes" in part]
    hashes = sorted(part["hashes"][0]["content"] for part in listed)
    assert hashes == sorted(digest for name, digest in digests.items() if name != BILL)


def test_two_archives_of_one_environment_are_equal(archive: Path, tmp_path: Path) -> None:
    """They have the same bytes, their bills of materials included."""
    pack(tmp_path / "second.tar.gz", ["cli"], level=1)
    assert filecmp.cmp(archive, tmp_path / "second.tar.gz", shallow=False)


def test_it_runs_where_no_other_python_is(host: Host) -> None:
    """The interpreter and all that it imports come from where the archive was unpacked."""
    assert host.run("sh", "-c", "python3 -V || python -V || pip -V").returncode != 0
    assert not host.path(str(ROOT)).exists()
    done = host.run(PYTHON, "-c", TRAIN_HERE)
    assert done.returncode == 0, done.stderr
    paths = [line for line in done.stdout.splitlines() if line]
    assert paths
    assert all(path.startswith("/opt/downpour/") for path in paths)
    version = host.run("/opt/downpour/bin/downpour", "--version")
    assert version.stdout.startswith("downpour "), version.stderr


def test_executors_train_in_it(host: Host) -> None:
    """`spark-submit --archives` trains in executors that unpack the archive themselves."""
    # The workers of such a master write next to Spark itself.
    linked = "mkdir /home/user/spark && ln -s /opt/spark/* /home/user/spark"
    assert host.run("sh", "-c", linked).returncode == 0
    spark = ["/home/user/spark/bin/spark-submit", "--master", "local-cluster[2,1,1024]"]
    spark += ["--archives", "/opt/downpour.tar.gz#environment"]
    spark += ["--conf", "spark.pyspark.python=./environment/bin/python"]
    spark += ["--conf", f"spark.pyspark.driver.python={PYTHON}", "--conf", "spark.ui.enabled=false"]
    train = ["/opt/downpour/spark_submit.py", "train", "--solver", "/opt/job/solver.prototxt"]
    train += ["--data", "/opt/job/data", "--out", "/home/user/run", "--shards-in", "processes"]
    environ = {"SPARK_HOME": "/home/user/spark", "SPARK_LOCAL_IP": "127.0.0.1"}
    done = host.run(*spark, *train, environ=environ)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary = json.loads(host.path("/home/user/run/summary.json").read_text())
    assert summary["updates"] == 80
