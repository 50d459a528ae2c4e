"""Packs a Python for the machines of a cluster: the interpreter, its libraries and packages.

The archive runs wherever it is unpacked, on a machine with the same kind of processor and a glibc
that is new enough, without Python, checkout or network. Tools that pack a virtual environment leave
a link to the Python that it was made from, which exists on the builder's machine only; here the
interpreter and its standard library are copied, and libraries are found by relative paths.

Packages come from this environment, in the versions that the driver runs, or from wheels in a
folder. Equal input gives equal bytes: members are sorted, and have one time and one owner.
"""

import csv
import gzip
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, distribution, distributions
from importlib.resources import files
from pathlib import Path, PurePosixPath
from platform import machine, python_version
from typing import Any, NamedTuple

import msgspec

from deploy.clusters.archive_check import MANIFEST, ArchiveContents, check_links
from deploy.clusters.archive_libraries import (
    bundle_libraries,
    find_glibc,
    is_of_host,
    list_programs,
)
from deploy.clusters.bill_of_materials import BILL, describe_environment, write_bill
from deploy.clusters.requirements import (
    DISTRIBUTION,
    EXECUTOR,
    find_distributions,
    list_requirements,
)
from ps import __version__
from ps.build_id import build_id
from ps.whole_files import whole_file
from shards.errors import BadInput, GiveUp
from worker.spark.code_archive import PACKAGES

SUBMIT = "spark_submit.py"
LEVEL = 6
"""The usual level of compression: gzip's own."""
_SUFFIXES = (".tar.gz", ".tgz")
_PYTHON = f"python{sys.version_info[0]}.{sys.version_info[1]}"
_STDLIB = Path("lib") / _PYTHON
_TIME = 315_532_800  # 1 January 1980: the first time that a zip can have, later than none at all
_MODE = {True: 0o755, False: 0o644}  # executable or not
_STDLIB_EXTRAS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter",
                  "turtledemo", "ensurepip", "lib2to3", "__pycache__", "EXTERNALLY-MANAGED",
                  "sitecustomize.py", "usercustomize.py"}  # fmt: skip
"""Parts of the standard library that no worker needs, and what the builder's machine adds to it."""
_UNUSED_FOLDERS = {"__pycache__", "tests", "include"}
_UNUSED_SUFFIXES = (".a", ".pxd", ".pyx", ".pyi", ".pyc", ".h", ".hpp", ".c", ".cpp")
_INSTALLER_FILES = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "uv_cache.json"}
"""Notes of an installer, some with paths of the builder's machine."""

_SCRIPT = """\
#!/bin/sh
'''exec' "$(dirname -- "$(readlink -f -- "$0")")/{python}" "$0" "$@"
' '''
import sys
from {module} import {function}
sys.exit({attribute}())
"""

_TRIAL = """\
import importlib, json, sys
for name in ["bz2", "ctypes", "lzma", "sqlite3", "ssl", "zlib", *sys.argv[1:]]:
    importlib.import_module(name)
mapped = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
print(json.dumps({"paths": sys.path, "mapped": sorted(mapped)}))
"""
_MODULES = {
    EXECUTOR: ("worker.spark.worker_task", "pandas", "pyarrow"),
    "cli": ("deploy.cli.app",),
    "server": ("numba", "ray"),
}
"""The modules to import in the new Python, by extra."""


class Packed(NamedTuple):
    """A finished archive: its file, its size before and after compression, and its contents."""

    path: Path
    unpacked_bytes: int
    manifest: ArchiveContents


