"""The zip that goes to executors is this project, whole and importable."""

import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

from ps import build_id
from worker.spark.code_archive import PACKAGES, pack_code


def test_zip_alone_is_enough(tmp_path: Path) -> None:
    """With nothing but the zip on its path an interpreter imports it, and computes our build id."""
    path = pack_code(tmp_path)
    script = "import ps, shards, worker, deploy, cupy_kernels; print(ps.__file__, ps.build_id())"
    done = run_with(path, script)
    assert done.stdout.split() == [f"{path}/ps/__init__.py", build_id()], done.stderr


def run_with(path: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script that finds this project in the zip alone."""
    # -S drops the installed project with the rest of site-packages, so those are named again.
    libraries = [entry for entry in sys.path if entry.endswith("-packages")]
    return subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={"PYTHONPATH": ":".join([str(path), *libraries])},
        cwd=path.parent,
        capture_output=True,
        text=True,
        check=False,
    )


def test_data_that_a_zip_lacks_is_named(tmp_path: Path) -> None:
    """Experiments on the demo's images say that the code is a copy without them."""
    path = pack_code(tmp_path)
    done = run_with(path, "from deploy.experiments.images import mnist; mnist()")
    expected = f"BadInput: the demo's data: expected the folder {path}/deploy/demo"
    assert expected in done.stderr


def test_zip_holds_data_and_no_demo(tmp_path: Path) -> None:
    """Type markers and other data travel with the code; compiled files and the demo's stay."""
    with ZipFile(pack_code(tmp_path)) as archive:
        names = archive.namelist()
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    assert not [name for name in names if "__pycache__" in name or name.startswith("deploy/demo")]


def test_same_code_same_bytes(tmp_path: Path) -> None:
    """Packing twice gives equal files under one name, which carries the build id."""
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        folder.mkdir()
    one, two = map(pack_code, folders)
    assert one.name == two.name == f"downpour-{build_id()}.zip"
    assert one.read_bytes() == two.read_bytes()
