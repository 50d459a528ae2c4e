"""Build the images of deploy/targets with podman, and try them: their seconds and their sizes.

    python -m tests.bench.image_builds [--targets service executor] [--certificates FILE ...]

The base is made of Debian's packages, so that no registry of images is needed; root is. Each image
then runs as its own user, without a network, capabilities or a writable root folder. CERTIFICATES
are of authorities that the registries of packages are reached through. All is in a store of its
own, which is removed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deploy.clusters.bill_of_materials import BILL
from tests.bench.report import Goal, goals
from tests.support.fresh_clone import ROOT

TARGETS = ROOT / "deploy" / "targets"
IMAGES = TARGETS / "images"
BASE = "downpour-base:12"
STAND_INS = Path(__file__).parent / "stand_ins"
_PROGRAMS = ("podman", "runc", "mmdebstrap")
_SIZES_MB = {"service": 400.0, "executor": 1200.0}
_BUILDS_S = 600.0
_MB = 1e6
_STORE = """\
[storage]
driver = "overlay"
graphroot = "{folder}/images"
runroot = "{folder}/run"
"""
# Debian's crun refuses hybrid control groups, and there may be no systemd to manage them.
_ENGINE = """\
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
[containers]
default_ulimits = ["nofile=4096:4096", "nproc=4096:4096"]
"""
_TRIALS = {
    "service": ("downpour", "serve", "--help"),
    "executor": ("python", "-c", "import pyspark.worker, worker.spark.worker_task"),
    "driver": ("downpour", "train", "--help"),
    "gpu": ("python", "-c", "import cupy"),
}
"""What each image runs to show that its parts are there."""
_LIBRARIES = "numpy, pyarrow.compute, pyarrow.dataset, pyarrow.fs, pyarrow.parquet"
"""Libraries of every image from which parts are removed."""


def main() -> None:
    """Build, try, and print the goals."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--targets", nargs="+", choices=list(_TRIALS), default=list(_SIZES_MB))
    parser.add_argument("--certificates", nargs="*", type=Path, default=[])
    options = parser.parse_args()
    if reason := missing_for_images():
        sys.exit(f"skipped: {reason}")
    with open_store() as environ:
        seconds = {"base": make_base(options.certificates, environ)}
        for target in options.targets:
            seconds[target] = build_image(target, environ)
            try_image(target, environ)
        sizes = {target: read_size_mb(target, environ) for target in options.targets}
    rows = [
        Goal(f"size of {target}", sizes[target], most, "MB")
        for target, most in _SIZES_MB.items()
        if target in sizes
    ]
    if "executor" in seconds:
        built_s = seconds["base"] + seconds["executor"]
        rows.append(Goal("base and executor made", built_s, _BUILDS_S, "s"))
    goals(rows)


def missing_for_images(*programs: str) -> str | None:
    """The reason why no image can be built here, such as a missing program; None if one can."""
    if os.geteuid() != 0:
        return "a base image is made by root"
    missing = [name for name in (*_PROGRAMS, *programs) if shutil.which(name) is None]
    return f"no {', '.join(missing)}: packages of Debian" if missing else None


@contextmanager
def open_store(lasting: Path | None = None) -> Iterator[dict[str, str]]:
    """The variables with which podman keeps its images in a folder of its own.

    At the end of the context they are removed, unless `lasting` is that folder.
    """
    if lasting is not None:
        lasting.mkdir(parents=True, exist_ok=True)
        yield write_settings(lasting.resolve())
        return
    with tempfile.TemporaryDirectory(prefix="images-") as name:
        environ = write_settings(Path(name))
        try:
            yield environ
        finally:
            run("podman", "rmi", "--all", "--force", environ=environ)


@contextmanager
def open_driver_store(
    lasting: Path | None, certificates: Sequence[Path]
) -> Iterator[dict[str, str]]:
    """As `open_store`, with the image `driver` in it; exits where no container can run."""
    if reason := missing_for_images("iptables"):
        sys.exit(f"skipped: {reason}")
    with open_store(lasting) as environ:
        make_base(certificates, environ)
        build_image("driver", environ)
        yield environ