def pack(
    out: Path,
    extras: Sequence[str] = (),
    wheelhouse: Path | None = None,
    force: bool = False,
    level: int = LEVEL,
) -> Packed:
    """Write an archive with this Python, this project and its packages to `out`, a .tar.gz.

    It has what an executor needs, and the packages of further `extras`. With a `wheelhouse`, a
    folder of wheels, all packages are installed from there; without one, those of this environment
    are copied. `level` is gzip's, 1 to 9. Needs no network. Raises BadInput, before anything is
    written, for packages that are missing or have links out of the archive.
    """
    _check_target(out, force)
    if wheelhouse is not None and not wheelhouse.is_dir():
        raise BadInput("--wheelhouse", expected="a folder of wheels", got=wheelhouse)
    wanted = list(dict.fromkeys([EXECUTOR, *extras]))
    with tempfile.TemporaryDirectory(prefix="downpour-pack-", dir=out.absolute().parent) as folder:
        root = Path(folder).resolve() / "root"
        packages = None if wheelhouse is not None else _list_installed(wanted)
        _copy_interpreter(root)
        site = _site_packages(root)
        if packages is None:
            assert wheelhouse is not None
            _install_wheels(site, wheelhouse, list_requirements(wanted))
        else:
            for package in packages:
                _copy_distribution(package, site)
        _copy_project(root, site)
        _write_scripts(root, site)
        check_links(root)
        programs = list_programs(root)
        bundle_libraries(root, programs)
        _compile(root)
        manifest = _write_manifest(root, site, wanted)
        write_bill(root / BILL, describe_environment(site, root))
        check_links(root)
        _try_out(root, wanted)
        with whole_file(out) as partial:
            size = _write_tar(root, partial, level)
    return Packed(out, size, manifest)


def _check_target(out: Path, force: bool) -> None:
    if sys.platform != "linux":
        raise BadInput("downpour pack", expected="Linux", got=sys.platform)
    if not out.name.endswith(_SUFFIXES):
        raise BadInput(f"archive {out}", expected="a name that ends in .tar.gz", got=out.name)
    if out.exists() and not force:
        raise BadInput(f"archive {out} exists", hint="choose another name, or give --force")
    if not out.absolute().parent.is_dir():
        raise BadInput(f"archive {out}", expected="an existing folder", got=out.absolute().parent)


def _list_installed(extras: Sequence[str]) -> list[Distribution]:
    """The distributions of this environment that the extras need; raises BadInput if one lacks."""
    installed, missing = find_distributions(extras)
    if missing:
        raise BadInput(
            "this environment",
            expected=f"the packages of {', '.join(extras)}",
            got="; ".join(missing),
            hint="install these extras here, or give --wheelhouse with their wheels",
        )
    return list(installed.values())


def _copy_interpreter(root: Path) -> None:
    """Copy the interpreter below this environment, its standard library and its libraries."""
    (root / "bin").mkdir(parents=True)
    program = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    shutil.copyfile(program, root / "bin" / _PYTHON)
    (root / "bin" / _PYTHON).chmod(0o755)
    for name in ("python", "python3"):
        (root / "bin" / name).symlink_to(_PYTHON)

    def ignore(_: str, names: list[str]) -> list[str]:
        unused = {name for name in names if name.startswith(("config-", "_tkinter.", "_test"))}
        return sorted(unused | (_STDLIB_EXTRAS & set(names)))

    # With links followed: a distribution keeps parts of its standard library elsewhere.
    stdlib = Path(sysconfig.get_path("stdlib"))
    shutil.copytree(stdlib, root / _STDLIB, ignore=ignore, ignore_dangling_symlinks=True)
    _ignore_user_packages(root / _STDLIB / "site.py")
    bundle_libraries(root, list_programs(root))


def _ignore_user_packages(site: Path) -> None:
    """Have the new Python ignore packages in the home folder of its user."""
    text, setting = site.read_text(), "\nENABLE_USER_SITE = None\n"
    if setting not in text:
        raise GiveUp(f"{site.name} of this Python has no line {setting.strip()!r}: another Python?")
    site.write_text(text.replace(setting, "\nENABLE_USER_SITE = False\n"))


