"""Shared libraries of an archive: found, copied into it, and referred to by relative paths.

A Python of a distribution, or one built from source, finds its libraries by absolute paths or in
the folders of the system. Here each library that it loads is copied into `lib/` of the archive, and
each file that needs one gets a run path relative to itself (`$ORIGIN`). Libraries that every Linux
has, by the policy for manylinux wheels (PEP 600), stay the host's: those of glibc must fit its
loader, and a second libstdc++ could displace a newer one that a driver of a GPU needs.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from shards.errors import BadInput, GiveUp

_ELF = b"\x7fELF"
_OF_HOST = re.compile(
    r"(ld-linux.*|linux-vdso|linux-gate|lib(c|m|dl|rt|pthread|util|resolv|nsl|nss_\w+|anl|mvec"
    r"|BrokenLocale|gcc_s|stdc\+\+))\.so.*"
)
_LOADED = re.compile(r"^\s+(\S+) => (/\S.*) \(0x[0-9a-f]+\)$")
_NOT_FOUND = re.compile(r"^\s+(\S+) => not found$")
_GLIBC = re.compile(rb"GLIBC_2\.(\d+)")
_MACHINES = {3: "i686", 40: "armv7l", 62: "x86_64", 183: "aarch64", 243: "riscv64", 21: "ppc64le"}
_BATCH = 200  # files in one call of ldd: it starts a process for each anyway


def list_programs(folder: Path) -> list[Path]:
    """The programs and shared libraries below a folder, in order: files in the format ELF."""
    return [path for path in _walk_files(folder) if _is_elf(path)]


def bundle_libraries(root: Path, files: Iterable[Path]) -> None:
    """Copy the libraries that `files` load into `root`/lib, and make their run paths relative.

    `files` are programs and libraries below `root`. Raises BadInput for a library that is missing
    here already, or where `patchelf` or `ldd` is.
    """
    library_folder = root / "lib"
    library_folder.mkdir(exist_ok=True)
    bundled: set[Path] = set()
    ahead = list(files)
    while ahead:
        copies: list[Path] = []
        for file, loaded in _list_libraries(ahead):
            outside = {
                name: path
                for name, path in loaded.items()
                if not path.is_relative_to(root) and not _OF_HOST.fullmatch(name)
            }
            for name, path in outside.items():
                copy = library_folder / name
                if copy not in bundled and not copy.exists():
                    shutil.copyfile(path.resolve(), copy)
                    copies.append(copy)
                bundled.add(copy)
            run_path = _read_run_path(file)
            own = [part for part in run_path if part.startswith("$ORIGIN")]
            if outside or own != run_path:
                relative = os.path.relpath(library_folder, file.parent)
                own.append("$ORIGIN" if relative == "." else f"$ORIGIN/{relative}")
                _patch("--set-rpath", ":".join(dict.fromkeys(own)), str(file))
        ahead = copies  # a copied library has needs of its own


def is_of_host(path: str) -> bool:
    """Return whether a library at this path is one that every host has."""
    return _OF_HOST.fullmatch(Path(path).name) is not None


def find_glibc(files: Iterable[Path]) -> str:
    """The oldest glibc with all the symbols that these programs and libraries ask for."""
    minors = (int(minor) for file in files for minor in _GLIBC.findall(file.read_bytes()))
    return f"2.{max(minors, default=0)}"


def machine_of(header: bytes) -> str | None:
    """The machine that a program is built for, by its first 20 bytes; None for no such program."""
    if header[:4] != _ELF or len(header) < 20:
        return None
    order = "little" if header[5] == 1 else "big"
    number = int.from_bytes(header[18:20], order)  # type: ignore[arg-type]  # one of the two words
    return _MACHINES.get(number, f"machine {number}")


def _walk_files(folder: Path) -> Iterator[Path]:
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names):
            path = Path(parent, name)
            if not path.is_symlink():
                yield path


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == _ELF


def _list_libraries(files: list[Path]) -> Iterator[tuple[Path, dict[str, Path]]]:
    """Each file, with the libraries that the loader finds for it, by name."""
    ldd = shutil.which("ldd")
    if ldd is None:
        raise BadInput("ldd", expected="the program", got="none on PATH", hint="install libc-bin")
    for start in range(0, len(files), _BATCH):
        batch = files[start : start + _BATCH]
        # Without LD_LIBRARY_PATH: what is found by it here is not found elsewhere.
        environ = {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C"}
        for path in batch:
            path.chmod(path.stat().st_mode | 0o500)  # else ldd warns, once a file
        done = subprocess.run(
            [ldd, *map(str, batch)], env=environ, capture_output=True, text=True, check=False
        )
        loaded: dict[Path, dict[str, Path]] = {path: {} for path in batch}
        current = batch[0]
        for line in done.stdout.splitlines():
            if line.endswith(":") and not line.startswith("\t"):
                current = Path(line[:-1])
            elif match := _LOADED.match(line):
                loaded[current][match[1]] = Path(match[2])
            elif match := _NOT_FOUND.match(line):
                # Some wheels name libraries that their package loads before, or an optional one.
                loaded[current].pop(match[1], None)
        yield from loaded.items()


def _read_run_path(file: Path) -> list[str]:
    return [part for part in _patch("--print-rpath", str(file)).strip().split(":") if part]


def _patch(*words: str) -> str:
    """Run patchelf, which is in the environment of this Python or on PATH."""
    own = Path(sys.executable).with_name("patchelf")
    program = str(own) if os.access(own, os.X_OK) else shutil.which("patchelf")
    if program is None:
        raise BadInput(
            "patchelf", expected="the program", got="none", hint="install the extra `pack`"
        )
    done = subprocess.run([program, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise GiveUp(f"patchelf {' '.join(words)} failed: {done.stderr.strip()}")
    return done.stdout