def write_settings(folder: Path) -> dict[str, str]:
    """Write podman's settings for a store in `folder`; returns the variables that name them."""
    store, engine = folder / "storage.conf", folder / "containers.conf"
    store.write_text(_STORE.format(folder=folder))
    engine.write_text(_ENGINE)
    return {
        **os.environ,
        "CONTAINERS_STORAGE_CONF": str(store),
        "CONTAINERS_CONF": str(engine),
    }


def run(*words: str | Path, environ: Mapping[str, str]) -> str:
    """The output of a command, which must succeed; its errors are shown as they come."""
    return subprocess.run(
        [str(word) for word in words], env=environ, stdout=subprocess.PIPE, text=True, check=True
    ).stdout


def make_base(certificates: Sequence[Path], environ: Mapping[str, str]) -> float:
    """Make the base image, unless it is there; returns the seconds."""
    began = time.monotonic()
    exists = ["podman", "image", "exists", f"localhost/{BASE}"]
    if subprocess.run(exists, env=environ, check=False).returncode != 0:
        run(IMAGES / "make-base.sh", BASE, *certificates, environ=environ)
    return time.monotonic() - began


def build_image(target: str, environ: Mapping[str, str]) -> float:
    """Build one image; returns the seconds, without those of stages that were built before."""
    began = time.monotonic()
    run(
        *("podman", "build", "--format", "docker", "--network", "host"),
        *("--file", IMAGES / "Dockerfile", "--ignorefile", IMAGES / "Dockerfile.dockerignore"),
        *("--target", target, "--build-arg", f"BASE=localhost/{BASE}"),
        *("--tag", name_image(target), ROOT),
        environ=environ,
    )
    return time.monotonic() - began


def build_stand_in(target: str, environ: Mapping[str, str]) -> str:
    """Build an image of stand_ins/Dockerfile, on the base or on `driver`; returns its name."""
    name = f"localhost/{target}:12"
    run(
        *("podman", "build", "--format", "docker", "--network", "host", "--target", target),
        *("--build-arg", f"BASE=localhost/{BASE}", "--build-arg", f"DRIVER={name_image('driver')}"),
        *("--tag", name, STAND_INS),
        environ=environ,
    )
    return name


def name_image(target: str) -> str:
    return f"localhost/downpour/{target}:0.1.0"


def read_size_mb(target: str, environ: Mapping[str, str]) -> float:
    """The size of an image with its layers, uncompressed."""
    size = run(
        "podman", "image", "inspect", "--format", "{{.Size}}", name_image(target), environ=environ
    )
    return int(size) / _MB


def try_image(target: str, environ: Mapping[str, str]) -> None:
    """Assert that an image runs what it is for, is confined, and has what its settings name."""
    confined = ("podman", "run", "--rm", "--network", "none", "--read-only", "--cap-drop", "ALL")
    # Podman leaves health checks to systemd, which may not be there.
    options = ("--no-healthcheck", "--tmpfs", "/tmp", "--tmpfs", "/opt/spark/work-dir")
    command = (*confined, *options, name_image(target))
    run(*command, *_TRIALS[target], environ=environ)
    run(
        *command,
        "python",
        "-c",
        f"import {_LIBRARIES}; numpy.eye(9) @ numpy.eye(9)",
        environ=environ,
    )
    assert run(*command, "id", "-u", environ=environ).strip() == "10001"
    checks = '{{join .Config.Healthcheck.Test " "}}'
    test = run(
        "podman", "image", "inspect", "--format", checks, name_image(target), environ=environ
    )
    run(*command, "test", "-x", test.split()[1], environ=environ)
    run(*command, "touch", "a-file", environ=environ)
    bill = json.loads(run(*command, "cat", f"/opt/downpour/share/{BILL}", environ=environ))
    names = {part["name"] for part in bill["components"]}
    assert {"downpour-sgd", "numpy", "libc6"} <= names, names
    print(f"{target}: {len(names)} packages in its bill of materials", flush=True)


if __name__ == "__main__":
    main()