def _site_packages(root: Path) -> Path:
    """The folder below `root` from which the new Python imports packages; created."""
    asked = "import site; print(*site.getsitepackages(), sep='\\n')"
    folders = [Path(line) for line in _run_new_python(root, "-c", asked).splitlines()]
    inside = [folder for folder in folders if folder.is_relative_to(root)]
    if not inside:
        raise GiveUp(f"the copied Python imports from {folders}, not from where it is")
    inside[0].mkdir(parents=True, exist_ok=True)
    return inside[0]


def _copy_distribution(package: Distribution, site: Path) -> None:
    """Copy the files of an installed package that its users import."""
    name = package.metadata["Name"]
    listed = package.files
    editable = '"editable": true' in (package.read_text("direct_url.json") or "")
    if listed is None or editable:
        raise BadInput(
            f"package {name}",
            expected="an installation that lists its files",
            got="an editable one" if editable else "one without a RECORD",
            hint="install it again from a wheel, or give --wheelhouse",
        )
    copied = [file for file in listed if not _is_unused(file)]
    for file in copied:
        source = Path(str(package.locate_file(file)))
        if not source.exists():
            raise BadInput(
                source, expected=f"a file of {name}", got="none", hint="install it again"
            )
        target = site / file
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target, follow_symlinks=False)
    _write_record(site, copied)


def _write_record(site: Path, files: Sequence[PurePosixPath]) -> None:
    """Write which files a distribution has here, as those of its installer are not all copied.

    Without hashes, which the format allows: paths of libraries in them are yet to be changed.
    """
    names = sorted(file.as_posix() for file in files)
    # Ray contains whole packages, with their metadata in deeper folders.
    (folder,) = {file.parts[0] for file in files if file.parts[0].endswith(".dist-info")}
    record = f"{folder}/RECORD"
    with (site / record).open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([name, "", ""] for name in (*names, record))


def _is_unused(file: PurePosixPath) -> bool:
    """Return whether an installed file is left out: scripts and all that is not for import."""
    return (
        ".." in file.parts
        or file.is_absolute()
        or bool(_UNUSED_FOLDERS & set(file.parts[:-1]))
        or file.name.endswith(_UNUSED_SUFFIXES)
        or (file.parts[0].endswith(".dist-info") and file.name in _INSTALLER_FILES)
    )


def _install_wheels(site: Path, wheelhouse: Path, requirements: Iterable[object]) -> None:
    """Install from the wheels in a folder, without a network."""
    with tempfile.TemporaryDirectory(dir=site.parent) as folder:
        command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--isolated"]
        command += ["install", "--quiet", "--no-index", "--find-links", str(wheelhouse)]
        command += ["--only-binary", ":all:", "--no-compile", "--target", folder]
        done = subprocess.run(
            [*command, *map(str, requirements)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
            said = errors[-1] if errors else done.stderr.strip()
            raise BadInput(
                f"--wheelhouse {wheelhouse}",
                expected="wheels of all requirements",
                got=said.removeprefix("ERROR: "),
                hint="fill it with `pip wheel` or `pip download`",
            )
        for package in distributions(path=[folder]):
            _copy_distribution(package, site)


def _copy_project(root: Path, site: Path) -> None:
    """Copy this project's code, its metadata, and its application for spark-submit."""
    ignore = shutil.ignore_patterns("__pycache__")
    for package in PACKAGES:
        shutil.copytree(Path(str(files(package))), site / package, ignore=ignore)
    installed = distribution(DISTRIBUTION)
    folder = site / f"{DISTRIBUTION.replace('-', '_')}-{installed.version}.dist-info"
    folder.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (folder / name).write_text(installed.read_text(name) or "")
    shutil.copyfile(site / "deploy" / "cli" / SUBMIT, root / SUBMIT)
    shutil.move(site / "deploy" / "demo", root / "demo")  # the user's, where the user finds it
    parts = [site / package for package in PACKAGES] + [folder]
    copied = (path for part in parts for path in part.rglob("*") if path.is_file())
    _write_record(site, [PurePosixPath(path.relative_to(site)) for path in copied])


def _write_scripts(root: Path, site: Path) -> None:
    """Write the commands of all packages, which run the Python next to them."""
    for package in distributions(path=[str(site)]):
        for entry in package.entry_points.select(group="console_scripts"):
            script = root / "bin" / entry.name
            if script.exists():
                continue
            function = entry.attr.partition(".")[0]
            names = {"module": entry.module, "function": function, "attribute": entry.attr}
            script.write_text(_SCRIPT.format(python=_PYTHON, **names))
            script.chmod(0o755)


def _compile(root: Path) -> None:
    """Compile all modules: executors would do so again at each start, if they may write here.

    One process compiles them in order, because what it has compiled before shows in the bytes of a
    module. A module is not compared with its source: that has another time.
    """
    options = ["-q", "-q", "-s", str(root), "--invalidation-mode", "unchecked-hash"]
    _run_new_python(root, "-m", "compileall", *options, str(root / "lib"), may_fail=True)


def _write_manifest(root: Path, site: Path, extras: list[str]) -> ArchiveContents:
    packages = {str(one.metadata["Name"]): one.version for one in distributions(path=[str(site)])}
    manifest = ArchiveContents(
        version=__version__,
        build=build_id(),
        python=python_version(),
        machine=machine(),
        glibc=find_glibc(list_programs(root)),
        extras=extras,
        packages=dict(sorted(packages.items())),
    )
    (root / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")
    return manifest


def _try_out(root: Path, extras: Iterable[str]) -> None:
    """Raise GiveUp unless the new Python imports its packages, and all it uses is in `root`."""
    modules = [module for extra in extras for module in _MODULES.get(extra, ())]
    seen: dict[str, Any] = msgspec.json.decode(_run_new_python(root, "-c", _TRIAL, *modules))
    outside = [
        path
        for path in [*filter(None, seen["paths"]), *seen["mapped"]]
        if not Path(path).is_relative_to(root) and not is_of_host(path)
    ]
    if outside:
        raise GiveUp(f"the packed Python uses {outside[0]}, which is not in the archive")


def _run_new_python(root: Path, *words: str, may_fail: bool = False) -> str:
    """Run the copied interpreter away from this environment; returns its output."""
    environ = {
        "PATH": os.defpath,
        "PYTHONHASHSEED": "0",
        "HOME": "/nonexistent",
        "LC_ALL": "C.UTF-8",
    }
    # -B: a module that is compiled on the way has the time of its copy in it.
    command = [str(root / "bin" / _PYTHON), "-I", "-B", *words]
    done = subprocess.run(
        command, cwd="/", env=environ, capture_output=True, text=True, check=False
    )
    if done.returncode and not may_fail:
        said = (done.stderr.strip() or f"status {done.returncode}").splitlines()[-1]
        raise GiveUp(f"the packed Python does not run: {said}")
    return done.stdout


def _write_tar(root: Path, target: Path, level: int = LEVEL) -> int:
    """Write everything below `root`, in order and with one time and owner; returns its bytes."""
    size = 0
    with (
        target.open("wb") as raw,
        gzip.GzipFile("", "wb", compresslevel=level, fileobj=raw, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path in _members(root):
            member = tarfile.TarInfo(path.relative_to(root).as_posix())
            member.mtime = _TIME
            if path.is_symlink():
                member.type, member.linkname = tarfile.SYMTYPE, str(path.readlink())
                member.mode = 0o777
                archive.addfile(member)
            elif path.is_dir():
                member.type, member.mode = tarfile.DIRTYPE, 0o755
                archive.addfile(member)
            else:
                status = path.stat()
                member.size, member.mode = status.st_size, _MODE[bool(status.st_mode & 0o100)]
                size += status.st_size
                with path.open("rb") as content:
                    archive.addfile(member, content)
    return size


def _members(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir(), key=lambda path: path.name):
        yield path
        if path.is_dir() and not path.is_symlink():
            yield from _members(path)
